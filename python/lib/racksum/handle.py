"""Handles of ops in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from racksum.errors import WaitTimeout
from racksum.log import pass_on
from racksum.options import seconds_from

if TYPE_CHECKING:
    from torch.futures import Future

__all__ = ["Handle", "Outcome"]

T = TypeVar("T")
U = TypeVar("U")

#: Checks the timeout of a wait, in seconds.
_limit = seconds_from(0)


class Handle(Generic[T]):
    """An op in flight, as ``Session.allreduce(x, async_op=True)`` returns it.

    The handle keeps the op's tensor alive. If the handle is dropped, the op still goes on.

    Example::

        handle = session.allreduce(x, async_op=True)
        ...  # compute something that does not use x
        handle.wait()
    """

    def __init__(
        self, ends_within: Callable[[float | None], bool], make: Callable[[], Outcome[T]]
    ) -> None:
        self._lock = threading.Lock()
        self._state: _Running[T] | Outcome[T] = _Running(ends_within, make)

    def done(self) -> bool:
        """Returns whether the op has ended, with a result or an error. Does not wait."""
        return self._ends_within(0.0)

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the op to end and returns its result.

        :param timeout: The most seconds to wait, 0 or more. By default there is no limit here; the
            session's ``timeout`` bounds the op.
        :raises racksum.WaitTimeout: The op has not ended within ``timeout``. It goes on.
        :raises racksum.BadArgument: ``timeout`` is not a finite number of seconds, 0 or more.
        :raises racksum.Error: The op failed. The class and the message give the cause.
        """
        limit = None if timeout is None else _limit("timeout", timeout)
        return self._outcome(limit).result

    def then(self, work: Callable[[T], U]) -> Handle[U]:
        """Returns a handle of the same op whose result is ``work`` applied to this one's result.

        ``work`` runs in the first wait for the new handle. If it raises, the next wait runs it
        again.
        """

        def make() -> Outcome[U]:
            outcome = self._outcome(None)
            return Outcome(work(outcome.result), outcome.absent)

        return Handle(self._ends_within, make)

    def get_future(self) -> Future[T]:
        """Returns a :class:`torch.futures.Future` of the result, which a thread completes."""
        from racksum.futures import future_of  # noqa: PLC0415 - this imports torch.

        return future_of(self)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks whose contributions the result lacks. Waits for the op to end.

        Only a job with ``on_rank_loss="continue"`` sums without a lost rank.

        :raises racksum.Error: The op failed.
        """
        return self._outcome(None).absent

    def _ends_within(self, seconds: float | None) -> bool:
        state = self._state
        return isinstance(state, Outcome) or state.ends_within(seconds)

    def _outcome(self, timeout: float | None) -> Outcome[T]:
        ended = self._ends_within(timeout)
        pass_on()
        if not ended:
            raise WaitTimeout(f"the op has not ended after {timeout} s; it goes on, so wait again")
        with self._lock:
            if isinstance(self._state, _Running):
                # If `make` fails or is interrupted, the next wait calls it again. Once it has
                # returned, nothing here refers to the op any more.
                self._state = self._state.make()
            return self._state


@dataclass(frozen=True)
class _Running(Generic[T]):
    """An op without an outcome yet, and the function that makes the outcome once it has ended."""

    ends_within: Callable[[float | None], bool]
    make: Callable[[], Outcome[T]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of an op, and the ranks whose contributions it lacks."""

    result: T
    absent: tuple[int, ...]
