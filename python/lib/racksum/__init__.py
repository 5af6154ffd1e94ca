"""Sums the gradients of a training job at an aggregator near the rack.

:func:`connect` joins a job and returns a :class:`Session`. :meth:`Session.allreduce` reduces a
numpy array or a torch tensor in place:

>>> import numpy as np
>>> import racksum
>>> with racksum.connect("127.0.0.1:7177", job="demo", rank=0, world=1) as session:
...     x = np.ones(4, np.float32)
...     session.allreduce(x).tolist()
[1.0, 1.0, 1.0, 1.0]

:mod:`racksum.torch` has the hooks and the process group backend for PyTorch.

The examples in docstrings are tests. They run against an aggregator that ``racksum aggregator``
starts, with the variables that ``torchrun --nproc-per-node 1`` sets. The names ``racksum``, ``np``
and ``torch`` are imported, and ``session`` is the session of a job with one rank.
"""

from racksum import _racksum
from racksum.connecting import connect
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
from racksum.handle import Handle
from racksum.options import ConnectOptions
from racksum.session import Session

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
