"""Sessions of the ranks of process groups."""

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
from racksum.torch.departures import asking_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["connect"]


def connect(
    aggregator: str | None = None, *, group: ProcessGroup | None = None, **options: Any
) -> Session:
    """Joins a job with the ranks of a process group.

    Unless ``generation`` or ``RACKSUM_GENERATION`` say otherwise, the life of the job begins now,
    by the clock of the group's first rank: ranks that torchrun has started again end what is left
    of the life before, and do not wait for it.

    Unless ``job``, ``RACKSUM_JOB`` or torchrun's ``--rdzv-id`` name the job, it has a name that one
    of its ranks has drawn, and that the group's store keeps.

    :param group: The group; by default that of all ranks. A smaller one sums by itself, under the
        name of the job and its own. So does each further session of a group that is open, unless
        ``generation`` says which life it is.
    :param options: As of :func:`racksum.connect`, but for ``rank`` and ``world``. The timeouts are
        by default that of the group.
    :raises racksum.Error: As :func:`racksum.connect`.
    """
    for name in ("rank", "world"):
        if name in options:
            raise BadArgument(f"{name} is the group's to say, and not an option")
    if not dist.is_initialized():
        raise BadArgument("there is no process group; call torch.distributed.init_process_group")
    own = {"rank": dist.get_rank(group), "world": dist.get_world_size(group)}
    if own["rank"] < 0:
        raise BadArgument("this process is not in the group")
    # Who says which life it is has it end those before it.
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
    """The name of a session of a group, which no group on the backend has."""
    further = f"session-{place + 1}" if place else ""
    if group is None or group is dist.group.WORLD:
        return further
    return f"{group.group_name}-{further or 'session'}"


def _open_of(group: ProcessGroup | None) -> dict[int, weakref.ref[Session]]:
    """The sessions of a group, by their places."""
    return _sessions.setdefault(cast("ProcessGroup", group or dist.group.WORLD), {})


def _first_free(group: ProcessGroup | None) -> int:
    """The first place that no open session has."""
    taken = {at for at, held in _open_of(group).items() if (it := held()) and not it.closed}
    return next(at for at in count() if at not in taken)


_sessions: weakref.WeakKeyDictionary[ProcessGroup, dict[int, weakref.ref[Session]]] = (
    weakref.WeakKeyDictionary()
)


def default_store() -> Store | None:
    """The store of all ranks, which groups are made from."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def store_of_all(store: Store) -> Store:
    """The store of all ranks, for a group that is being made and whose backend has this one."""
    # While the default group is made, there is no other way: torch names a part of its store after
    # the group's device.
    of_all = default_store()
    return of_all if of_all is not None else getattr(store, "underlying_store", store)


def drawn_in(store: Store | None) -> Drawn | None:
    """What the job of the ranks of a store is called: what the first that asks has drawn.

    torchrun starts ranks again with the store that they had, so a job keeps its name, and can show
    that it is the same.

    :raises PeerLost: If nobody serves the store any more.
    """
    if store is None:
        return None
    own = Drawn(f"job-{secrets.token_hex(6)}", secrets.token_hex(16))
    with asking_store():
        kept = store.compare_set(_KEY, "", " ".join(own))
    job, secret = kept.decode().split(" ")
    return Drawn(job, secret)


#: Where a store keeps what was drawn.
_KEY = "racksum/job"


def is_generation_given(options: dict[str, Any]) -> bool:
    """Whether the user says which life of the job it is."""
    given = options.get("generation") is not None
    return given or bool(os.environ.get("RACKSUM_GENERATION", "").strip())


def new_generation(name: str) -> int:
    """A greater one than any that began a second ago and before, for the group of this name.

    Nor one that this process has had for that name: it may leave a group and make it again within
    a second.
    """
    generation = max(int(time.time()), _generations.get(name, 0) + 1)
    _generations[name] = generation
    return generation


#: The last generation that this process began, by the names of groups.
_generations: dict[str, int] = {}


def of_group(options: ConnectOptions, name: str) -> ConnectOptions:
    """The options for the group of this name."""
    return dataclasses.replace(options, group=name)
