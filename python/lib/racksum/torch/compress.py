"""Compressors of gradients, and the memory of what they leave out.

The verbs are those of GRACE (Xu et al., "GRACE: A Compressed Communication Framework for
Distributed Machine Learning", ICDCS 2021), so that compressors written for it plug in: what one
decompresses to is what racksum sums, and blocks of it that are zeros are not sent. Those here
choose whole blocks, so that all they leave out saves bytes.
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

#: How many elements a block may have.
BLOCKS = (32, 64, 128, 256, 512, 1024)

#: Bytes of an element, by the name of how it travels.
_WIRES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "int8": 1, "fixed32": 4}
#: Bytes of an element that no wire makes narrower than another of so many.
_NARROW = 2


def block_of(block: int | None, compressor: object = None) -> int:
    """Elements of a block, as they are given, or as the compressor has them.

    :raises BadArgument: There are no such blocks, or the compressor's are others: blocks of an op
        that are not those that were left out whole would be sent all the same.
    """
    of_compressor = getattr(compressor, "block", None)
    if block is None:
        block = DEFAULT_BLOCK if of_compressor is None else of_compressor
    if of_compressor not in (None, block):
        raise BadArgument(
            f"block is {block!r}, and the compressor leaves out blocks of {of_compressor} elements"
        )
    with suppress(TypeError):
        elements = operator.index(block)
        if elements in BLOCKS:
            return elements
    raise BadArgument(
        f"block is a power of two from {BLOCKS[0]} to {BLOCKS[-1]}, and not {block!r}"
    )


def checked_wire(wire: str | None, compressor: object = None) -> str | None:
    """How elements travel, if there is such a way, and the compressor rounds to no other."""
    if isinstance(compressor, Rounded) and wire not in (None, compressor.wire):
        raise BadArgument(f"wire is {wire!r}, and the compressor rounds to {compressor.wire}")
    if wire is not None and wire not in _WIRES:
        raise BadArgument(f"wire is one of {', '.join(_WIRES)}, and not {wire!r}")
    return wire


def wire_for(wire: str | None, dtype: torch.dtype) -> str | None:
    """How a tensor of a model travels: as the model's wire says, or ``None``, as it is.

    A model may have parameters of several types. Those that are as narrow as the wire, or that are
    no floats, have nothing to gain from it.
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
    """Says it once."""
    _log.info("tensors of %s travel as they are, and not as %s", dtype, wire)


class Compressor(Protocol):
    """Leaves something out of tensors."""

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """What is left of a tensor, and what :meth:`decompress` needs besides."""
        ...

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """A tensor of the shape of the one that was compressed."""
        ...


class Memory(Protocol):
    """Remembers what a compressor leaves out, by the name of the tensor."""

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor with what was left out before."""
        ...

    def update(
        self,
        tensor: torch.Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: list[torch.Tensor],
        ctx: Any,
    ) -> None:
        """Remembers what compressing the compensated tensor has left out."""
        ...


class ResidualMemory:
    """Error feedback: what is left out of a step is added to the next.

    :param beta: How much of what was left out counts.
    :param gamma: How much of the new gradient counts.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        self.beta = beta
        self.gamma = gamma
        self.residuals: dict[str, torch.Tensor] = {}

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor with what was left out of the one of this name before."""
        residual = self.residuals.get(name)
        if residual is None:
            return tensor * self.gamma if self.gamma != 1.0 else tensor
        if residual.shape != tensor.shape:
            raise BadArgument(
                f"{name} has {tensor.numel()} elements, and had {residual.numel()} before: what "
                "was left out of it then cannot be added; start to compress later (start_iter)"
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
        """Remembers the tensor less what it decompresses to, but for what is no number."""
        left = tensor - compressor.decompress(tensor_compressed, ctx)
        # An infinity, as a scaler of losses makes it now and then, would come back in every step.
        self.residuals[name] = torch.nan_to_num_(left, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was left out so far, for a checkpoint of this rank."""
        return dict(self.residuals)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes up what a checkpoint of this rank holds."""
        self.residuals = dict(state)


class BlockCompressor(ABC):
    """Keeps some blocks of a tensor.

    :param block: Elements of a block, as of the op that sums what is kept.
    """

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        self.block = block_of(block)

    @abstractmethod
    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """The indices of the blocks to keep, of a tensor of ``(count, block)`` elements."""

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """The blocks that are kept; their places, and the tensor's shape, stay here."""
        flat = tensor.flatten()
        missing = -len(flat) % self.block
        blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, self.block)
        chosen = self.choose(blocks, name)
        return [blocks[chosen]], (chosen, tensor.shape)

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """The tensor with zeros in place of what was left out."""
        (kept,), (chosen, shape) = tensors, ctx
        count = -(-shape.numel() // self.block)
        blocks = kept.new_zeros(count, self.block)
        blocks[chosen] = kept
        return blocks.view(-1)[: shape.numel()].view(shape)


class BlockTopK(BlockCompressor):
    """Keeps the blocks of the greatest Euclidean norms (OmniReduce's Block Top-k).

    :param k: How many of each tensor.
    """

    def __init__(self, k: int, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.k = whole_from(1, MAX_ELEMENTS)("k", k)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """The ``k`` blocks that weigh most."""
        return _heaviest(blocks, self.k)


class BlockTopKRatio(BlockCompressor):
    """Keeps the blocks of the greatest norms, a share of each tensor's (OmniReduce).

    :param compress_ratio: The share that is kept.
    """

    def __init__(self, compress_ratio: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """The share of blocks that weigh most, one at least."""
        return _heaviest(blocks, _count(len(blocks), self.compress_ratio))


class BlockRandomK(BlockCompressor):
    """Keeps a share of blocks at random, the same at all ranks.

    :param compress_ratio: The share that is kept.
    :param seed: All ranks give the same.
    """

    def __init__(self, compress_ratio: float, seed: int = 0, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)
        self.seed = seed
        self.steps: dict[str, int] = {}

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Blocks that the seed, the tensor's name and how often it came before decide."""
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        seed = zlib.crc32(f"{self.seed} {name} {step}".encode())
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        return order[: _count(len(blocks), self.compress_ratio)].to(blocks.device)

    def state_dict(self) -> dict[str, int]:
        """How often each tensor came."""
        return dict(self.steps)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on as a checkpoint says."""
        self.steps = dict(state)


class BlockThreshold(BlockCompressor):
    """Keeps the blocks in which some element is as great as this, or is not a number.

    :param threshold: The least magnitude.
    """

    def __init__(self, threshold: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.threshold = threshold

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """The blocks that hold a great element."""
        small = blocks.abs().amax(1) < self.threshold
        return torch.nonzero(~small).flatten()


class Rounded:
    """Rounds to what a wire type carries, after another compressor that keeps whole blocks.

    So what the wire would round off is remembered, and added to the next step.

    :param wire: ``"bf16"``, ``"f16"`` or ``"int8"``: that of the op as well.
    :param block: Elements of a block, as of the op; by default those of the other compressor.
    """

    def __init__(
        self, wire: str, compressor: Compressor | None = None, block: int | None = None
    ) -> None:
        if wire not in _ROUNDED:
            raise BadArgument(
                f"wire {wire!r} rounds nothing that is known; {', '.join(_ROUNDED)} do"
            )
        self.wire = wire
        self.compressor = compressor
        self.block = block_of(block, compressor)

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """What the compressor keeps, rounded."""
        if self.compressor is None:
            return [self._rounded(tensor)], None
        tensors, ctx = self.compressor.compress(tensor, name)
        return [self._rounded(kept) for kept in tensors], ctx

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """As of the compressor."""
        return tensors[0] if self.compressor is None else self.compressor.decompress(tensors, ctx)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if wire_for(self.wire, x.dtype) is None:
            return x
        return _ROUNDED[self.wire](x, self.block)


class Whole:
    """Leaves nothing out."""

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:  # noqa: ARG002
        """The tensor as it is."""
        return [tensor], None

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:  # noqa: ARG002
        """As it was."""
        return tensors[0]


def _as_bytes(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each element as a whole number of its block's scale, as ``racksum_proto::arith`` defines."""
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
        raise BadArgument(f"compress_ratio is a share above 0, and at most 1, and not {share}")
    return share
