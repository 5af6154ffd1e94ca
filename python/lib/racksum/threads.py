"""Threads that do one thing after the other, and threads that wait."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["SerialExecutor", "Waiters", "do_waiting", "end_all", "let_go"]

#: Seconds that the end of the process waits for all threads together.
_PATIENCE = 5.0
#: Threads that are kept when they have nothing to wait for.
_MOST_IDLE = 8


class SerialExecutor:
    """A thread, once there is something for it, that does one thing after the other.

    :param begin: What the thread calls once, when it starts.
    """

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self._name = name
        self._begin = begin
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
            target=_do_all, args=(things, self._begin), name=self._name, daemon=True
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


def _do_all(
    things: queue.SimpleQueue[Callable[[], None] | None], begin: Callable[[], None] | None
) -> None:
    if begin is not None:
        begin()
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
        self._idle: list[SerialExecutor] = []

    def do(self, thing: Callable[[], None]) -> None:
        """Has a thread do what waits."""
        with self._lock:
            thread = self._idle.pop() if self._idle else SerialExecutor(self._name)

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


_all: weakref.WeakSet[SerialExecutor] = weakref.WeakSet()
_waiters = Waiters("racksum-futures")


def _begin_anew() -> None:
    """In a fork there are no threads that would give a lock back."""
    _waiters._lock = threading.Lock()
    for thread in _all:
        thread._lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def end_all() -> None:
    """Ends threads while Python is there: one that it finds in torch would abort the process."""
    threads = list(_all)
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
