"""The hook for FSDP2: racksum averages the gradients of the replicas of a sharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from racksum.eager import eager
from racksum.errors import BadArgument
from racksum.session import DEFAULT_BLOCK, Session, checked_session
from racksum.torch.compress import block_of, checked_wire, wire_for
from racksum.torch.staging import allreduce

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["set_all_reduce_hook"]


def set_all_reduce_hook(
    model: nn.Module, session: Session, *, wire: str | None = None, block: int = DEFAULT_BLOCK
) -> None:
    """Makes the replicas of a sharded model average the gradients of their shards, as HSDP does.

    Each replica shards the model over ranks of its own. A session connects the ranks that have the
    same shard:

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> torch.distributed.init_process_group("gloo")
    >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    >>> model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh["shards"])
    >>> session = racksum.torch.connect("127.0.0.1:7177", group=mesh["replicas"].get_group())
    >>> racksum.torch.set_all_reduce_hook(model, session)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.bias.grad.full_tensor().tolist()
    [1.0, 1.0]

    :param model: A model to which ``fully_shard`` was applied, as a whole or in parts.
    :param session: The session of the ranks that have this rank's shard.
    :param wire: Type of gradients on the network, as for :meth:`racksum.Session.allreduce`. By
        default their own type. Narrower gradients are sent unchanged, and so are 16-bit gradients
        if the wire type has 16 bits.
    :param block: Elements of a block, a power of two from 32 to 1024. Blocks of zeros are not sent.
    :raises racksum.BadArgument: No part of the model is sharded by ``fully_shard``, or an argument
        is invalid.
    """
    # The import takes most of a second, so only users of FSDP should wait for it.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BadArgument(
            "the model is sharded by FullyShardedDataParallel, which has no all-reduce hook; shard "
            "with fully_shard, or give FSDP a process_group of the racksum backend"
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise BadArgument("no part of the model is sharded; call fully_shard on it first")
    wire, block, session = checked_wire(wire), block_of(block), checked_session(session)

    @eager
    def average(gradients: torch.Tensor) -> None:
        narrow = wire_for(wire, gradients.dtype)
        allreduce(session, gradients, "avg", wire=narrow, block=block).wait()

    for module in sharded:
        module.set_all_reduce_hook(average)
