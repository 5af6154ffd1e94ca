"""Sessions of the ranks of process groups."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from racksum.errors import BadArgument
from racksum.options import ConnectOptions
from racksum.session import Session

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["connect"]


def connect(
    aggregator: str | None = None, *, group: ProcessGroup | None = None, **options: Any
) -> Session:
    """Joins a job with the ranks of a process group.

    Unless ``generation`` or ``RACKSUM_GENERATION`` say otherwise, the life of the job begins now,
    by the clock of the group's first rank: ranks that torchrun has started again end what is left
    of the life before, and do not wait for it.

    :param group: The group; by default that of all ranks. A smaller one sums by itself, under the
        name of the job and its own.
    :param options: As of :func:`racksum.connect`, but for ``rank`` and ``world``.
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
    if not is_generation_given(options):
        begun = [new_generation()]
        dist.broadcast_object_list(begun, group_src=0, group=group)
        options["generation"] = begun[0]
    found = ConnectOptions.resolve(aggregator=aggregator, **options, **own)
    if group is not None and group is not dist.group.WORLD:
        found = of_group(found, group.group_name)
    return Session(found)


def is_generation_given(options: dict[str, Any]) -> bool:
    """Whether the user says which life of the job it is."""
    given = options.get("generation") is not None
    return given or bool(os.environ.get("RACKSUM_GENERATION", "").strip())


def new_generation() -> int:
    """A greater one than any that began a second ago, and before."""
    return int(time.time())


def of_group(options: ConnectOptions, name: str) -> ConnectOptions:
    """The options for the group of this name."""
    return dataclasses.replace(options, group=name)
