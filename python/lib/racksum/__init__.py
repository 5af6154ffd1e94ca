"""Sums the gradients of training jobs near the rack.

:func:`connect` joins a job at an aggregator; :meth:`Session.allreduce` reduces numpy arrays and
torch tensors in place. :mod:`racksum.torch` has what PyTorch's DDP takes.
"""

from racksum import _racksum
from racksum.errors import (
    BadArgument,
    Error,
    JoinTimeout,
    Mismatch,
    NoAggregator,
    NoRoom,
    OpTimeout,
    Overflow,
    PeerLost,
    Refused,
    SessionClosed,
    VersionMismatch,
    WaitTimeout,
)
from racksum.options import ConnectOptions
from racksum.session import Handle, Session, connect

__version__ = _racksum.VERSION

__all__ = [
    "BadArgument",
    "ConnectOptions",
    "Error",
    "Handle",
    "JoinTimeout",
    "Mismatch",
    "NoAggregator",
    "NoRoom",
    "OpTimeout",
    "Overflow",
    "PeerLost",
    "Refused",
    "Session",
    "SessionClosed",
    "VersionMismatch",
    "WaitTimeout",
    "__version__",
    "connect",
]
