"""The function that joins a job, with options from its arguments and from the environment."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from racksum.options import ConnectOptions, limits_of_group
from racksum.session import Session

if TYPE_CHECKING:
    import os

__all__ = ["connect"]


def connect(
    aggregator: str | None = None,
    *,
    job: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    generation: int | None = None,
    lanes: int | None = None,
    pool_slots: int | None = None,
    multicast: bool | None = None,
    identity: str | os.PathLike[str] | None = None,
    insecure: bool | None = None,
    data_auth: str | None = None,
    wait: bool | None = None,
    rejoin: bool | None = None,
    on_rank_loss: str | None = None,
    join_timeout: float | None = None,
    timeout: float | None = None,
    mtu: int | None = None,
    interface: str | None = None,
    local_world: int | None = None,
) -> Session:
    """Joins a job at an aggregator and returns a session once all ranks of the job have joined.

    An option that is not given is read from the environment: from the variable named ``RACKSUM_``
    plus the option's name in capitals, or else from the torchrun variable named below.

    >>> session = racksum.connect("127.0.0.1:7177", job="digits", rank=0, world=1, timeout=30)
    >>> session.allreduce(np.ones(3, np.float32)).tolist()
    [1.0, 1.0, 1.0]
    >>> session.close()

    :param aggregator: Address of the aggregator, ``HOST:PORT``. ``A+B`` spreads the job over both
        aggregators. ``A,B`` makes B a standby: the job moves to B if A is lost or about to stop.
        ``unix:PATH`` is the socket of this host's sidecar, ``racksum worker``.
    :param job: Name of the job, 1 to 128 bytes. Ranks that pass the same name sum together.
        By default torchrun's run id, or else ``MASTER_ADDR`` and ``MASTER_PORT``, unless that
        address is a loopback address.
    :param rank: Number of this rank, from 0. By default torchrun's ``RANK``.
    :param world: Number of ranks, 1 to 256. By default torchrun's ``WORLD_SIZE``.
    :param generation: Number of this life of the job, from 0. Each restart must pass a greater
        number, which ends the earlier generations. By default torchrun's
        ``TORCHELASTIC_RESTART_COUNT``, or 0.
    :param lanes: Number of priority classes of ops, 1 to 8; by default 1. Lower-numbered lanes go
        first.
    :param pool_slots: The maximum number of windows that a lane may have in flight at a shard. With
        0, the default, the aggregator decides.
    :param multicast: Whether to receive results by multicast if the aggregator offers it; by
        default True.
    :param identity: Path of the identity file to connect with. Required for
        addresses other than loopback, unless ``insecure`` is set.
    :param insecure: Whether to connect to addresses other than loopback without identities; by
        default False.
    :param data_auth: How datagrams must be authenticated: ``"none"``, ``"mac"`` or ``"aead"``. By
        default the aggregator decides.
    :param wait: Whether to wait while the aggregator has no room for the job; by default False,
        which raises :class:`racksum.Refused` immediately.
    :param rejoin: Whether this rank closed its session between two ops and now rejoins the job; by
        default False. The other ranks must not start an op in the meantime.
    :param on_rank_loss: ``"abort"``, the default, ends the job when a rank is lost.
        ``"continue"`` lets the other ranks continue. All ranks must pass the same value.
    :param join_timeout: Seconds to wait until the aggregator answers and has room, and all ranks
        have joined. By default the timeout of torch's default process group, or 300 without one.
    :param timeout: Seconds that an op may take, including the wait for ranks that have not called
        it yet. By default the timeout of torch's default process group, or 60 without one.
    :param mtu: MTU of the path in bytes, 1280 to 65536. By default the interface's MTU.
    :param interface: Interfaces of this host to use, in the syntax of ``NCCL_SOCKET_IFNAME``. By
        default ``NCCL_SOCKET_IFNAME``, then ``GLOO_SOCKET_IFNAME``.
    :param local_world: Number of ranks of the job that are on this host and use its sidecar. By
        default torchrun's ``LOCAL_WORLD_SIZE``, or else ``world``.
    :return: The session, which can start ops immediately.
    :raises racksum.BadArgument: An option is invalid, or a required option is not set.
    :raises racksum.NoAggregator: The aggregator or the sidecar cannot be joined.
    :raises racksum.Refused: The aggregator or the sidecar refuses the rank.
    :raises racksum.JoinTimeout: Not all ranks joined within ``join_timeout``.
    :raises racksum.PeerLost: A rank was lost while the others joined.
    :raises racksum.NoRoom: With ``wait``, the aggregator had no room within ``join_timeout``.
    :raises racksum.Error: Joining failed for another reason.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return Session(ConnectOptions.resolve(**{**limits_of_group(_seconds_of_group()), **given}))


def _seconds_of_group() -> float | None:
    """Returns the timeout of torch's default process group in seconds, or None without a group."""
    if "torch.distributed" not in sys.modules:
        return None
    from racksum.group_timeout import timeout_of  # noqa: PLC0415 - this imports torch.

    return timeout_of(None)
