"""The exceptions of racksum, one class for each cause.

Every class derives from :class:`Error`. Some also derive from a built-in exception, such as
``TimeoutError``, and can be caught as that exception.
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
    """Base class of the errors that racksum raises."""


class BadArgument(Error, ValueError):
    """An argument or a tensor is invalid; nothing was sent.

    ``options`` holds the names of the invalid arguments, as far as they are known.
    """

    def __init__(self, text: str, options: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.options = tuple(options)


class Refused(Error):
    """The aggregator or the sidecar refuses the rank, by its rules, its limits or its jobs.

    For example, another rank may have joined under the same number.
    """


class VersionMismatch(Refused):
    """The aggregator or the sidecar speaks another version of the protocol."""


class NoRoom(Refused):
    """The aggregator had no room for the job until ``join_timeout`` was over (``wait=True``)."""


class NoAggregator(Error, ConnectionError):
    """No aggregator or sidecar can be joined, or none is left to continue the job.

    While joining: nothing answers at the address, datagrams do not get through, or one side does
    not accept the other's certificate. In an op: the aggregator of the job is gone, and its
    standbys cannot be reached or refuse the job. Then the session is over.
    """


class JoinTimeout(Error, TimeoutError):
    """Not all ranks joined in time. ``missing`` holds the ranks that had not joined."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class OpTimeout(Error, TimeoutError):
    """An op did not end in time; the session is over.

    ``missing`` holds the ranks that the op was waiting for.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class WaitTimeout(Error, TimeoutError):
    """An op has not ended within the timeout passed to ``wait``. The op goes on."""


class PeerLost(Error, ConnectionError):
    """Ranks that an op or a join needs are gone. ``ranks`` holds their numbers."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class Mismatch(Error, ValueError):
    """The ranks called an op with different arguments. The session goes on."""


class Overflow(Error, OverflowError):
    """A tensor holds a value that ``fixed32`` cannot carry. The session goes on.

    ``element`` is the index of the first element of the block with that value.
    """

    def __init__(self, text: str, element: int = 0) -> None:
        super().__init__(text)
        self.element = element


class SessionClosed(Error):
    """The session is over, or it belongs to the process that this one was forked from."""
