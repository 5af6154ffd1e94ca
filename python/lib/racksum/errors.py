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
    """Base class of the errors that racksum raises.

    >>> try:
    ...     session.allreduce([1.0, 2.0])
    ... except racksum.Error as error:
    ...     print(error)
    only numpy arrays and torch tensors can be reduced, not list
    """


class BadArgument(Error, ValueError):
    """An argument or a tensor is invalid, or a tensor's memory was replaced during its op.

    ``options`` holds the names of the invalid arguments, as far as they are known.

    >>> try:
    ...     racksum.connect("127.0.0.1:7177", job="digits", rank=0, world=0)
    ... except racksum.BadArgument as error:
    ...     print(error.options, error)
    ('world',) world must be a whole number from 1 to 256, not 0
    """

    def __init__(self, text: str, options: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.options = tuple(options)


class Refused(Error):
    """The aggregator or the sidecar refuses the rank.

    The cause is a rule, a limit, or another rank or job. In this example, a rank with the same
    number has already joined:

    >>> racksum.connect("127.0.0.1:7177", job=session.job, rank=0, world=1)
    Traceback (most recent call last):
        ...
    racksum.errors.Refused: the aggregator refused: ...
    """


class VersionMismatch(Refused):
    """The aggregator or the sidecar speaks another version of the protocol.

    >>> racksum.connect("unix:/run/racksum", job="digits", rank=0, world=1)
    Traceback (most recent call last):
        ...
    racksum.errors.VersionMismatch: the sidecar speaks protocol version 2, but this rank speaks ...
    """


class NoRoom(Refused):
    """With ``wait=True``, the aggregator had no room for the job within ``join_timeout``.

    >>> where, own = "127.0.0.1:7177", {"job": "digits", "rank": 0, "world": 1}
    >>> racksum.connect(where, **own, wait=True, join_timeout=10)
    Traceback (most recent call last):
        ...
    racksum.errors.NoRoom: no room for the job within 10 s: ...
    """


class NoAggregator(Error, ConnectionError):
    """No aggregator or sidecar can be joined, or none is left to continue the job.

    While joining: nothing answers at the address, datagrams do not get through, or one side does
    not accept the other's certificate. During an op: the aggregator of the job is lost, and the
    standbys cannot be reached or refuse the job; the session is over.

    >>> racksum.connect("127.0.0.1:9", job="digits", rank=0, world=1, join_timeout=1)
    Traceback (most recent call last):
        ...
    racksum.errors.NoAggregator: ...127.0.0.1:9...
    """


class JoinTimeout(Error, TimeoutError):
    """Not all ranks joined in time. ``missing`` holds the ranks that had not joined.

    >>> try:
    ...     racksum.connect("127.0.0.1:7177", job="digits", rank=0, world=2, join_timeout=10)
    ... except racksum.JoinTimeout as late:
    ...     print("ranks that did not join:", late.missing)
    ranks that did not join: (1,)
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class OpTimeout(Error, TimeoutError):
    """An op did not end in time; the session is over.

    ``missing`` holds the ranks that the op was waiting for. If rank 1 of two does not call the op:

    >>> try:
    ...     session.allreduce(np.ones(4, np.float32))
    ... except racksum.OpTimeout as late:
    ...     print("ranks that did not call:", late.missing)
    ranks that did not call: (1,)
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class WaitTimeout(Error, TimeoutError):
    """An op has not ended within the timeout passed to ``wait``. The op continues.

    If rank 1 of two has not called the op yet:

    >>> handle = session.allreduce(np.ones(4, np.float32), async_op=True)
    >>> handle.wait(0.01)
    Traceback (most recent call last):
        ...
    racksum.errors.WaitTimeout: the op has not ended after 0.01 s; it continues, so wait again
    """


class PeerLost(Error, ConnectionError):
    """Ranks that an op or a join needs are lost. ``ranks`` holds their numbers.

    If rank 1 of two has left the job:

    >>> try:
    ...     session.allreduce(np.ones(4, np.float32))
    ... except racksum.PeerLost as lost:
    ...     print("lost ranks:", lost.ranks)
    lost ranks: (1,)
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class Mismatch(Error, ValueError):
    """The ranks called an op with different arguments. The session remains open.

    The error shows the difference, unless the job has moved to another aggregator since. Then the
    error of another rank shows it.

    If rank 1 of two passes three elements:

    >>> session.allreduce(np.ones(4, np.float32))
    Traceback (most recent call last):
        ...
    racksum.errors.Mismatch: op ...: the ranks disagree: rank ... has ...; rank ... has ...
    """


class Overflow(Error, OverflowError):
    """A tensor holds a value that ``fixed32`` cannot carry. The session remains open.

    ``element`` is the index of the first element in the block that holds the value.

    >>> try:
    ...     session.allreduce(np.array([1.0, np.inf], np.float32), wire="fixed32")
    ... except racksum.Overflow as overflow:
    ...     print("in the block that begins at element", overflow.element)
    in the block that begins at element 0
    """

    def __init__(self, text: str, element: int = 0) -> None:
        super().__init__(text)
        self.element = element


class SessionClosed(Error):
    """The session is over, or it belongs to the process that this one was forked from.

    >>> session.close()
    >>> session.allreduce(np.ones(4, np.float32))
    Traceback (most recent call last):
        ...
    racksum.errors.SessionClosed: the session ended: the client was closed
    """
