"""The memory of numpy arrays and torch tensors, found without a copy."""

from __future__ import annotations

import sys
import zlib
from typing import Any, NamedTuple

from racksum.errors import BadArgument

__all__ = ["Memory", "address_of", "check_unmoved", "checked_dtype", "empty_like", "memory_of"]

#: The dtypes that can be reduced, and their names in racksum.
_LONG_NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
}


class Memory(NamedTuple):
    """The memory of a contiguous tensor on this host."""

    address: int
    nbytes: int
    elements: int
    dtype: str
    #: A hash of the shape, which distinguishes shapes with the same number of elements; 0 for a
    #: flat tensor.
    tag: int
    #: The object that keeps the memory alive. For a torch tensor this is its storage, because users
    #: may give the tensor another storage.
    owner: Any


def memory_of(x: Any) -> Memory:
    """Returns the memory of a numpy array or a torch tensor.

    :raises BadArgument: ``x`` is neither, or it cannot be reduced in place.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(torch, x)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _of_array(numpy, x)
    if numpy is not None and isinstance(x, numpy.generic):
        raise BadArgument(
            f"{x!r} is a scalar, which cannot be reduced in place; pass numpy.array([x])"
        )
    raise BadArgument(f"only numpy arrays and torch tensors can be reduced, not {type(x).__name__}")


def empty_like(x: Any, elements: int, dtype: str | None = None) -> Any:
    """Returns a new flat tensor in host memory: a torch tensor if ``x`` is one, else a numpy array.

    Its dtype is ``dtype``, by default that of ``x``. If ``x`` is pinned, the new tensor is pinned
    too, because the caller will copy it to a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        dtype = x.dtype if dtype is None else getattr(torch, dtype)
        pinned = torch.cuda.is_initialized() and x.is_pinned()
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=pinned)
    import numpy as np  # noqa: PLC0415 - racksum works without numpy until it gets an array.

    return np.empty(elements, dtype=x.dtype if dtype is None else dtype)


def _of_torch(torch: Any, x: Any) -> Memory:
    if x.layout is not torch.strided:
        raise BadArgument(
            f"a tensor of layout {x.layout} is not dense in memory; reduce its values, or use "
            "racksum.torch.allreduce_sparse"
        )
    if x.device.type != "cpu":
        raise BadArgument(
            f"the tensor is on {x.device}, but a session reduces only tensors in host memory; pass "
            "x.cpu(), or use the hooks or the backend of racksum.torch"
        )
    dtype = checked_dtype(str(x.dtype).removeprefix("torch."))
    if not x.is_contiguous():
        raise BadArgument(f"{_described(x)} is not contiguous; pass x.contiguous()")
    if x.is_conj() or x.is_neg():
        raise BadArgument(f"{_described(x)} is a lazy view; pass x.resolve_conj().resolve_neg()")
    address, nbytes = address_of(x), x.nbytes
    if nbytes and not address:
        raise BadArgument(
            f"{_described(x)} has no memory of its own; for a DTensor, pass x.to_local()"
        )
    storage = x.untyped_storage()
    if nbytes and address + nbytes > storage.data_ptr() + storage.nbytes():
        raise BadArgument(
            f"{_described(x)} reaches beyond its storage, which was resized; pass a new tensor"
        )
    return Memory(address, nbytes, x.numel(), dtype, tag_of_shape(x.shape), storage)


def address_of(x: Any) -> int:
    """Returns the address of a tensor's first element, or 0 if it has no memory of its own."""
    try:
        return int(x.data_ptr())
    except RuntimeError:
        # A FakeTensor, as used in tracing, has no memory and raises this error.
        return 0


def _of_array(numpy: Any, x: Any) -> Memory:
    if isinstance(x, numpy.ma.MaskedArray):
        raise BadArgument(f"{_described(x)} is masked; pass x.filled(0)")
    dtype = checked_dtype(x.dtype.name)
    if not x.flags.writeable:
        raise BadArgument(f"{_described(x)} is read-only; pass x.copy()")
    if not x.dtype.isnative:
        raise BadArgument(
            f"{_described(x)} is not in this host's byte order; pass "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    if not x.flags.c_contiguous:
        raise BadArgument(f"{_described(x)} is not contiguous; pass numpy.ascontiguousarray(x)")
    return Memory(x.ctypes.data, x.nbytes, x.size, dtype, tag_of_shape(x.shape), x)


def check_unmoved(x: Any, address: int) -> None:
    """Raises :class:`BadArgument` if a tensor's memory was replaced during its op."""
    if address_of(x) != address:
        raise BadArgument(
            f"the memory of {_described(x)} was replaced, by x.data = ... or x.set_(), before its "
            "op ended; wait for the op before you replace the memory"
        )


def checked_dtype(name: str) -> str:
    """Returns racksum's name for a dtype, or raises :class:`BadArgument` if it has none."""
    try:
        return _LONG_NAMES[name]
    except KeyError:
        raise BadArgument(
            f"only tensors of {', '.join(_LONG_NAMES)} can be reduced, not of {name}"
        ) from None


def _described(x: Any) -> str:
    return f"the tensor of shape {tuple(x.shape)} and type {x.dtype}"


def tag_of(what: str) -> int:
    """Returns the tag for a string. All ranks must pass the same tag to an op."""
    return zlib.crc32(what.encode())


def tag_of_shape(shape: Any) -> int:
    """Returns the tag for a shape: 0 for flat tensors, and a hash of the shape for others."""
    return tag_of(repr(tuple(shape))) if len(shape) > 1 else 0
