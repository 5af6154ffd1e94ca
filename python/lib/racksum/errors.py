"""What can go wrong, one class per cause.

Every class is an :class:`Error`; those that are also of a built-in class can be caught as that.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BadArgument",
    "Error",
    "JoinTimeout",
    "Mismatch",
    "NoAggregator",
    "NoRoom",
    "OpTimeout",
    "Overflow",
    "PeerLost",
    "Refused",
    "SessionClosed",
    "VersionMismatch",
    "WaitTimeout",
]


class Error(RuntimeError):
    """Anything that racksum reports."""


class BadArgument(Error, ValueError):
    """An argument, or a tensor, that cannot be: nothing was sent.

    ``options`` are the arguments that it is about, by name.
    """

    def __init__(self, text: str, options: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.options = tuple(options)


class Refused(Error):
    """The aggregator does not take the rank: its rules, its limits, or another rank's claim."""


class VersionMismatch(Refused):
    """The aggregator, or the sidecar, speaks another version of the protocol."""


class NoRoom(Refused):
    """The aggregator had no room for the job for as long as it was waited for."""


class NoAggregator(Error, ConnectionError):
    """No aggregator or sidecar can be joined at, or none is left that goes on with the job.

    In joining: nobody answers at the address, datagrams do not pass, or one side does not accept
    the other's certificate. In an op: the one that had the job is gone, and none of its standbys
    takes over, as they cannot be reached or refuse. The session is over then.
    """


class JoinTimeout(Error, TimeoutError):
    """Not all ranks joined in time. ``missing`` are those that had not."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class OpTimeout(Error, TimeoutError):
    """An op did not end in time, and the session is over. ``missing`` are the ranks awaited."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class WaitTimeout(Error, TimeoutError):
    """An op has not ended in the seconds that ``wait`` was given. It goes on."""


class PeerLost(Error, ConnectionError):
    """Ranks are gone that are needed. ``ranks`` says which."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class Mismatch(Error, ValueError):
    """The ranks called an op differently. The session goes on."""


class Overflow(Error, OverflowError):
    """A value that ``fixed32`` cannot carry, in the block at ``element``. The session goes on."""

    def __init__(self, text: str, element: int = 0) -> None:
        super().__init__(text)
        self.element = element


class SessionClosed(Error):
    """The session is over, or is of a process that this one was forked from."""
