"""Where a tensor's elements lie: numpy arrays and torch tensors, without a copy."""

from __future__ import annotations

import sys
import zlib
from typing import Any, NamedTuple

from racksum.errors import BadArgument

__all__ = ["Memory", "address_of", "check_unmoved", "checked_dtype", "empty_like", "memory_of"]

#: The element types that can be reduced.
_LONG_NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
}


class Memory(NamedTuple):
    """A contiguous tensor in this host's memory."""

    address: int
    nbytes: int
    elements: int
    dtype: str
    #: Tells tensors of as many elements and another shape apart.
    tag: int
    #: What the memory goes with: a torch tensor may be given another storage.
    owner: Any


def memory_of(x: Any) -> Memory:
    """Finds where the elements of a numpy array or a torch tensor lie.

    Raises :class:`BadArgument`, which says why, if ``x`` is neither, or cannot be reduced in place.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(torch, x)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _of_array(numpy, x)
    if numpy is not None and isinstance(x, numpy.generic):
        raise BadArgument(
            f"{x!r} is a scalar, which has no place to reduce in; pass an array of it"
        )
    raise BadArgument(f"a numpy array or a torch tensor can be reduced, and not {type(x).__name__}")


def empty_like(x: Any, elements: int, dtype: str | None = None) -> Any:
    """A new flat tensor of the kind of ``x`` on this host, of its dtype or the named one.

    It is pinned if ``x`` is: then it is on its way to a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        dtype = x.dtype if dtype is None else getattr(torch, dtype)
        pinned = torch.cuda.is_initialized() and x.is_pinned()
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=pinned)
    import numpy as np  # noqa: PLC0415 - whoever has arrays has it, and nobody else needs it.

    return np.empty(elements, dtype=x.dtype if dtype is None else dtype)


def _of_torch(torch: Any, x: Any) -> Memory:
    if x.layout is not torch.strided:
        raise BadArgument(
            f"a tensor of layout {x.layout} has no one place in memory; reduce its values, "
            "or use racksum.torch, which takes sparse gradients"
        )
    if x.device.type != "cpu":
        raise BadArgument(
            f"the tensor is on {x.device}; a session reduces tensors of the host, "
            "and racksum.torch takes those of a GPU through pinned memory"
        )
    dtype = checked_dtype(str(x.dtype).removeprefix("torch."))
    if not x.is_contiguous():
        raise BadArgument(f"{_described(x)} is not contiguous; pass x.contiguous()")
    if x.is_conj() or x.is_neg():
        raise BadArgument(f"{_described(x)} is a lazy view; pass x.resolve_conj().resolve_neg()")
    address, nbytes = address_of(x), x.nbytes
    if nbytes and not address:
        raise BadArgument(
            f"{_described(x)} has no memory of its own; of a DTensor pass x.to_local()"
        )
    storage = x.untyped_storage()
    if nbytes and address + nbytes > storage.data_ptr() + storage.nbytes():
        raise BadArgument(f"{_described(x)} reaches beyond its storage, which was resized")
    return Memory(address, nbytes, x.numel(), dtype, tag_of_shape(x.shape), storage)


def address_of(x: Any) -> int:
    """Where the elements of a tensor begin; 0 if it has no memory of its own."""
    try:
        return int(x.data_ptr())
    except RuntimeError:
        # A FakeTensor, as a trace has, raises an error that says so.
        return 0


def _of_array(numpy: Any, x: Any) -> Memory:
    if isinstance(x, numpy.ma.MaskedArray):
        raise BadArgument(f"{_described(x)} is masked; pass x.filled(0)")
    dtype = checked_dtype(x.dtype.name)
    if not x.flags.writeable:
        raise BadArgument(f"{_described(x)} is read-only")
    if not x.dtype.isnative:
        raise BadArgument(
            f"{_described(x)} is big-endian; pass x.astype(x.dtype.newbyteorder('='))"
        )
    if not x.flags.c_contiguous:
        raise BadArgument(f"{_described(x)} is not contiguous; pass numpy.ascontiguousarray(x)")
    return Memory(x.ctypes.data, x.nbytes, x.size, dtype, tag_of_shape(x.shape), x)


def check_unmoved(x: Any, address: int) -> None:
    """Refuses a tensor that was given other memory while an op reduced what it had."""
    if address_of(x) != address:
        raise BadArgument(
            f"{_described(x)} was given other memory while the op ran or waited to begin, by "
            "x.data = ... or x.set_(): what was summed is where it was before"
        )


def checked_dtype(name: str) -> str:
    """What racksum calls a dtype of this name, if tensors of it can be reduced."""
    try:
        return _LONG_NAMES[name]
    except KeyError:
        raise BadArgument(
            f"tensors of {', '.join(_LONG_NAMES)} can be reduced, and not of {name}"
        ) from None


def _described(x: Any) -> str:
    return f"the tensor of shape {tuple(x.shape)} and type {x.dtype}"


def tag_of(what: str) -> int:
    """A number that tells calls apart."""
    return zlib.crc32(what.encode())


def tag_of_shape(shape: Any) -> int:
    """A number that tells tensors of as many elements and another shape apart."""
    return tag_of(repr(tuple(shape))) if len(shape) > 1 else 0
