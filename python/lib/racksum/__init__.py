"""Sums the gradients of a training job at an aggregator near the rack.

:func:`connect` joins a job and returns a :class:`Session`. :meth:`Session.allreduce` reduces a
numpy array or a torch tensor in place::

    import numpy as np
    import racksum

    with racksum.connect("127.0.0.1:7177", job="demo", rank=0, world=1) as session:
        x = np.ones(4, np.float32)
        session.allreduce(x)

:mod:`racksum.torch` has the hooks and the process group backend for PyTorch.
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
