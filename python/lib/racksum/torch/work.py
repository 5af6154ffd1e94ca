"""Ops in flight as PyTorch has them: futures, and works of a process group."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from racksum.eager import eager, eager_methods
from racksum.errors import WaitTimeout
from racksum.session import begin_ops_here, close_all
from racksum.torch.profiled import waiting

__all__ = [
    "Before",
    "Ends",
    "InOrder",
    "Parts",
    "Pending",
    "Waits",
    "Work",
    "as_exception",
    "at_end_of_backward",
    "copying",
    "count_writes",
    "do_waiting",
    "future_of",
    "let_go",
    "new_future",
    "own_streams_on",
    "write",
    "writing_to",
]

#: Seconds that the end of the process waits for all threads together.
_PATIENCE = 5.0
#: Threads that are kept when they have nothing to wait for.
_MOST_IDLE = 8


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
            _waiters.do(complete)
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


def new_future(devices: Iterable[torch.device]) -> Future[Any]:
    """A future of tensors on these devices; it has those wait for streams who wait for it."""
    return Future(devices=_with_streams(devices))


def future_of(op: Ends, devices: Iterable[torch.device] = ()) -> Future[Any]:
    """A future of an op's result, which a thread completes."""
    future = new_future(devices)

    def complete() -> None:
        try:
            with own_streams_on(devices):
                future.set_result(op.wait())
        except BaseException as error:
            future.set_exception(as_exception(error))

    _waiters.do(complete)
    return future


def as_exception(error: BaseException) -> Exception:
    """What is raised to whoever waits for what has ended with an error on another thread.

    A panic of the extension is no ``Exception``.
    """
    if isinstance(error, Exception):
        return error
    raised = RuntimeError(f"ended by {error!r}")
    raised.__cause__ = error
    return raised


@contextlib.contextmanager
def own_streams_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """Has what comes wait on streams of its own, and not on those that GPUs train on."""
    with contextlib.ExitStack() as stack:
        for device in _with_streams(devices):
            module = torch.get_device_module(device)
            stack.enter_context(module.device(device))
            stack.enter_context(module.stream(module.Stream(device)))
        yield


def _with_streams(devices: Iterable[torch.device]) -> list[Any]:
    return [device for device in devices if device.type != "cpu"]


class InOrder:
    """A thread, once there is something for it, that does one thing after the other.

    :param begins_ops: Whether it begins ops that other threads have called.
    """

    def __init__(self, name: str, *, begins_ops: bool = False) -> None:
        self._name = name
        self._begins_ops = begins_ops
        self._lock = threading.Lock()
        self._things: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0
        _all.add(self)

    def do(self, thing: Callable[[], None]) -> None:
        """Has the thread do something after what it was given before."""
        with self._lock:
            # A fork has no threads of the process that it was forked from.
            if self._pid != os.getpid():
                self._start()
        self._things.put(thing)

    def _start(self) -> None:
        things: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_do_all, args=(things, self._begins_ops), name=self._name, daemon=True
        )
        # There may be no room for another thread.
        thread.start()
        self._things, self._thread, self._pid = things, thread, os.getpid()
        # When nobody can give it anything any more, it ends.
        weakref.finalize(self, things.put, None).atexit = False

    def is_current(self) -> bool:
        """Whether this is the thread."""
        return self._thread is threading.current_thread()

    def drain(self) -> None:
        """Waits until all that the thread was given is done, unless it is this one."""
        if self._pid == os.getpid() and not self.is_current():
            drained = threading.Event()
            self.do(drained.set)
            drained.wait()

    def end(self) -> None:
        """Ends the thread after what it was given."""
        if self._thread is not None and self._pid == os.getpid():
            self._things.put(None)

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, so long at most."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(seconds)


def _do_all(things: queue.SimpleQueue[Callable[[], None] | None], begins_ops: bool) -> None:
    if begins_ops:
        begin_ops_here()
    while thing := things.get():
        # Whoever has the future is told. A panic too: the thread has more to do.
        with contextlib.suppress(BaseException):
            thing()
        # What it holds is let go before the next comes.
        del thing


class Waiters:
    """Threads that wait, as many as there is to be waited for.

    What is done when an op has ended, users' callbacks too, may wait for another op; and ops end in
    any order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[InOrder] = []

    def do(self, thing: Callable[[], None]) -> None:
        """Has a thread do what waits."""
        with self._lock:
            thread = self._idle.pop() if self._idle else InOrder(self._name)

        def do_and_rest() -> None:
            try:
                thing()
            finally:
                with self._lock:
                    if len(self._idle) < _MOST_IDLE:
                        self._idle.append(thread)

        thread.do(do_and_rest)


def do_waiting(thing: Callable[[], None]) -> None:
    """Has a thread of its own do what would keep this one waiting."""
    _waiters.do(thing)


def let_go(thing: object) -> None:
    """Has a thread give up its reference to something, for what takes long to end."""
    held = [thing]
    # Where no thread starts, the caller's reference is the last.
    with contextlib.suppress(RuntimeError):
        _waiters.do(held.clear)


_all: weakref.WeakSet[InOrder] = weakref.WeakSet()
_waiters = Waiters("racksum-futures")


def _begin_anew() -> None:
    """In a fork there are no threads that would give a lock back."""
    _waiters._lock = threading.Lock()
    for thread in _all:
        thread._lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _end_all() -> None:
    """Ends threads while Python is there: one that it finds in torch would abort the process."""
    close_all()
    threads = list(_all)
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
