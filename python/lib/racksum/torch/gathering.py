"""Gathering as a sum: of what each rank has in a place of its own, and zeros in all others.

Blocks of zeros are not sent, so that each rank sends what is its own once, and what has all of it
comes by multicast. Whatever the elements are, they are summed as integers, so that no bit changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from racksum.errors import PeerLost
from racksum.torch.staging import allreduce
from racksum.torch.work import write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from racksum.session import Handle, PartOf, Session
    from racksum.torch.staging import Staged
    from racksum.torch.work import Ends

__all__ = ["broadcast", "gather_into"]

_WORD = 4


@torch.inference_mode()
def broadcast(session: Session, x: torch.Tensor, part_of: PartOf) -> Ends:
    """Gives all ranks what the contiguous tensor of one rank has."""
    with session.telling_refusals(part_of):
        # Writes to the tensor as Gloo does: autograd does not count them.
        x = x.data
        if session.rank != part_of.root:
            x.zero_()
        words, finish = _words_of(x)
    op = allreduce(session, words, tag=_tag_of(x), part_of=part_of)
    return _of_all(op, [part_of.root], finish)


@torch.inference_mode()
def gather_into(session: Session, output: torch.Tensor, own: torch.Tensor, part_of: PartOf) -> Ends:
    """Fills ``output``, contiguous, with what all ranks have, rank by rank."""
    with session.telling_refusals(part_of):
        output = output.data
        parts = output.view(-1).view(session.world, -1)
        # What is its own may lie in its place already.
        parts[session.rank].copy_(own.reshape(-1))
        parts[: session.rank].zero_()
        parts[session.rank + 1 :].zero_()
        words, finish = _words_of(output)
    op = allreduce(session, words, tag=_tag_of(output), part_of=part_of)
    return _of_all(op, range(session.world), finish)


def _of_all(
    op: Handle[torch.Tensor] | Staged[torch.Tensor],
    needed: Sequence[int],
    finish: Callable[[object], object],
) -> Ends:
    """What an op comes to if all the ranks took part that have what it gives."""

    def check(result: object) -> object:
        lost = [rank for rank in needed if rank in op.absent]
        if lost:
            who = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            raise PeerLost(f"lost {who}: nobody else has what this op was to give", lost)
        return finish(result)

    return op.then(check)


def _tag_of(x: torch.Tensor) -> str:
    """What ranks must have alike and the integers do not show."""
    return f"{x.numel()} x {x.dtype}"


def _words_of(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[object], object]]:
    """The memory of a contiguous tensor as integers, and what to do once they are summed."""
    x, size = x.detach(), x.element_size()
    # A single element is contiguous whatever its stride, which ``view`` would keep and refuse.
    octets = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    if x.nbytes % _WORD == 0 and x.storage_offset() * size % _WORD == 0:
        return octets.view(torch.int32), lambda _: None
    copied = torch.nn.functional.pad(octets, (0, -x.nbytes % _WORD))
    return copied.view(torch.int32), lambda _: write(octets, copied[: x.nbytes])
