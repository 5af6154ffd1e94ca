"""Ops in flight as PyTorch has them: futures, and works of a process group."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

if TYPE_CHECKING:
    from racksum.session import Handle

__all__ = ["Pending", "Work", "at_end_of_backward", "future_of"]

T = TypeVar("T")


def at_end_of_backward(finish: Callable[[], Any]) -> bool:
    """Has something done when backward ends; false if this is not called in one.

    DDP waits for futures in C++, where an exception would lose its type. This is done in the same
    place, just before that, on the thread that ran backward. The first step of a static graph calls
    hooks once backward has ended, and a rank whose data has ended takes part in the steps of others
    (``Join``) without one: there is no such place then.
    """
    if torch._C._current_autograd_node() is None:
        return False
    Variable._execution_engine.queue_callback(finish)
    return True


class Pending(NamedTuple):
    """Something that ends: an op of racksum's, or what another backend does."""

    wait: Callable[[float | None], Any]

    @classmethod
    def of_work(cls, work: dist.Work) -> Pending:
        """What another backend does."""

        def wait(seconds: float | None) -> bool:
            if seconds is None or work.is_completed():
                return work.wait()
            # Others take a limit of zero for none.
            if seconds == 0:
                raise TimeoutError("the collective goes on")
            return work.wait(timedelta(seconds=seconds))

        return cls(wait)

    def then(self, finish: Callable[[], Any]) -> Pending:
        """The same, with something to do after it, once."""
        finished = False
        lock = threading.Lock()

        def wait(seconds: float | None) -> None:
            nonlocal finished
            self.wait(seconds)
            with lock:
                if not finished:
                    # It may write to what autograd watches, on a thread that did not ask for it.
                    with torch.inference_mode():
                        finish()
                    finished = True

        return Pending(wait)


class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective in flight, and the tensors that it writes to.

    Users have torch's own object in front of it, which asks it for no more than this: they find out
    whether it has ended from its future.

    :param in_flight: Where it is until somebody has noticed its end.
    :param seconds: How long to wait if nobody says so.
    """

    def __init__(
        self,
        parts: Sequence[Pending],
        result: list[torch.Tensor],
        in_flight: dict[Work, None],
        seconds: float | None = None,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._result = result
        self._in_flight = in_flight
        self._seconds = seconds
        in_flight[self] = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of it; a limit of zero is none."""
        self.wait_for(timeout.total_seconds() if timeout else self._seconds)
        return True

    def wait_for(self, seconds: float | None) -> None:
        """Waits for all of it, for each part so long at most."""
        try:
            for part in self._parts:
                part.wait(seconds)
        except RuntimeError:
            self._in_flight.pop(self, None)
            raise
        self._in_flight.pop(self, None)

    def has_ended(self) -> bool:
        """Whether it has, with a result or an error; then nothing but its holders keeps it."""
        try:
            self.wait_for(0.0)
        except RuntimeError:
            return True
        except TimeoutError:
            return False
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the tensors, which has ended if the work was waited for."""
        ended: Future[None] = Future()

        def complete() -> None:
            try:
                self.wait()
            finally:
                ended.set_result(None)

        if self not in self._in_flight:
            ended.set_result(None)
        elif not at_end_of_backward(complete):
            _completer.do(complete)
        # What is raised here is an error for those as well who wait in C++.
        return ended.then(self._result_after)

    def _result_after(self, _: Future[None]) -> list[torch.Tensor]:
        self.wait()
        return self._result


def future_of(handle: Handle[T]) -> Future[T]:
    """A future of an op's result, which a thread completes: ops in the order of these calls."""
    future: Future[T] = Future()

    def complete() -> None:
        try:
            future.set_result(handle.wait())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    _completer.do(complete)
    return future


class _Completer:
    """A thread, once there is something for it, that waits for ops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pid = 0

    def do(self, thing: Callable[[], None]) -> None:
        """Has the thread do something after what it was given before."""
        with self._lock:
            # A fork has no threads of the process that it was forked from.
            if self._pid != os.getpid():
                self._pid, self._things = os.getpid(), queue.SimpleQueue()
                arguments = (self._things,)
                threading.Thread(
                    target=_do_all, args=arguments, name="racksum-futures", daemon=True
                ).start()
        self._things.put(thing)


def _do_all(things: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        # Whoever has the future is told.
        with contextlib.suppress(Exception):
            things.get()()


_completer = _Completer()
