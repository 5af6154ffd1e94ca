"""Estimates of the time that a device would take for the operations of a model.

An operation takes the time of its FLOPs or that of the bytes that it reads and writes, whichever is
longer. The operations run, on any device; on the ``meta`` device they cost neither time nor memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from racksum.errors import BadArgument

__all__ = ["Estimate", "Roofline"]

#: Operations that read only the rows that they return.
_SELECTING = {"embedding", "index", "index_select", "gather"}
#: Operations that return memory without writing to it.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
#: Operations that write to memory without reading it.
_OVERWRITING = {"copy_", "fill_", "zero_"}
#: Words in the names of operations whose FLOPs exceed what their bytes suggest.
_COSTLY = {"attention", "conv", "convolution", "linear", "rnn"}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The rates of a device that :func:`racksum.torch.profile` estimates times for.

    Pass rates that the device reaches with such a model. Its data sheet states higher ones.

    >>> racksum.torch.Estimate(device="A100", flops_per_s=60e12, bytes_per_s=1.3e12).device
    'A100'
    """

    #: The name of the device.
    device: str
    #: Floating-point operations per second, for the types of the model. A multiply-add is two.
    flops_per_s: float
    #: Bytes per second that the device's memory reads and writes.
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            rate = getattr(self, name)
            if not 0 < rate < math.inf:
                raise BadArgument(f"{name} must be finite and above 0, not {rate}", (name,))


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A clock that each operation advances by its estimated time.

    :param rates: The rates of the device.
    """

    def __init__(self, rates: Estimate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # This import takes a while, and only estimates need it.
        from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

        self._formulas = flop_registry
        self._rates = rates
        self._now = 0.0

    def mark(self) -> float:
        """Returns the estimated time of all operations so far, in seconds."""
        return self._now

    def settle(self) -> None:
        """Does nothing: operations have taken their time when they return."""

    def seconds(self, one: float, other: float) -> float:
        """Returns the time from one mark to the other, in seconds."""
        return other - one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and adds its time."""
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        if formula is None:
            _refuse(func)
        self._now += max(
            flops / self._rates.flops_per_s,
            _traffic(func, (args, kwargs), out) / self._rates.bytes_per_s,
        )
        return out


def _refuse(func: Any) -> None:
    """Raises :class:`BadArgument` if nothing tells the FLOPs of an operation without a formula."""
    namespace, words = str(func).partition(".")[0], _name_of(func).split("_")
    costly = any(word in _COSTLY or word.endswith("mm") for word in words)
    if namespace not in ("aten", "prim", "prims", "profiler") or costly:
        raise BadArgument(
            f"the FLOPs of operation {func} are unknown; register a formula with "
            "torch.utils.flop_counter.register_flop_formula, or measure without estimate="
        )


def _traffic(func: Any, inputs: Any, out: Any) -> int:
    """Returns the bytes of memory that an operation reads and writes."""
    name = _name_of(func)
    if getattr(func, "is_view", False) or name in _EMPTY:
        return 0
    changed = _bytes(_changed(func, *inputs))
    # An operation in place returns the tensor that it changes, or nothing.
    written = changed or _bytes(out)
    if name in _SELECTING:
        return 2 * written
    return _bytes(inputs) + (0 if name in _OVERWRITING else written)


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an operation writes to."""
    if not hasattr(func, "_schema"):
        return []
    places = func._schema.arguments
    given = {place.name: x for place, x in zip(places, args, strict=False)} | kwargs
    return [
        given.get(place.name)
        for place in places
        if place.alias_info is not None and place.alias_info.is_write
    ]


def _name_of(func: Any) -> str:
    """Returns the name of an operation without its namespace and overload."""
    return str(func).partition(".")[2].partition(".")[0]


def _bytes(tensors: Any) -> int:
    return sum(_bytes_of(x) for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))


def _bytes_of(x: torch.Tensor) -> int:
    if x.layout is not torch.strided:
        return x._values().nbytes + x._indices().nbytes if x.is_sparse else x.nbytes
    # An expanded tensor has more elements than memory.
    expanded = math.prod(
        size for size, step in zip(x.shape, x.stride(), strict=True) if step or not size
    )
    return expanded * x.element_size()
