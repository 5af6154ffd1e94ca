"""Broadcast and gather as sums: each rank has its data in a place of its own, and zeros elsewhere.

Blocks of zeros are not sent, so each rank sends only its own data, and receives the sum of all.
Elements of all types are summed as integers, so that no bit changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from racksum.errors import PeerLost
from racksum.torch.staging import allreduce
from racksum.torch.work import write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from racksum.call import PartOf
    from racksum.handle import Handle
    from racksum.session import Session

__all__ = ["broadcast", "gather_into"]

_WORD = 4


@torch.inference_mode()
def broadcast(session: Session, x: torch.Tensor, part_of: PartOf) -> Handle[Any]:
    """Starts writing the root's contiguous tensor to the tensors of all ranks."""
    with session.reporting_refusals(part_of):
        # As with Gloo, autograd does not count writes to the tensor.
        x = x.data
        if session.rank != part_of.root:
            x.zero_()
        words, finish = _words_of(x)
    op = allreduce(session, words, tag=_tag_of(x), part_of=part_of)
    return _of_all(op, [part_of.root], finish)


@torch.inference_mode()
def gather_into(
    session: Session, output: torch.Tensor, own: torch.Tensor, part_of: PartOf
) -> Handle[Any]:
    """Starts filling ``output``, a contiguous tensor, with the tensors of all ranks in rank order.

    ``own`` may alias this rank's part of ``output``.
    """
    with session.reporting_refusals(part_of):
        output = output.data
        parts = output.view(-1).view(session.world, -1)
        # Copy before zeroing: `own` may lie in `output`.
        parts[session.rank].copy_(own.reshape(-1))
        parts[: session.rank].zero_()
        parts[session.rank + 1 :].zero_()
        words, finish = _words_of(output)
    op = allreduce(session, words, tag=_tag_of(output), part_of=part_of)
    return _of_all(op, range(session.world), finish)


def _of_all(
    op: Handle[torch.Tensor],
    needed: Sequence[int],
    finish: Callable[[object], object],
) -> Handle[Any]:
    """Returns a handle that waits for the op, and raises if a rank in ``needed`` is absent."""

    def check(result: object) -> object:
        lost = [rank for rank in needed if rank in op.absent]
        if lost:
            subject = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            raise PeerLost(f"lost {subject}: no other rank has the data that this op needs", lost)
        return finish(result)

    return op.then(check)


def _tag_of(x: torch.Tensor) -> str:
    """Returns a tag for the size and the dtype, which the summed integers do not show."""
    return f"{x.numel()} x {x.dtype}"


def _words_of(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[object], object]]:
    """Returns a contiguous tensor as int32, and a function to call after the sum.

    The int32 tensor shares the memory of ``x`` if the size and the alignment of ``x`` permit it.
    Otherwise it is a padded copy, and the function copies it back.
    """
    x, size = x.detach(), x.element_size()
    # A single element is contiguous with any stride, but ``view`` would refuse some strides.
    octets = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    if x.nbytes % _WORD == 0 and x.storage_offset() * size % _WORD == 0:
        return octets.view(torch.int32), lambda _: None
    copied = torch.nn.functional.pad(octets, (0, -x.nbytes % _WORD))
    return copied.view(torch.int32), lambda _: write(octets, copied[: x.nbytes])
