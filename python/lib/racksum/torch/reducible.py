"""Checks whether a process group can reduce a tensor, and whether racksum or Gloo reduces it.

All ranks must decide alike, so the checks depend only on properties that all ranks have in common.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from racksum.errors import BadArgument

__all__ = [
    "OF_BOOLEANS",
    "OPERATORS",
    "check_dense",
    "check_fits",
    "check_operator",
    "check_output",
    "check_reducible",
    "is_ours",
]

_Op: Any = dist.ReduceOp.RedOpType

#: The operators of racksum.
OPERATORS = {_Op.SUM: "sum", _Op.AVG: "avg", _Op.MIN: "min", _Op.MAX: "max"}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
#: Element types that only Gloo reduces.
_BYTES = (torch.int8, torch.uint8, torch.bool)
#: For each operator on booleans, the operator on bytes that gives the same result.
OF_BOOLEANS = {
    _Op.SUM: _Op.MAX,
    _Op.MAX: _Op.MAX,
    _Op.BOR: _Op.MAX,
    _Op.PRODUCT: _Op.MIN,
    _Op.MIN: _Op.MIN,
    _Op.BAND: _Op.MIN,
}


#: The value with which torch reports that several elements of a tensor share a place in memory.
_OVERLAPS = 1


def is_ours(x: Tensor, by: Any) -> bool:
    """Returns whether racksum, rather than Gloo, reduces a tensor with this operator."""
    return by in OPERATORS and x.dtype in (*_FLOATS, *_INTEGERS)


def check_reducible(x: Tensor, opts: Any) -> None:
    """Raises :class:`BadArgument` if a tensor cannot be reduced in place with these options."""
    if not x.is_sparse:
        check_dense(x)
    check_operator(x, opts)


def check_operator(x: Tensor, opts: Any) -> None:
    """Raises :class:`BadArgument` if the operator is not defined for the elements."""
    by = opts.reduceOp.op
    if x.is_sparse and by not in (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM):
        raise BadArgument(f"sparse tensors cannot be reduced by {by.name}; sum or average them")
    if x.is_sparse and x.dtype is torch.bool:
        raise BadArgument(
            "sparse tensors of torch.bool cannot be reduced; pass x.to(torch.uint8), or a dense "
            "tensor"
        )
    if by == _Op.PREMUL_SUM:
        # Check the factor now: below, a complex tensor is viewed as a real one, which cannot take a
        # complex factor.
        _check_factor(x, opts.reduceOp.factor)
        by = _Op.SUM
    if x.is_complex() and by in (_Op.SUM, _Op.AVG):
        x = torch.view_as_real(x)
    is_gloos = by != _Op.AVG and x.dtype in (*_FLOATS, *_INTEGERS, *_BYTES)
    if not is_ours(x, by) and not is_gloos:
        raise BadArgument(f"{by.name} is not defined for {x.dtype}; convert the tensor first")


def _check_factor(x: Tensor, factor: Any) -> None:
    """Raises :class:`BadArgument` if a factor cannot scale a tensor in place."""
    if not torch.can_cast(torch.result_type(x, factor), x.dtype):
        raise BadArgument(
            f"a tensor of {x.dtype} cannot hold its products with the factor {factor}; convert it "
            "to a floating-point type first"
        )


def check_dense(x: Tensor) -> None:
    """Raises :class:`BadArgument` if a tensor is not dense, or if its elements share memory.

    A rank that only reads the tensor raises too, so that all ranks raise alike.
    """
    if x.layout is not torch.strided:
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} and layout {x.layout} is not dense; pass "
            "x.to_dense()"
        )
    if torch._debug_has_internal_overlap(x) == _OVERLAPS:
        raise BadArgument(
            f"elements of the tensor of shape {tuple(x.shape)} share memory; pass x.contiguous()"
        )
    if x.is_conj() or x.is_neg():
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is a lazy view; pass "
            "x.resolve_conj().resolve_neg()"
        )


def check_output(x: Tensor, elements: int, dtype: torch.dtype) -> None:
    """Raises :class:`BadArgument` if a tensor cannot hold a result of this size and dtype."""
    check_dense(x)
    check_fits(x, elements, dtype)


def check_fits(x: Tensor, elements: int, dtype: torch.dtype) -> None:
    """Raises :class:`BadArgument` unless a tensor is dense and has this size and dtype."""
    if (x.layout, x.numel(), x.dtype) != (torch.strided, elements, dtype):
        raise BadArgument(
            f"expected a dense tensor of {elements} x {dtype}, not of {x.numel()} x {x.dtype} with "
            f"layout {x.layout}"
        )
