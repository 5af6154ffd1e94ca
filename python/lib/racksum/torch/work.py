"""Ops in flight as PyTorch sees them: futures, and works of a process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from racksum.eager import eager, eager_methods
from racksum.errors import WaitTimeout
from racksum.futures import new_future, own_streams_on
from racksum.handle import Handle, Outcome
from racksum.threads import do_waiting
from racksum.torch.profiled import waiting

__all__ = [
    "Parts",
    "Wait",
    "Work",
    "at_end_of_backward",
    "copying",
    "count_writes",
    "handle_of",
    "write",
    "writing_to",
]


def at_end_of_backward(finish: Callable[[], Any]) -> bool:
    """Schedules a function for the end of the current backward. Returns false outside of one.

    DDP waits for futures in C++, where an exception would lose its type. The function runs just
    before that, on the thread that ran backward, so its exceptions keep their types.

    Hooks run outside of a backward in two cases: in the first step of a static graph, and at a
    rank that has run out of data and takes part in the steps of others (``Join``).
    """
    if torch._C._current_autograd_node() is None:
        return False
    Variable._execution_engine.queue_callback(partial(_finish, finish))
    return True


@eager
def _finish(finish: Callable[[], Any]) -> None:
    finish()


#: A function that waits for a part of a collective, given a limit in seconds or None for no limit.
Wait = Callable[[float | None], object]


class Parts:
    """The parts of a collective, which are waited for together.

    :param waits: For each part, a function that waits for it.
    """

    def __init__(self, waits: Sequence[Wait]) -> None:
        self._waits = waits
        self._ended = 0

    def wait(self, seconds: float | None) -> None:
        """Waits up to ``seconds`` for each part. Zero only checks whether all parts have ended."""
        if seconds == 0.0:
            self._look()
            return
        for wait in self._waits:
            wait(seconds)

    def _look(self) -> None:
        # With thousands of parts and many checks, a check must start where the last one stopped.
        for at in range(self._ended, len(self._waits)):
            self._waits[at](0.0)
            self._ended = at + 1


def handle_of(work: dist.Work) -> Handle[None]:
    """Returns a handle of another backend's op on host tensors."""
    # Only one of several callers waits: in Gloo, a second wait for a receive never ends.
    lock, has_waited = threading.Lock(), False

    def ends_within(seconds: float | None) -> bool:
        nonlocal has_waited
        if not lock.acquire(timeout=-1 if seconds is None else seconds):
            return False
        try:
            if has_waited or work.is_completed():
                return True
            if seconds == 0:
                # To other backends, zero means no limit.
                return False
            if seconds is None:
                work.wait()
            else:
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    # The op may have ended or failed in that time; then `make` returns or raises.
                    return bool(work.is_completed())
            has_waited = True
            return True
        finally:
            lock.release()

    def make() -> Outcome[None]:
        nonlocal has_waited
        if not has_waited:
            # The op has ended, so this does not wait. It raises the op's error if there is one.
            work.wait()
            has_waited = True
        return Outcome(None, ())

    return Handle(ends_within, make)


@eager_methods
class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective in flight, and the tensors that it writes to.

    Users see it through an object of torch, which forwards only ``wait`` and ``get_future``. So
    only the future tells them whether the collective has ended.

    :param waits: For each part of the collective, a function that waits for it.
    :param result: The tensors that the collective writes to.
    :param in_flight: The works in flight, which hold this work until its end is noticed.
    :param seconds: Limit in seconds of a wait that has no timeout of its own; by default none.
    :param shown: The collective's name in the profiler's wait events.
    """

    def __init__(
        self,
        waits: Sequence[Wait],
        result: list[torch.Tensor],
        in_flight: dict[Work, None],
        seconds: float | None = None,
        *,
        shown: str | None = None,
    ) -> None:
        super().__init__()
        self._parts = Parts(waits)
        self._result = result
        self._in_flight = in_flight
        self._seconds = seconds
        self._shown = shown
        in_flight[self] = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the collective to end. Without a timeout, or with zero, its own limit applies.

        If the tensors are on a GPU, the current stream waits until the results are copied to them.

        :raises racksum.WaitTimeout: The collective has not ended within ``timeout``. It continues.
        :raises racksum.Error: The collective failed.
        """
        with waiting(self._shown if self in self._in_flight else None):
            self.wait_for(timeout.total_seconds() if timeout else self._seconds)
        return True

    def wait_for(self, seconds: float | None) -> None:
        """Waits for the collective to end, and for each of its parts at most ``seconds``."""
        try:
            self._parts.wait(seconds)
        except WaitTimeout:
            # Keep the work among those in flight: later collectives may have to wait for it.
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
        """Returns a future of the tensors. It is already complete if the work was waited for."""
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
            # DDP waits in C++, where an error loses its type. This raises the error before that.
            at_end_of_backward(self.wait)
        return ended.then(self.result_after)

    def result_after(self, _: Future[None]) -> list[torch.Tensor]:
        """Returns the tensors, or raises the collective's error. A completed future calls this."""
        self.wait()
        return self._result


@contextlib.contextmanager
def writing_to(x: torch.Tensor) -> Iterator[None]:
    """Permits the block to write to a tensor that autograd tracks, or to an inference tensor.

    A write to a sparse tensor gives it new entries, which users can reach. So the block runs in the
    mode in which the tensor was made.
    """
    # Leaving inference mode enables autograd again, so disable autograd after that.
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        yield


def write(x: torch.Tensor, result: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """Copies a result to a tensor, in the modes of :func:`writing_to`, and returns the tensor."""
    with writing_to(x):
        return x.copy_(result, non_blocking=non_blocking)


def copying(copy: torch.Tensor, x: torch.Tensor) -> Callable[[object], object]:
    """Returns a function that copies to ``x``. As with Gloo, autograd does not count the write."""
    return lambda _: write(x.data, copy)


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Makes autograd count a write to each tensor, as it counts the writes of Gloo."""
    counted = [x for x in tensors if not x.is_inference()]
    torch.autograd.graph.increment_version(counted)
