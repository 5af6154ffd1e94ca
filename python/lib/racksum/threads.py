"""Threads that run tasks one after another, and threads that wait for ops."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["SerialExecutor", "Waiters", "do_waiting", "end_all"]

#: The total time, in seconds, that an ending process waits for its threads to end.
_PATIENCE = 5.0
#: The maximum number of idle threads to keep for later tasks.
_MOST_IDLE = 8


class SerialExecutor:
    """Runs tasks one after another on a thread, which starts with the first task.

    :param begin: Called once on the thread when it starts.
    """

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0
        _all.add(self)

    def do(self, task: Callable[[], None]) -> None:
        """Queues a task behind the tasks that are already queued."""
        with self._lock:
            # A forked child has none of its parent's threads.
            if self._pid != os.getpid():
                self._start()
        self._tasks.put(task)

    def _start(self) -> None:
        tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_do_all, args=(tasks, self._begin), name=self._name, daemon=True
        )
        # Change the executor only after this call, which raises if no more threads can start.
        thread.start()
        self._tasks, self._thread, self._pid = tasks, thread, os.getpid()
        # The thread ends when the executor is garbage-collected.
        weakref.finalize(self, tasks.put, None).atexit = False

    def is_current(self) -> bool:
        """Returns whether the caller runs on this executor's thread."""
        return self._thread is threading.current_thread()

    def drain(self) -> None:
        """Waits until all queued tasks are done, unless called on the executor's own thread."""
        if self._pid == os.getpid() and not self.is_current():
            drained = threading.Event()
            self.do(drained.set)
            drained.wait()

    def end(self) -> None:
        """Makes the thread end after the queued tasks, without waiting for it."""
        if self._thread is not None and self._pid == os.getpid():
            self._tasks.put(None)

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended or ``seconds`` have passed."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(seconds)


def _do_all(
    tasks: queue.SimpleQueue[Callable[[], None] | None], begin: Callable[[], None] | None
) -> None:
    if begin is not None:
        begin()
    while task := tasks.get():
        # Each task reports its errors itself, so ignore them. Even a panic must not end the thread.
        with contextlib.suppress(BaseException):
            task()
        # Drop the task's references before the thread waits for the next task.
        del task


class Waiters:
    """Runs tasks that wait, each on a thread of its own.

    The callbacks of an op may wait for another op, and ops end in any order, so no task may wait
    behind another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SerialExecutor] = []

    def do(self, task: Callable[[], None]) -> None:
        """Runs a task that waits, on an idle thread or a new one."""
        with self._lock:
            thread = self._idle.pop() if self._idle else SerialExecutor(self._name)

        def run_and_idle() -> None:
            try:
                task()
            finally:
                with self._lock:
                    if len(self._idle) < _MOST_IDLE:
                        self._idle.append(thread)

        thread.do(run_and_idle)


def do_waiting(task: Callable[[], None]) -> None:
    """Runs a task that waits, on a thread other than the caller's."""
    _waiters.do(task)


_all: weakref.WeakSet[SerialExecutor] = weakref.WeakSet()
_waiters = Waiters("racksum-futures")


def _begin_anew() -> None:
    """Replaces the locks in a forked child, which lacks the threads that may hold them."""
    _waiters._lock = threading.Lock()
    for thread in _all:
        thread._lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def end_all() -> None:
    """Ends all threads before Python finalizes; a thread still inside torch would abort Python."""
    threads = list(_all)
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
