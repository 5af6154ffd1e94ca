"""Tensors in memory that is shared with a sidecar."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any

from racksum.errors import BadArgument
from racksum.extras import needed
from racksum.options import MAX_ELEMENTS, whole_from
from racksum.tensor import checked_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from racksum._racksum import Lent

__all__ = ["sides_of", "tensor_in"]


def tensor_in(lend: Callable[[int], Lent | None], shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Returns a new tensor in memory from ``lend``, or in ordinary memory if ``lend`` returns None.

    :param dtype: A torch or a numpy dtype. By default torch's float32 if torch was imported, or
        else numpy's.
    """
    torch = sys.modules.get("torch")
    if torch is not None and (dtype is None or isinstance(dtype, torch.dtype)):
        dtype = dtype or torch.float32
        checked_dtype(str(dtype).removeprefix("torch."))
        buffer = _lent(lend, math.prod(shape) * dtype.itemsize)
        if buffer is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(buffer, dtype=dtype).view(shape)
    np = needed("numpy", "Session.empty without torch")
    try:
        dtype = np.dtype(dtype or np.float32)
    except TypeError:
        raise BadArgument(f"dtype must be a torch or numpy dtype, not {dtype!r}") from None
    checked_dtype(dtype.name)
    buffer = _lent(lend, math.prod(shape) * dtype.itemsize)
    if buffer is None:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape)


def _lent(lend: Callable[[int], Lent | None], nbytes: int) -> Any:
    """Returns a buffer of ``nbytes`` from ``lend``, or None. Its tensors keep the loan alive."""
    lent = lend(nbytes) if nbytes else None
    if lent is None:
        return None
    buffer = (ctypes.c_char * nbytes).from_address(lent.address)
    buffer.lent = lent  # type: ignore[attr-defined]
    return buffer


def sides_of(shape: Any) -> tuple[int, ...]:
    """Returns a checked shape. A number stands for a one-dimensional tensor."""
    try:
        sides = tuple(shape)
    except TypeError:
        sides = (shape,)
    check = whole_from(0, MAX_ELEMENTS)
    sides = tuple(check("a dimension of the shape", side) for side in sides)
    check("the number of elements of the shape", math.prod(sides))
    return sides
