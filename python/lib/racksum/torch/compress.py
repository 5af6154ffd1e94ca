"""Compressors, which leave out parts of gradients, and memories, which store the parts left out.

Compressors have the methods of GRACE (Xu et al., "GRACE: A Compressed Communication Framework for
Distributed Machine Learning", ICDCS 2021), so that compressors written for GRACE plug in. racksum
sums the decompressed tensor and does not send its blocks of zeros. The compressors here keep or
leave out whole blocks, so everything that they leave out saves bytes:

>>> state = racksum.torch.HookState(session, compressor=BlockTopKRatio(0.01))
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
    "BlockCompressor",
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

#: The valid sizes of a block, in elements.
BLOCKS = (32, 64, 128, 256, 512, 1024)

#: Bytes per element, by wire type of gradients. The other wire types are for integers.
_WIRES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "int8": 1, "fixed32": 4}
#: Bytes of an f16 or bf16 element. Converting one type to the other saves nothing.
_NARROW = 2


def block_of(block: int | None, compressor: object = None) -> int:
    """Returns the checked block size in elements: the given one, or else the compressor's.

    >>> block_of(None), block_of(None, BlockTopK(1, block=32))
    (256, 32)

    :param block: A power of two from 32 to 1024. By default the compressor's, or 256.
    :param compressor: A compressor. Its attribute ``block``, if it has one, is its block size.
    :raises BadArgument: The size is invalid, or differs from the compressor's: blocks of another
        size might be zero only in part, and would then be sent.
    """
    of_compressor = getattr(compressor, "block", None)
    if block is None:
        block = DEFAULT_BLOCK if of_compressor is None else of_compressor
    if of_compressor not in (None, block):
        raise BadArgument(
            f"block is {block!r}, but the compressor leaves out blocks of {of_compressor} "
            "elements; leave block out, or pass the same size to both"
        )
    with suppress(TypeError):
        elements = operator.index(block)
        if elements in BLOCKS:
            return elements
    raise BadArgument(
        f"block must be a power of two from {BLOCKS[0]} to {BLOCKS[-1]}, not {block!r}"
    )


def checked_wire(wire: str | None, compressor: object = None) -> str | None:
    """Returns the wire type, or raises if it does not exist or the compressor rounds to another.

    >>> checked_wire("int8")
    'int8'

    :param wire: A type of elements on the network, as for :meth:`racksum.Session.allreduce`.
    :param compressor: A compressor that the gradients go through first.
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

    A model may have parameters of several types. Integers, tensors narrower than the wire type,
    and 16-bit tensors with a 16-bit wire type would gain nothing from a conversion.

    >>> wire_for("bf16", torch.float32), wire_for("bf16", torch.float16)
    ('bf16', None)

    :param wire: A valid wire type, or None.
    :param dtype: The dtype of the tensor.
    """
    if wire is None or not dtype.is_floating_point:
        return None
    own, narrow = dtype.itemsize, _WIRES[wire]
    if own < narrow or own == narrow == _NARROW:
        _log_unchanged(wire, dtype)
        return None
    return wire


@functools.cache
def _log_unchanged(wire: str, dtype: torch.dtype) -> None:
    """Logs, once for each wire type and dtype, that tensors are sent unchanged."""
    _log.info("tensors of %s are sent unchanged, because wire=%s is not narrower", dtype, wire)


class Compressor(Protocol):
    """The interface of compressors, which leave parts of tensors out.

    Any class with these methods will do:

    >>> class PositiveOnly:
    ...     def compress(self, tensor, name):
    ...         return [tensor.clamp(min=0)], None
    ...
    ...     def decompress(self, tensors, ctx):
    ...         return tensors[0]
    >>> state = racksum.torch.HookState(session, compressor=PositiveOnly())
    """

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Returns the compressed tensor, and a context that :meth:`decompress` needs.

        >>> tensors, ctx = BlockTopK(1, block=32).compress(torch.arange(64.0), "bucket 0")
        >>> [tensor.shape for tensor in tensors]
        [torch.Size([1, 32])]

        :param tensor: A floating-point tensor of any shape, which must not be changed.
        :param name: The name of the tensor, the same in every step.
        """
        ...

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns the decompressed tensor, with the shape and the dtype of the original.

        >>> compressor = BlockTopK(1, block=32)
        >>> compressed = compressor.compress(torch.arange(64.0), "bucket 0")
        >>> compressor.decompress(*compressed).count_nonzero().item()
        32
        """
        ...


class Memory(Protocol):
    """The interface of memories, which keep residuals by the name of the tensor.

    >>> memory = ResidualMemory(beta=0.9)
    >>> compressor = BlockTopK(1, block=32)
    >>> state = racksum.torch.HookState(session, compressor=compressor, memory=memory)
    """

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the tensor plus the residual of earlier steps.

        >>> ResidualMemory().compensate(torch.ones(2), "bucket 0").tolist()  # The first step.
        [1.0, 1.0]
        """
        ...

    def update(
        self,
        tensor: torch.Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: list[torch.Tensor],
        ctx: Any,
    ) -> None:
        """Stores the residual: the parts of the compensated tensor that the compressor left out.

        >>> memory, compressor, x = ResidualMemory(), BlockTopK(1, block=32), torch.arange(64.0)
        >>> memory.update(x, "bucket 0", compressor, *compressor.compress(x, "bucket 0"))
        >>> memory.residuals["bucket 0"].count_nonzero().item()
        31

        :param tensor: The compensated tensor.
        :param name: The name of the tensor.
        :param compressor: The compressor.
        :param tensor_compressed: The tensors that the compressor returned.
        :param ctx: The context that the compressor returned.
        """
        ...


class ResidualMemory:
    """Error feedback: adds the parts that a step leaves out to the gradients of the next step.

    >>> memory, compressor, x = ResidualMemory(), BlockTopK(1, block=32), torch.ones(64)
    >>> memory.update(x, "bucket 0", compressor, *compressor.compress(x, "bucket 0"))
    >>> memory.compensate(x, "bucket 0").sum().item()  # 64 elements, and 32 that were left out.
    96.0

    :param beta: Weight of the residual.
    :param gamma: Weight of the new gradient.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        self.beta = beta
        self.gamma = gamma
        self.residuals: dict[str, torch.Tensor] = {}

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the weighted sum of the tensor and the residual of this name.

        >>> memory = ResidualMemory(beta=0.5)
        >>> memory.load_state_dict({"bucket 0": torch.tensor([4.0, 0.0])})
        >>> memory.compensate(torch.ones(2), "bucket 0").tolist()
        [3.0, 1.0]

        :param tensor: The flat gradients of a bucket.
        :param name: The name of the bucket.
        :raises BadArgument: The tensor of this name had another shape before.
        """
        residual = self.residuals.get(name)
        if residual is None:
            return tensor * self.gamma if self.gamma != 1.0 else tensor
        if residual.shape != tensor.shape:
            raise BadArgument(
                f"{name} has {tensor.numel()} elements, but its residual has {residual.numel()}; "
                "raise start_iter to begin compressing later"
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
        """Stores the residual: the tensor minus its decompressed form, with NaN and inf as zeros.

        >>> memory, compressor = ResidualMemory(), BlockTopK(1, block=32)
        >>> x = torch.cat([torch.full((32,), 9.0), torch.ones(32)])
        >>> memory.update(x, "bucket 0", compressor, *compressor.compress(x, "bucket 0"))
        >>> memory.residuals["bucket 0"].sum().item()
        32.0

        The parameters are those of :meth:`Memory.update`.
        """
        left = tensor - compressor.decompress(tensor_compressed, ctx)
        # A gradient scaler sometimes causes infinities, which would recur in every later step.
        self.residuals[name] = torch.nan_to_num_(left, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the residuals by name, for a checkpoint of this rank.

        >>> ResidualMemory().state_dict()  # Before the first compressed step.
        {}
        """
        return dict(self.residuals)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the residuals from a checkpoint of this rank.

        >>> memory = ResidualMemory()
        >>> memory.load_state_dict({"bucket 0": torch.zeros(64)})
        >>> list(memory.residuals)
        ['bucket 0']

        :param state: A result of :meth:`state_dict`.
        """
        self.residuals = dict(state)


class BlockCompressor(ABC):
    """Base class of compressors that keep some blocks of a tensor.

    >>> class FirstBlock(BlockCompressor):
    ...     def choose(self, blocks, name):
    ...         return torch.tensor([0])
    >>> tensors, ctx = FirstBlock(block=32).compress(torch.arange(64.0), "bucket 0")
    >>> tensors[0].shape
    torch.Size([1, 32])

    :param block: Elements of a block, a power of two from 32 to 1024. Ops must use the same size.
    :raises BadArgument: ``block`` is invalid.
    """

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        self.block = block_of(block)

    @abstractmethod
    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the int64 indices of the blocks to keep.

        >>> BlockTopK(1, block=32).choose(torch.eye(2, 32) * torch.tensor([[1], [3]]), "a")
        tensor([1])

        :param blocks: The tensor as a matrix of shape ``(count, block)``, padded with zeros.
        :param name: The name of the tensor.
        """

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Returns the blocks that are kept. The context holds their indices and the shape.

        >>> tensors, ctx = BlockTopK(1, block=32).compress(torch.arange(80.0).view(8, 10), "a")
        >>> tensors[0].shape, ctx
        (torch.Size([1, 32]), (tensor([2]), torch.Size([8, 10])))

        :param tensor: A floating-point tensor of any shape.
        :param name: The name of the tensor.
        """
        flat = tensor.flatten()
        missing = -len(flat) % self.block
        blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, self.block)
        chosen = self.choose(blocks, name)
        return [blocks[chosen]], (chosen, tensor.shape)

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns the tensor with zeros in the blocks that were left out.

        >>> compressor = BlockTopK(1, block=32)
        >>> x = compressor.decompress(*compressor.compress(torch.ones(8, 10), "a"))
        >>> x.shape, x.sum().item()
        (torch.Size([8, 10]), 32.0)
        """
        (kept,), (chosen, shape) = tensors, ctx
        count = -(-shape.numel() // self.block)
        blocks = kept.new_zeros(count, self.block)
        blocks[chosen] = kept
        return blocks.view(-1)[: shape.numel()].view(shape)


class BlockTopK(BlockCompressor):
    """Keeps the blocks with the greatest Euclidean norms (OmniReduce's Block Top-k).

    >>> compressor, x = BlockTopK(2, block=32), torch.ones(96)
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")).sum().item()
    64.0

    :param k: Number of blocks to keep of each tensor, 1 or more.
    :param block: Elements of a block, a power of two from 32 to 1024.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, k: int, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.k = whole_from(1, MAX_ELEMENTS)("k", k)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the ``k`` blocks with the greatest norms.

        >>> blocks = torch.tensor([[1.0], [3.0], [2.0]]).expand(3, 32)
        >>> sorted(BlockTopK(2, block=32).choose(blocks, "bucket 0").tolist())
        [1, 2]
        """
        return _heaviest(blocks, self.k)


class BlockTopKRatio(BlockCompressor):
    """Keeps a share of the blocks: those with the greatest norms (OmniReduce's Block Top-k Ratio).

    >>> compressor, x = BlockTopKRatio(0.25, block=32), torch.ones(8 * 32)
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")).sum().item()
    64.0

    :param compress_ratio: Share of each tensor's blocks to keep, above 0 and at most 1.
    :param block: Elements of a block, a power of two from 32 to 1024.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, compress_ratio: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the blocks to keep, those with the greatest norms; at least one.

        >>> blocks = torch.tensor([[1.0], [3.0], [2.0]]).expand(3, 32)
        >>> BlockTopKRatio(0.01, block=32).choose(blocks, "bucket 0").tolist()
        [1]
        """
        return _heaviest(blocks, _count(len(blocks), self.compress_ratio))


class BlockRandomK(BlockCompressor):
    """Keeps a random share of blocks, the same blocks at all ranks.

    >>> compressor, x = BlockRandomK(0.25, seed=7, block=32), torch.ones(8 * 32)
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")).sum().item()
    64.0

    :param compress_ratio: Share of each tensor's blocks to keep, above 0 and at most 1.
    :param seed: Seed of the random choice. All ranks must pass the same seed.
    :param block: Elements of a block, a power of two from 32 to 1024.
    :raises BadArgument: An argument is invalid.
    """

    def __init__(self, compress_ratio: float, seed: int = 0, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.compress_ratio = _share(compress_ratio)
        self.seed = seed
        self.steps: dict[str, int] = {}

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Returns random indices, derived from the seed, the tensor's name and the call's number.

        >>> of_ranks = BlockRandomK(0.25, seed=7), BlockRandomK(0.25, seed=7)
        >>> one, other = (of.choose(torch.ones(8, 256), "bucket 0") for of in of_ranks)
        >>> len(one), torch.equal(one, other)
        (2, True)
        """
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        seed = zlib.crc32(f"{self.seed} {name} {step}".encode())
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        return order[: _count(len(blocks), self.compress_ratio)].to(blocks.device)

    def state_dict(self) -> dict[str, int]:
        """Returns the number of calls for each tensor, by name, for a checkpoint.

        >>> compressor = BlockRandomK(0.25)
        >>> chosen = compressor.choose(torch.ones(8, 256), "bucket 0")
        >>> compressor.state_dict()
        {'bucket 0': 1}
        """
        return dict(self.steps)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the numbers of calls from a checkpoint.

        >>> compressor = BlockRandomK(0.25)
        >>> compressor.load_state_dict({"bucket 0": 100})
        >>> compressor.steps
        {'bucket 0': 100}

        :param state: A result of :meth:`state_dict`.
        """
        self.steps = dict(state)


class BlockThreshold(BlockCompressor):
    """Keeps the blocks with an element whose magnitude reaches a threshold, or with a NaN.

    >>> x = torch.cat([torch.full((32,), 0.1), torch.full((32,), -0.5)])
    >>> compressor = BlockThreshold(0.5, block=32)
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")).sum().item()
    -16.0

    :param threshold: The smallest magnitude at which an element keeps its block.
    :param block: Elements of a block, a power of two from 32 to 1024.
    :raises BadArgument: ``block`` is invalid.
    """

    def __init__(self, threshold: float, block: int = DEFAULT_BLOCK) -> None:
        super().__init__(block)
        self.threshold = threshold

    def choose(self, blocks: torch.Tensor, name: str) -> torch.Tensor:  # noqa: ARG002
        """Returns the indices of the blocks that reach the threshold or hold a NaN.

        >>> blocks = torch.tensor([[0.1], [0.5], [float("nan")]]).expand(3, 32)
        >>> BlockThreshold(0.5, block=32).choose(blocks, "bucket 0").tolist()
        [1, 2]
        """
        small = blocks.abs().amax(1) < self.threshold
        return torch.nonzero(~small).flatten()


class Rounded:
    """Rounds tensors to a wire type, after another compressor if one is given.

    A :class:`Memory` adds the rounding errors of a step to the next step, like other residuals.

    >>> compressor, x = Rounded("bf16"), torch.tensor([1.0, 1.001])
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")).tolist()
    [1.0, 1.0]

    :param wire: ``"bf16"``, ``"f16"`` or ``"int8"``. Ops send the tensor as this type.
    :param compressor: A compressor that keeps whole blocks; by default none.
    :param block: Elements of a block, a power of two from 32 to 1024. By default the compressor's,
        or 256.
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
        """Returns the tensors that the compressor keeps, rounded, and the compressor's context.

        >>> tensors, ctx = Rounded("int8").compress(torch.tensor([127.0, 0.4]), "bucket 0")
        >>> tensors[0].tolist()  # The scale of the block is 1.
        [127.0, 0.0]

        :param tensor: A floating-point tensor of any shape.
        :param name: The name of the tensor.
        """
        if self.compressor is None:
            return [self._rounded(tensor)], None
        tensors, ctx = self.compressor.compress(tensor, name)
        return [self._rounded(kept) for kept in tensors], ctx

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        """Returns the rounded tensor, decompressed by the compressor if there is one.

        >>> compressor = Rounded("f16", BlockTopK(1, block=32))
        >>> compressor.decompress(*compressor.compress(torch.ones(64), "bucket 0")).sum().item()
        32.0
        """
        return tensors[0] if self.compressor is None else self.compressor.decompress(tensors, ctx)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if wire_for(self.wire, x.dtype) is None:
            return x
        return _ROUNDED[self.wire](x, self.block)


class Whole:
    """A compressor that leaves nothing out.

    >>> compressor, x = Whole(), torch.ones(64)
    >>> compressor.decompress(*compressor.compress(x, "bucket 0")) is x
    True
    """

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:  # noqa: ARG002
        """Returns the tensor unchanged.

        >>> Whole().compress(torch.ones(2), "bucket 0")
        ([tensor([1., 1.])], None)
        """
        return [tensor], None

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:  # noqa: ARG002
        """Returns the tensor that was compressed.

        >>> Whole().decompress([torch.ones(2)], None)
        tensor([1., 1.])
        """
        return tensors[0]


def _as_bytes(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rounds elements to multiples of their block's scale, as ``racksum_proto::arith`` does."""
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
