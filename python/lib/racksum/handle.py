"""Handles of ops in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from racksum.errors import WaitTimeout
from racksum.log import forward_logs
from racksum.options import seconds_from

if TYPE_CHECKING:
    import torch
    from torch.futures import Future

__all__ = ["Handle", "Outcome"]

T = TypeVar("T")
U = TypeVar("U")

#: Checks the timeout of a wait, in seconds.
_limit = seconds_from(0)


class Handle(Generic[T]):
    """An op in flight, on the host or on a GPU. A call with ``async_op=True`` returns a handle.

    The handle keeps the op's tensor alive. If the handle is dropped, the op still continues.

    >>> x = np.ones(4, np.float32)
    >>> handle = session.allreduce(x, async_op=True)
    >>> total = sum(range(100))  # Computes something that does not use x.
    >>> handle.wait().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        ends_within: Callable[[float | None], bool],
        make: Callable[[], Outcome[T]],
        *,
        device: torch.device | None = None,
        stage: Callable[[Callable[[], Handle[Any]], Callable[[Any], Any]], Handle[Any]]
        | None = None,
    ) -> None:
        """Makes a handle. Only the parts of racksum that start ops call this.

        :param ends_within: Waits until the op ends, or until the given number of seconds has
            passed; None means no limit. Returns whether the op has ended.
        :param make: Makes the outcome of an op that has ended, or raises its error.
        :param device: The GPU that holds the result; by default the result is in host memory.
        :param stage: Starts an op on that GPU, given a function that starts the op and a function
            that makes its result.
        """
        self._lock = threading.Lock()
        self._state: _Running[T] | Outcome[T] = _Running(ends_within, make)
        self._device = device
        self._stage = stage

    def done(self) -> bool:
        """Returns whether the op has ended, with a result or an error. Does not wait.

        >>> import time
        >>> handle = session.allreduce(np.ones(4, np.float32), async_op=True)
        >>> while not handle.done():
        ...     time.sleep(0.001)
        >>> handle.wait(0).tolist()
        [1.0, 1.0, 1.0, 1.0]

        :raises racksum.SessionClosed: This process was forked from the one that started the op.
        """
        return self._ends_within(0.0)

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the op to end and returns its result.

        If the result is on a GPU, the current stream waits for the copy to the GPU. This thread
        does not wait for the copy.

        >>> handle = session.allreduce(np.ones(4, np.float32), async_op=True)
        >>> handle.wait(timeout=30).tolist()
        [1.0, 1.0, 1.0, 1.0]

        :param timeout: The maximum number of seconds to wait, 0 or more. By default only the
            session's ``timeout`` limits the wait.
        :return: The result. Every wait returns the same object.
        :raises racksum.WaitTimeout: The op has not ended within ``timeout``. It continues.
        :raises racksum.BadArgument: ``timeout`` is not a finite number of seconds, 0 or more.
        :raises racksum.Error: The op failed. The class and the message give the cause.
        """
        limit = None if timeout is None else _limit("timeout", timeout)
        outcome = self._outcome(limit)
        outcome.reach()
        return outcome.result

    def then(self, work: Callable[[T], U]) -> Handle[U]:
        """Returns a handle of the same op whose result is ``work(result)``.

        ``work`` runs in the first wait for the new handle. If it raises, the next wait runs it
        again. If the result is on a GPU, ``work`` runs once, after the op has ended, on another
        thread and on a stream of its own.

        >>> handle = session.allreduce(np.ones(4, np.float32), async_op=True)
        >>> handle.then(lambda x: x.sum().item()).wait()
        4.0

        :param work: A function of this handle's result. If it raises, the wait raises its error.
        """
        if self._stage is not None:
            return self._stage(lambda: self, work)

        def make() -> Outcome[U]:
            outcome = self._outcome(None)
            return Outcome(work(outcome.result), outcome.absent)

        return Handle(self._ends_within, make)

    def get_future(self) -> Future[T]:
        """Returns a :class:`torch.futures.Future` of the result. Another thread completes it.

        >>> handle = session.allreduce(torch.ones(4), async_op=True)
        >>> handle.get_future().wait().tolist()
        [1.0, 1.0, 1.0, 1.0]

        :raises ModuleNotFoundError: torch is not installed.
        """
        from racksum.futures import future_of  # noqa: PLC0415 - this imports torch.

        return future_of(self.wait, [] if self._device is None else [self._device])

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks whose contributions the result lacks. Waits for the op to end.

        This is always empty unless the job was joined with ``on_rank_loss="continue"``.

        >>> session.allreduce(np.ones(4, np.float32), async_op=True).absent
        ()

        :raises racksum.Error: The op failed.
        """
        return self._outcome(None).absent

    def _ends_within(self, seconds: float | None) -> bool:
        state = self._state
        return isinstance(state, Outcome) or state.ends_within(seconds)

    def _outcome(self, timeout: float | None) -> Outcome[T]:
        ended = self._ends_within(timeout)
        forward_logs()
        if not ended:
            raise WaitTimeout(
                f"the op has not ended after {timeout} s; it continues, so wait again"
            )
        with self._lock:
            if isinstance(self._state, _Running):
                # If `make` fails or is interrupted, the next wait calls it again. Once `make` has
                # returned, this handle no longer refers to the op.
                self._state = self._state.make()
            return self._state


@dataclass(frozen=True)
class _Running(Generic[T]):
    """Functions of an op that has no outcome yet: one waits for the op, one makes its outcome."""

    ends_within: Callable[[float | None], bool]
    make: Callable[[], Outcome[T]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of an op, and the ranks whose contributions it lacks."""

    result: T
    absent: tuple[int, ...]
    #: Makes the current stream wait until the result is on the GPU. Every wait calls this.
    reach: Callable[[], None] = lambda: None
