"""Ops in flight in PyTorch's terms: futures, and works of a process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from racksum.eager import eager, eager_methods
from racksum.errors import WaitTimeout
from racksum.futures import new_future, own_streams_on
from racksum.threads import do_waiting
from racksum.torch.profiled import waiting

__all__ = [
    "Before",
    "Ends",
    "Parts",
    "Pending",
    "Waits",
    "Work",
    "at_end_of_backward",
    "copying",
    "count_writes",
    "write",
    "writing_to",
]


def at_end_of_backward(finish: Callable[[], Any]) -> bool:
    """Calls a function when the current backward ends. Returns false outside of a backward.

    DDP waits for futures in C++, where an exception would lose its type. The function runs just
    before that, on the thread that ran backward, so its exceptions keep their types.

    Two callers are outside of a backward: the first step of a static graph calls hooks after
    backward, and a rank that has run out of data takes part in the steps of others (``Join``).
    """
    if torch._C._current_autograd_node() is None:
        return False
    Variable._execution_engine.queue_callback(partial(_finish, finish))
    return True


@eager
def _finish(finish: Callable[[], Any]) -> None:
    finish()


class Waits(Protocol):
    """The interface of operations that can be waited for."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end, for ``timeout`` seconds at most, and returns the result."""
        ...


class Ends(Waits, Protocol):
    """The interface of operations with a result, of racksum or of another backend."""

    def then(self, work: Callable[[Any], Any]) -> Ends:
        """Returns the operation with ``work`` applied to its result."""
        ...


class Parts:
    """Operations that are waited for together."""

    def __init__(self, parts: Sequence[Waits]) -> None:
        self._parts = parts
        self._ended = 0

    def wait(self, seconds: float | None) -> None:
        """Waits for each, for ``seconds`` at most. Zero only checks whether all have ended."""
        if seconds == 0.0:
            self._look()
            return
        for part in self._parts:
            part.wait(seconds)

    def _look(self) -> None:
        # There may be thousands of parts and many checks, so a check starts where the last stopped.
        for at in range(self._ended, len(self._parts)):
            self._parts[at].wait(0.0)
            self._ended = at + 1


class Pending:
    """An operation of another backend on host tensors."""

    def __init__(self, work: dist.Work, then: Callable[[Any], Any] = lambda result: result) -> None:
        self._work = work
        self._then = then
        self._lock = threading.Lock()
        self._result: list[Any] = []

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end and returns the result.

        Of several callers only one waits, because Gloo's second wait for a receive never ends.
        """
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise _goes_on(timeout)
        try:
            if not self._result:
                self._wait(timeout)
                self._result.append(self._then(None))
        finally:
            self._lock.release()
        return self._result[0]

    def _wait(self, timeout: float | None) -> None:
        if timeout is None or self._work.is_completed():
            self._work.wait()
        elif timeout == 0:
            # To other backends, zero means no limit.
            raise _goes_on(timeout)
        else:
            try:
                self._work.wait(timedelta(seconds=timeout))
            except RuntimeError as error:
                if not self._work.is_completed():
                    raise _goes_on(timeout) from error
                # It has ended meanwhile, or failed with this error.
                self._work.wait()

    def then(self, work: Callable[[Any], Any]) -> Pending:
        """Returns the operation with ``work`` applied to its result."""
        return Pending(self._work, lambda result: work(self._then(result)))


def _goes_on(timeout: float | None) -> WaitTimeout:
    return WaitTimeout(f"the collective has not ended after {timeout} s; it goes on, so wait again")


@eager_methods
class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective in flight, and the tensors that it writes to.

    Users see it through an object of torch, which calls only ``wait`` and ``get_future``. So only
    the future tells them whether the collective has ended.

    :param parts: The operations of the collective.
    :param result: The tensors that it writes to.
    :param in_flight: The works in flight, which hold this work until its end is noticed.
    :param seconds: Seconds that a wait without a timeout lasts; by default without a limit.
    :param shown: The name of the collective in the profiler's events of waits.
    """

    def __init__(
        self,
        parts: Sequence[Waits],
        result: list[torch.Tensor],
        in_flight: dict[Work, None],
        seconds: float | None = None,
        *,
        shown: str | None = None,
    ) -> None:
        super().__init__()
        self._parts = Parts(parts)
        self._result = result
        self._in_flight = in_flight
        self._seconds = seconds
        self._shown = shown
        in_flight[self] = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the collective to end. A timeout of zero means no limit.

        The current stream of a GPU waits for copies that are still on their way to its tensors.

        :raises racksum.WaitTimeout: The collective has not ended within ``timeout``. It goes on.
        :raises racksum.Error: The collective failed.
        """
        with waiting(self._shown if self in self._in_flight else None):
            self.wait_for(timeout.total_seconds() if timeout else self._seconds)
        return True

    def wait_for(self, seconds: float | None) -> None:
        """Waits for the collective to end, for each part ``seconds`` at most."""
        try:
            self._parts.wait(seconds)
        except WaitTimeout:
            # It stays in flight, because it goes on and later collectives must know of it.
            raise
        except RuntimeError:
            self._in_flight.pop(self, None)
            raise
        self._in_flight.pop(self, None)

    def has_ended(self) -> bool:
        """Returns whether the collective has ended, and if so removes it from those in flight."""
        try:
            self.wait_for(0.0)
        except WaitTimeout:
            return False
        except Exception:
            self._in_flight.pop(self, None)
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Returns a future of the tensors. It is complete already if the work was waited for."""
        devices = {tensor.device for tensor in self._result}
        ended = new_future(devices)

        def complete() -> None:
            try:
                with own_streams_on(devices):
                    self.wait()
            finally:
                ended.set_result(None)

        if self not in self._in_flight:
            ended.set_result(None)
        else:
            do_waiting(complete)
            # DDP waits in C++, where an error loses its type. This raises it before.
            at_end_of_backward(self.wait)
        return ended.then(self.result_after)

    def result_after(self, _: Future[None]) -> list[torch.Tensor]:
        """Returns the tensors, or raises the error of the collective, when a future has ended."""
        self.wait()
        return self._result


class Before(NamedTuple):
    """An earlier work that is a part of a later one, as for a barrier."""

    work: Work

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the earlier work."""
        self.work.wait_for(timeout)


@contextlib.contextmanager
def writing_to(x: torch.Tensor) -> Iterator[None]:
    """Permits the block to write to a tensor of autograd or of inference mode.

    A write to a sparse tensor gives it new entries, which users can reach. So the block runs in the
    mode in which the tensor was made.
    """
    # Leaving inference mode enables autograd again, so disable autograd second.
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        yield


def write(x: torch.Tensor, result: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """Copies a result to a tensor, in the modes of :func:`writing_to`, and returns the tensor."""
    with writing_to(x):
        return x.copy_(result, non_blocking=non_blocking)


def copying(copy: torch.Tensor, x: torch.Tensor) -> Callable[[object], object]:
    """Returns a function that copies to a tensor. As with Gloo, autograd does not count that."""
    return lambda _: write(x.data, copy)


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Makes autograd count a write to each tensor, where it counts Gloo's."""
    counted = [x for x in tensors if not x.is_inference()]
    torch.autograd.graph.increment_version(counted)
