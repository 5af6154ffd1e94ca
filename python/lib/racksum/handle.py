"""Ops in flight, as who calls them has them."""

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

#: How the limit of a wait is read.
_limit = seconds_from(0)


class Handle(Generic[T]):
    """An op in flight. It keeps its tensor; if it is dropped, the op goes on all the same."""

    def __init__(
        self, ends_within: Callable[[float | None], bool], make: Callable[[], Outcome[T]]
    ) -> None:
        self._lock = threading.Lock()
        self._state: _Running[T] | Outcome[T] = _Running(ends_within, make)

    def done(self) -> bool:
        """Whether the op has ended, with a result or an error."""
        return self._ends_within(0.0)

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the op to end, and returns its result.

        :raises racksum.WaitTimeout: It has not ended in so many seconds; it goes on.
        :raises racksum.Error: Why there is no result.
        """
        limit = None if timeout is None else _limit("timeout", timeout)
        return self._outcome(limit).result

    def then(self, work: Callable[[T], U]) -> Handle[U]:
        """The same op with the result that ``work`` makes of this one's, when it is waited for.

        Where it fails, it is called again whenever the op is waited for again.
        """

        def make() -> Outcome[U]:
            outcome = self._outcome(None)
            return Outcome(work(outcome.result), outcome.absent)

        return Handle(self._ends_within, make)

    def get_future(self) -> Future[T]:
        """A :class:`torch.futures.Future` of the result, which a thread completes."""
        from racksum.futures import future_of  # noqa: PLC0415 - only who calls this has torch.

        return future_of(self)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that the result lacks, in a job that goes on without those it loses."""
        return self._outcome(None).absent

    def _ends_within(self, seconds: float | None) -> bool:
        state = self._state
        return isinstance(state, Outcome) or state.ends_within(seconds)

    def _outcome(self, timeout: float | None) -> Outcome[T]:
        ended = self._ends_within(timeout)
        pass_on()
        if not ended:
            raise WaitTimeout(f"the op goes on after {timeout} s")
        with self._lock:
            if isinstance(self._state, _Running):
                # What fails or is interrupted can be made again, and its op is let go once it is.
                self._state = self._state.make()
            return self._state


@dataclass(frozen=True)
class _Running(Generic[T]):
    """An op that nobody has waited for, and what makes its outcome once it has ended."""

    ends_within: Callable[[float | None], bool]
    make: Callable[[], Outcome[T]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of an op."""

    result: T
    absent: tuple[int, ...]
