"""Ops in flight as PyTorch has them: futures, and works of a process group."""

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
    """Has something done when backward ends; false if this is not called in one.

    DDP waits for futures in C++, where an exception would lose its type. This is done in the same
    place, just before that, on the thread that ran backward. The first step of a static graph calls
    hooks once backward has ended, and a rank whose data has ended takes part in the steps of others
    (``Join``) without one: there is no such place then.
    """
    if torch._C._current_autograd_node() is None:
        return False
    Variable._execution_engine.queue_callback(partial(_finish, finish))
    return True


@eager
def _finish(finish: Callable[[], Any]) -> None:
    finish()


class Waits(Protocol):
    """Something that ends."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for it, and returns its result."""
        ...


class Ends(Waits, Protocol):
    """Something with a result: an op of racksum's, or what another backend does."""

    def then(self, work: Callable[[Any], Any]) -> Ends:
        """The same with the result that ``work`` makes of this one's."""
        ...


class Parts:
    """What is waited for together."""

    def __init__(self, parts: Sequence[Waits]) -> None:
        self._parts = parts
        self._ended = 0

    def wait(self, seconds: float | None) -> None:
        """Waits for each, so long at most; a limit of zero is a look at whether all have ended."""
        if seconds == 0.0:
            self._look()
            return
        for part in self._parts:
            part.wait(seconds)

    def _look(self) -> None:
        # Thousands may be looked at again and again: a look goes on where the last one ended.
        for at in range(self._ended, len(self._parts)):
            self._parts[at].wait(0.0)
            self._ended = at + 1


class Pending:
    """What another backend does to tensors of the host."""

    def __init__(self, work: dist.Work, then: Callable[[Any], Any] = lambda result: result) -> None:
        self._work = work
        self._then = then
        self._lock = threading.Lock()
        self._result: list[Any] = []

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for it once, whoever asks: Gloo waits forever for what was received already."""
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
            # Others take a limit of zero for none.
            raise _goes_on(timeout)
        else:
            try:
                self._work.wait(timedelta(seconds=timeout))
            except RuntimeError as error:
                if not self._work.is_completed():
                    raise _goes_on(timeout) from error
                # It has ended since, or with this error.
                self._work.wait()

    def then(self, work: Callable[[Any], Any]) -> Pending:
        """The same with something to do after it."""
        return Pending(self._work, lambda result: work(self._then(result)))


def _goes_on(timeout: float | None) -> WaitTimeout:
    return WaitTimeout(f"the collective goes on after {timeout} s")


@eager_methods
class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective in flight, and the tensors that it writes to.

    Users have torch's own object in front of it, which asks it for no more than this: they find out
    whether it has ended from its future.

    :param in_flight: Where it is until somebody has noticed its end.
    :param seconds: How long to wait if nobody says so.
    :param shown: The collective that the profiler shows waits for.
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
        """Waits for all of it; a limit of zero is none.

        Of tensors of a GPU, the current stream waits for what is still on its way to them.

        :raises racksum.WaitTimeout: It has not ended in that time; it goes on.
        """
        with waiting(self._shown if self in self._in_flight else None):
            self.wait_for(timeout.total_seconds() if timeout else self._seconds)
        return True

    def wait_for(self, seconds: float | None) -> None:
        """Waits for all of it, for each part so long at most."""
        try:
            self._parts.wait(seconds)
        except WaitTimeout:
            # It goes on, and what comes later has to know of it.
            raise
        except RuntimeError:
            self._in_flight.pop(self, None)
            raise
        self._in_flight.pop(self, None)

    def has_ended(self) -> bool:
        """Whether it has, with a result or an error; then nothing but its holders keeps it."""
        try:
            self.wait_for(0.0)
        except WaitTimeout:
            return False
        except Exception:
            self._in_flight.pop(self, None)
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the tensors, which has ended if the work was waited for."""
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
            # DDP waits in C++, where an error has no type: this raises it before.
            at_end_of_backward(self.wait)
        return ended.then(self.result_after)

    def result_after(self, _: Future[None]) -> list[torch.Tensor]:
        """Gives the tensors, in what a future calls once it has ended."""
        self.wait()
        return self._result


class Before(NamedTuple):
    """A work that was started before another, and is a part of it."""

    work: Work

    def wait(self, timeout: float | None = None) -> None:
        """Waits for it."""
        self.work.wait_for(timeout)


@contextlib.contextmanager
def writing_to(x: torch.Tensor) -> Iterator[None]:
    """Lets a tensor be written to that autograd watches, or that was made in inference mode.

    Writing to a sparse tensor gives it new entries. The user holds them, so they are made in the
    mode in which the tensor was made.
    """
    # Leaving inference mode has autograd watch again, so that comes first.
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        yield


def write(x: torch.Tensor, result: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """Copies a result to a tensor, as :func:`writing_to` lets it; returns the tensor."""
    with writing_to(x):
        return x.copy_(result, non_blocking=non_blocking)


def copying(copy: torch.Tensor, x: torch.Tensor) -> Callable[[object], object]:
    """Copies to a tensor, which autograd does not count: it does not count what Gloo writes."""
    return lambda _: write(x.data, copy)


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Has autograd count a write to each, where it counts one of Gloo's."""
    counted = [x for x in tensors if not x.is_inference()]
    torch.autograd.graph.increment_version(counted)
