"""Calls with several tensors of a rank, which are first combined into one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from racksum.errors import BadArgument
from racksum.torch.work import write

__all__ = ["alike", "check_root_tensor", "combined", "copying_to"]

_Op: Any = dist.ReduceOp.RedOpType

#: Functions that combine two tensors, by operator. An average is a sum that is divided later.
_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PREMUL_SUM: torch.add,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.PRODUCT: torch.mul,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


def alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the tensors. Like torch, raises if their shapes, dtypes or layouts differ."""
    if not tensors:
        raise BadArgument("the list of tensors is empty; pass at least one")
    kinds = {f"{tuple(x.shape)} x {x.dtype}, {x.layout}": x for x in tensors}
    if len(kinds) > 1:
        raise BadArgument(
            "the tensors of one call must have the same shape, dtype and layout, not "
            f"{'; '.join(kinds)}"
        )
    return tensors


def check_root_tensor(index: int, tensors: Sequence[Tensor]) -> None:
    """Raises :class:`BadArgument` if no tensor of the call has this index."""
    if not 0 <= index < len(tensors):
        raise BadArgument(f"rootTensor must be from 0 to {len(tensors) - 1}, not {index}")


def combined(tensors: Sequence[Tensor], by: Any) -> Tensor:
    """Returns a new tensor that combines all the tensors with the operator."""
    with torch.no_grad():
        whole = functools.reduce(_COMBINE[by], tensors)
    return whole if whole.is_sparse else whole.contiguous()


def copying_to(tensors: Sequence[Tensor]) -> Callable[[Tensor], None]:
    """Returns a function that copies a result to each of the tensors."""

    def copy(result: Tensor) -> None:
        for x in tensors:
            write(x, result if x.is_sparse else result.view_as(x))

    return copy
