"""Compressors of gradients, and memories of the residuals that they leave out.

Compressors have the methods of GRACE (Xu et al., "GRACE: A Compressed Communication Framework for
Distributed Machine Learning", ICDCS 2021), so that compressors written for GRACE plug in. racksum
sums the decompressed tensor and does not send its blocks of zeros. The compressors here keep or
leave out whole blocks, so everything that they leave out saves bytes::

    state = racksum.torch.HookState(session, compressor=BlockTopKRatio(0.01))
"""

from __future__ import annotations

import functools
import operator
import zlib
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from racksum.errors import BadArgument
from racksum.log import logger
from racksum.options import MAX_ELEMENTS, whole_from
from racksum.session import DEFAULT_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BLOCKS",
    "BlockRandomK",
    "BlockThreshold",
    "BlockTopK",
    "BlockTopKRatio",
    "Compressor",
    "Memory",
    "ResidualMemory",
    "Rounded",
    "Whole",
    "block_of",
    "checked_wire",
    "wire_for",
]

_log = logger("racksum.torch")

#: The sizes of a block, in elements.
BLOCKS = (32, 64, 128, 256, 512, 1024)

#: Bytes of an element, by wire type.
_WIRES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "int8": 1, "fixed32": 4}
#: Bytes of f16 and of bf16. Converting one to the other saves nothing.
_NARROW = 2


def block_of(block: int | None, compressor: object = None) -> int:
    """Returns the number of elements of a block, as given or else as the compressor's.

    :raises BadArgument: The number is invalid, or it is not the compressor's. Blocks of another
        size would not be zero as a whole, and would be sent.
    """
    of_compressor = getattr(compressor, "block", None)
    if block is None:
        block = DEFAULT_BLOCK if of_compressor is None else of_compressor
    if of_compressor not in (None, block):
        raise BadArgument(
            f"block is {block!r}, but the compressor leaves out blocks of {of_compressor} "
            "elements; leave block out, or pass the same to both"
        )
    with suppress(TypeError):
        elements = operator.index(block)
        if elements in BLOCKS:
            return elements
    raise BadArgument(
        f"block must be a power of two from {BLOCKS[0]} to {BLOCKS[-1]}, not {block!r}"
    )


def checked_wire(wire: str | None, compressor: object = None) -> str | None:
    """Returns the wire type, if it exists and the compressor does not round to another.

    :raises BadArgument: The wire type does not exist, or is not the one that ``Rounded`` rounds to.
    """
    if isinstance(compressor, Rounded) and wire not in (None, compressor.wire):
        raise BadArgument(
            f"wire is {wire!r}, but the compressor rounds to {compressor.wire}; leave wire out"
        )
    if wire is not None and wire not in _WIRES:
        raise BadArgument(f"wire must be one of {', '.join(_WIRES)}, not {wire!r}")
    return wire


def wire_for(wire: str | None, dtype: torch.dtype) -> str | None:
    """Returns the wire type for a tensor of a model, or None to send it unchanged.

    A model may have parameters of several types. Tensors of integers, and those that are as narrow
    as the wire type already, would gain nothing from it.
    """
    if wire is None or not dtype.is_floating_point:
        return None
    own, narrow = dtype.itemsize, _WIRES[wire]
    if own < narrow or own == narrow == _NARROW:
        _say_unchanged(wire, dtype)
        return None
    return wire


@functools.cache
def _say_unchanged(wire: str, dtype: torch.dtype) -> None:
    """Logs once for each pair that tensors are not converted."""
    _log.info("tensors of %s are sent unchanged, because wire=%s is not narrower", dtype, wire)


class Compressor(Protocol):
    """The interface of compressors, which leave parts of tensors out."""

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Returns the compressed tensor, and a context that :meth:`decompress` needs.

        :param name: The name of the tensor, the same in every step.
        """
        ...

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns a tensor with the shape and the dtype of the one that was compressed."""
        ...


class Memory(Protocol):
    """The interface of memories, which keep residuals by the name of the tensor."""

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor plus the residual of earlier steps."""
        ...

    def update(
        self,
        tensor: torch.Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: list[torch.Tensor],
        ctx: Any,
    ) -> None:
        """Stores the residual: what the compressor left out of the compensated tensor."""
        ...


class ResidualMemory:
    """Error feedback: adds what a step leaves out to the gradients of the next.

    :param beta: Weight of the residual.
    :param gamma: Weight of the new gradient.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        self.beta = beta
        self.gamma = gamma
        self.residuals: dict[str, torch.Tensor] = {}

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor plus the residual of this name, weighted.

        :raises BadArgument: The tensor of this name had another shape before.
        """
        residual = self.residuals.get(name)
        if residual is None:
            return tensor * self.gamma if self.gamma != 1.0 else tensor
        if residual.shape != tensor.shape:
            raise BadArgument(
                f"{name} has {tensor.numel()} elements, but its residual has {residual.numel()}; "
                "start to compress later (start_iter)"
            )
        return torch.add(tensor * self.gamma, residual, alpha=self.beta)

    def update(
        self,
        tensor: torch.Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: list[torch.Tensor],
        ctx: Any,
    ) -> None:
        """Stores the tensor minus what it decompresses to, with zeros for NaN and infinities."""
        left = tensor - compressor.decompress(tensor_compressed, ctx)
        # A gradient scaler causes infinities now and then, which would return in every later step.
        self.residuals[name] = torch.nan_to_num_(left, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the residuals by name, for a checkpoint of this rank."""
        return dict(self.residuals)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the residuals from a checkpoint of this rank."""
        self.residuals = dict(state)


class BlockCompressor(ABC):
    """Base class of compressors that keep some blocks of a tensor.

    :param block: Elements of a block, 32 to 1024, a power of two; the same as the op's.
    :raises BadArgument: ``block`` is invalid.
    """

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        self.block = block_of(block)

    @abstractmethod
    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the int64 indices of the blocks to keep.

        :param blocks: The tensor as a matrix of shape ``(count, block)``, padded with zeros.
        :param name: The name of the tensor.
        """

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Returns the blocks that are kept. The context holds their indices and the shape."""
        flat = tensor.flatten()
        missing = -len(flat) % self.block
        blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, self.block)
        chosen = self.choose(blocks, name)
        return [blocks[chosen]], (chosen, tensor.shape)

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns the tensor with zeros in the blocks that were left out."""
        (kept,), (chosen, shape) = tensors, ctx
        count = -(-shape.numel() // self.block)
        blocks = kept.new_zeros(count, self.block)
        blocks[chosen] = kept
        return blocks.view(-1)[: shape.numel()].view(shape)


class BlockTopK(BlockCompressor):
    """Keeps the blocks with the greatest Euclidean norms (OmniReduce's Block Top-k).

    :param k: Number of blocks to keep of each tensor, 1 or more.
    :param block: Elements of a block, 32 to 1024, a power of two.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, k: int, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.k = whole_from(1, MAX_ELEMENTS)("k", k)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the ``k`` blocks with the greatest norms."""
        return _heaviest(blocks, self.k)


class BlockTopKRatio(BlockCompressor):
    """Keeps the share of blocks with the greatest norms (OmniReduce's Block Top-k Ratio).

    :param compress_ratio: Share of each tensor's blocks to keep, above 0 and at most 1.
    :param block: Elements of a block, 32 to 1024, a power of two.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, compress_ratio: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the share of blocks with the greatest norms, at least one."""
        return _heaviest(blocks, _count(len(blocks), self.compress_ratio))


class BlockRandomK(BlockCompressor):
    """Keeps a random share of blocks, the same blocks at all ranks.

    :param compress_ratio: Share of each tensor's blocks to keep, above 0 and at most 1.
    :param seed: Seed of the choice. All ranks must pass the same.
    :param block: Elements of a block, 32 to 1024, a power of two.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, compress_ratio: float, seed: int = 0, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)
        self.seed = seed
        self.steps: dict[str, int] = {}

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Returns random indices, from the seed, the tensor's name and its number of calls."""
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        seed = zlib.crc32(f"{self.seed} {name} {step}".encode())
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        return order[: _count(len(blocks), self.compress_ratio)].to(blocks.device)

    def state_dict(self) -> dict[str, int]:
        """Returns the number of calls for each tensor, by name, for a checkpoint."""
        return dict(self.steps)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the numbers of calls from a checkpoint."""
        self.steps = dict(state)


class BlockThreshold(BlockCompressor):
    """Keeps the blocks with an element whose magnitude reaches a threshold, or with a NaN.

    :param threshold: The least magnitude.
    :param block: Elements of a block, 32 to 1024, a power of two.
    :raises BadArgument: ``block`` is invalid.
    """

    def __init__(self, threshold: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.threshold = threshold

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the blocks that reach the threshold or hold a NaN."""
        small = blocks.abs().amax(1) < self.threshold
        return torch.nonzero(~small).flatten()


class Rounded:
    """Rounds to a wire type, after another compressor if there is one.

    With a memory, the rounding error of the wire is added to the next step like any residual.

    :param wire: ``"bf16"``, ``"f16"`` or ``"int8"``. Ops send the tensor as this type.
    :param compressor: A compressor that keeps whole blocks; by default none.
    :param block: Elements of a block, 32 to 1024, a power of two. By default the compressor's, or
        256.
    :raises BadArgument: ``wire`` or ``block`` is invalid, or ``block`` is not the compressor's.
    """

    def __init__(
        self, wire: str, compressor: Compressor | None = None, block: int | None = None
    ) -> None:
        if wire not in _ROUNDED:
            raise BadArgument(
                f"wire must be a type to round to, one of {', '.join(_ROUNDED)}, not {wire!r}"
            )
        self.wire = wire
        self.compressor = compressor
        self.block = block_of(block, compressor)

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Returns what the compressor keeps, rounded, and the compressor's context."""
        if self.compressor is None:
            return [self._rounded(tensor)], None
        tensors, ctx = self.compressor.compress(tensor, name)
        return [self._rounded(kept) for kept in tensors], ctx

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns the tensor that the compressor decompresses to."""
        return tensors[0] if self.compressor is None else self.compressor.decompress(tensors, ctx)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if wire_for(self.wire, x.dtype) is None:
            return x
        return _ROUNDED[self.wire](x, self.block)


class Whole:
    """A compressor that leaves nothing out."""

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:  # noqa: ARG002
        """Returns the tensor unchanged."""
        return [tensor], None

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:  # noqa: ARG002
        """Returns the tensor that was compressed."""
        return tensors[0]


def _as_bytes(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rounds elements to whole multiples of their block's scale, as ``racksum_proto::arith``."""
    flat = x.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    greatest = blocks.abs().amax(1, keepdim=True) if len(blocks) else blocks.new_zeros(0, 1)
    limits = torch.finfo(torch.float32)
    scale = (greatest / 127).clamp(limits.tiny, limits.max / 127)
    scale = torch.where(greatest.isfinite(), scale, torch.nan)
    whole = (blocks / scale).clamp(-127, 127).round()
    rounded = torch.where(greatest == 0, 0.0, whole * scale)
    return rounded.view(-1)[: len(flat)].view(x.shape).to(x.dtype)


_ROUNDED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "bf16": lambda x, _: x.to(torch.bfloat16).to(x.dtype),
    "f16": lambda x, _: x.to(torch.float16).to(x.dtype),
    "int8": _as_bytes,
}


def _heaviest(blocks: torch.Tensor, k: int) -> torch.Tensor:
    norms = torch.linalg.vector_norm(blocks, dim=1)
    return torch.topk(norms, min(k, len(blocks)), sorted=False).indices


def _count(blocks: int, share: float) -> int:
    return min(max(round(blocks * share), 1), blocks)


def _share(share: float) -> float:
    if not 0 < share <= 1:
        raise BadArgument(f"compress_ratio must be above 0 and at most 1, not {share}")
    return share
