"""Sessions for the ranks of process groups."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from racksum.errors import BadArgument
from racksum.group_timeout import timeout_of
from racksum.options import ConnectOptions, Drawn, limits_of_group
from racksum.session import Session
from racksum.torch.departures import converting_store_errors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["connect"]


def connect(
    aggregator: str | None = None, *, group: ProcessGroup | None = None, **options: Any
) -> Session:
    """Joins a job with the ranks of a process group. All of these ranks must call this together.

    >>> torch.distributed.init_process_group("gloo")
    >>> with racksum.torch.connect("127.0.0.1:7177") as session:
    ...     session.allreduce(torch.ones(3)).tolist()
    [1.0, 1.0, 1.0]

    The generation of the job is the Unix time at the group's first rank, in seconds, unless
    ``generation`` or ``RACKSUM_GENERATION`` sets it. So ranks that torchrun restarts end the
    earlier generation and need not wait for it.

    ``job``, ``RACKSUM_JOB`` or torchrun's ``--rdzv-id`` sets the job's name. Without these, a rank
    generates a random name, which the group's store keeps for all ranks.

    :param aggregator: Address of the aggregator, as for :func:`racksum.connect`.
    :param group: The process group; by default the group of all ranks. A smaller group sums
        separately, under a name made from the names of the job and the group. A second session that
        a group opens while its first is open also sums separately, unless ``generation`` is set.
    :param options: Options of :func:`racksum.connect`, except ``rank`` and ``world``. Both timeouts
        default to the group's timeout.
    :return: The session, whose ranks are numbered as in the group.
    :raises racksum.BadArgument: There is no process group, this process is not in ``group``, or an
        option is invalid.
    :raises racksum.Error: The same errors as :func:`racksum.connect`.
    """
    for name in ("rank", "world"):
        if name in options:
            raise BadArgument(f"{name} is not an option here: the process group sets it")
    if not dist.is_initialized():
        raise BadArgument("there is no process group; call torch.distributed.init_process_group")
    own = {"rank": dist.get_rank(group), "world": dist.get_world_size(group)}
    if own["rank"] < 0:
        raise BadArgument("this process is not in the group; call connect only on its ranks")
    # With a generation from the user, this session ends the group's earlier ones and takes the
    # first place.
    place = 0
    if not is_generation_given(options):
        first = _first_free(group)
        begun = [new_generation(_name_of(group, first)), first]
        dist.broadcast_object_list(begun, group_src=0, group=group)
        options["generation"], place = begun
    given = {name: value for name, value in options.items() if value is not None}
    limits = limits_of_group(timeout_of(group))
    options = {**limits, **given, **own, "aggregator": aggregator}
    found = ConnectOptions.resolve(drawn=drawn_in(default_store()), **options)
    name = _name_of(group, place)
    session = Session(of_group(found, name) if name else found)
    _open_of(group)[place] = weakref.ref(session)
    return session


def _name_of(group: ProcessGroup | None, place: int) -> str:
    """Returns a name for a group's session, which is empty for the default group's first session.

    No group on the ``racksum`` backend has this name.
    """
    further = f"session-{place + 1}" if place else ""
    if group is None or group is dist.group.WORLD:
        return further
    return f"{group.group_name}-{further or 'session'}"


def _open_of(group: ProcessGroup | None) -> dict[int, weakref.ref[Session]]:
    """Returns the sessions of a group by their places."""
    return _sessions.setdefault(cast("ProcessGroup", group or dist.group.WORLD), {})


def _first_free(group: ProcessGroup | None) -> int:
    """Returns the first place that no open session has."""
    taken = {at for at, held in _open_of(group).items() if (it := held()) and not it.closed}
    return next(at for at in count() if at not in taken)


_sessions: weakref.WeakKeyDictionary[ProcessGroup, dict[int, weakref.ref[Session]]] = (
    weakref.WeakKeyDictionary()
)


def default_store() -> Store | None:
    """Returns the store of all ranks, or None without a process group."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def store_of_all(store: Store) -> Store:
    """Returns the store of all ranks, from the store that torch gives to a new backend."""
    # While torch makes the default group, there is no default store yet. The given store is then a
    # part of the store of all ranks.
    of_all = default_store()
    return of_all if of_all is not None else getattr(store, "underlying_store", store)


def drawn_in(store: Store | None) -> Drawn | None:
    """Returns the job name and the secret in a store. The first rank to call this generates both.

    Ranks that torchrun restarts find the same store. So the job keeps its name, and its secret
    proves that it is the same job.

    :raises PeerLost: The store does not answer.
    """
    if store is None:
        return None
    own = Drawn(f"job-{secrets.token_hex(6)}", secrets.token_hex(16))
    with converting_store_errors():
        kept = store.compare_set(_KEY, "", " ".join(own))
    job, secret = kept.decode().split(" ")
    return Drawn(job, secret)


#: The store's key for the job's generated name and secret.
_KEY = "racksum/job"


def is_generation_given(options: dict[str, Any]) -> bool:
    """Returns whether the user sets the generation of the job."""
    given = options.get("generation") is not None
    return given or bool(os.environ.get("RACKSUM_GENERATION", "").strip())


def new_generation(name: str) -> int:
    """Returns a generation for the group of this name: the current time in seconds.

    It is also greater than this process's last generation of that name, because a process may
    leave a group and make it again within a second.
    """
    generation = max(int(time.time()), _generations.get(name, 0) + 1)
    _generations[name] = generation
    return generation


#: The last generation that this process began, by name of the group.
_generations: dict[str, int] = {}


def of_group(options: ConnectOptions, name: str) -> ConnectOptions:
    """Returns a copy of the options for the group of this name."""
    return dataclasses.replace(options, group=name)
