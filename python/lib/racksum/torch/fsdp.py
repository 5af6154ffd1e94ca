"""FSDP2: replicas of a sharded model whose gradients racksum averages."""

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
    """Has replicas average the gradients of their shards, as HSDP does.

    Each replica shards the model over ranks of its own, ``fully_shard(model, mesh=shards)``; the
    session's ranks are those that have the same shard (``racksum.torch.connect(group=replicas)``).

    :param model: What ``fully_shard`` was applied to, whole or in parts.
    :param session: The ranks that have this rank's shard.
    :param wire: How gradients travel, if not unchanged: see :meth:`racksum.Session.allreduce`.
        Those that are as narrow already travel as they are.
    :param block: Elements of a block: blocks of zeros are not sent.
    """
    # Importing it takes most of a second, which only users of FSDP pay.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BadArgument(
            "the model is sharded by FullyShardedDataParallel, which has no such hook: shard by "
            "fully_shard, or give FSDP a process_group of the backend racksum"
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise BadArgument("nothing of the model is sharded: call fully_shard on it first")
    wire, block, session = checked_wire(wire), block_of(block), checked_session(session)

    @eager
    def average(gradients: torch.Tensor) -> None:
        narrow = wire_for(wire, gradients.dtype)
        allreduce(session, gradients, "avg", wire=narrow, block=block).wait()

    for module in sharded:
        module.set_all_reduce_hook(average)
