"""What a process group reduces, and by whom: checks that come to the same at every rank."""

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

#: The operators that racksum has.
OPERATORS = {_Op.SUM: "sum", _Op.AVG: "avg", _Op.MIN: "min", _Op.MAX: "max"}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
#: The other elements that Gloo has.
_BYTES = (torch.int8, torch.uint8, torch.bool)
#: What operators do to booleans, as operators on bytes.
OF_BOOLEANS = {
    _Op.SUM: _Op.MAX,
    _Op.MAX: _Op.MAX,
    _Op.BOR: _Op.MAX,
    _Op.PRODUCT: _Op.MIN,
    _Op.MIN: _Op.MIN,
    _Op.BAND: _Op.MIN,
}


#: What torch answers of a tensor of which several elements have one place.
_OVERLAPS = 1


def is_ours(x: Tensor, by: Any) -> bool:
    """Whether racksum reduces a tensor by an operator itself."""
    return by in OPERATORS and x.dtype in (*_FLOATS, *_INTEGERS)


def check_reducible(x: Tensor, opts: Any) -> None:
    """Refuses a tensor that cannot be reduced in place as the options say."""
    if not x.is_sparse:
        check_dense(x)
    check_operator(x, opts)


def check_operator(x: Tensor, opts: Any) -> None:
    """Refuses elements that the operator is not defined for."""
    by = opts.reduceOp.op
    if x.is_sparse and by not in (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM):
        raise BadArgument(f"sparse tensors can be summed and averaged, and not {by.name}")
    if x.is_sparse and x.dtype is torch.bool:
        raise BadArgument(
            "sparse tensors of torch.bool are not reduced; pass x.to(torch.uint8), or a dense one"
        )
    if by == _Op.PREMUL_SUM:
        # Before a complex tensor is taken for a real one, which no complex factor scales.
        _check_factor(x, opts.reduceOp.factor)
        by = _Op.SUM
    if x.is_complex() and by in (_Op.SUM, _Op.AVG):
        x = torch.view_as_real(x)
    is_gloos = by != _Op.AVG and x.dtype in (*_FLOATS, *_INTEGERS, *_BYTES)
    if not is_ours(x, by) and not is_gloos:
        raise BadArgument(f"{by.name} is not defined for {x.dtype}")


def _check_factor(x: Tensor, factor: Any) -> None:
    """Refuses a factor that cannot scale a tensor in place."""
    if not torch.can_cast(torch.result_type(x, factor), x.dtype):
        raise BadArgument(
            f"a tensor of {x.dtype} does not hold its products with the factor {factor}; multiply "
            "a copy of a floating-point type and reduce that"
        )


def check_dense(x: Tensor) -> None:
    """Refuses a tensor without a place for each element, whatever the rank does with it."""
    if x.layout is not torch.strided or torch._debug_has_internal_overlap(x) == _OVERLAPS:
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is not dense, or several of its elements have "
            "one place; pass x.contiguous()"
        )
    if x.is_conj() or x.is_neg():
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is a lazy view; pass "
            "x.resolve_conj().resolve_neg()"
        )


def check_output(x: Tensor, elements: int, dtype: torch.dtype) -> None:
    """Refuses a tensor without a place for each of so many elements."""
    check_dense(x)
    check_fits(x, elements, dtype)


def check_fits(x: Tensor, elements: int, dtype: torch.dtype) -> None:
    """Refuses a tensor that is not dense and of so many elements."""
    if (x.layout, x.numel(), x.dtype) != (torch.strided, elements, dtype):
        raise BadArgument(
            f"a dense tensor of {elements} x {dtype} belongs where one of {x.numel()} x {x.dtype} "
            f"and layout {x.layout} is given"
        )
