"""Sums of sparse COO tensors, such as gradients of `nn.Embedding(sparse=True)`, as block lists."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from racksum.call import PartOf
from racksum.eager import eager
from racksum.errors import BadArgument
from racksum.options import MAX_ELEMENTS
from racksum.session import DEFAULT_BLOCK, Session, checked_session
from racksum.torch.staging import staging_of, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from racksum.handle import Handle

__all__ = ["allreduce_sparse"]

#: The smallest and the largest block, in elements.
_LEAST_BLOCK, _MOST_BLOCK = 32, 1024


@eager
def allreduce_sparse(
    session: Session,
    x: torch.Tensor,
    op: str = "sum",
    *,
    wire: str | None = None,
    lane: int = 0,
    part_of: PartOf | None = None,
) -> Handle[torch.Tensor]:
    """Starts reducing a sparse COO tensor across all ranks, and returns a handle.

    Ranks may have different entries, no entries, or an entry more than once. Only blocks that hold
    an entry are sent, without an index for each entry:

    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> gradient = torch.sparse_coo_tensor([[5, 900]], rows, (1000, 2))
    >>> total = racksum.torch.allreduce_sparse(session, gradient, "avg").wait()
    >>> total.indices().tolist(), total.values().tolist()
    ([[5, 900]], [[1.0, 2.0], [3.0, 4.0]])

    :param session: The session that reduces the tensor.
    :param x: A sparse COO tensor, coalesced or not, of the same shape at all ranks. Its dtype is
        float32, float64, float16, bfloat16, int32 or int64. It may be on a GPU.
    :param op: ``"sum"`` or ``"avg"``. An entry that a rank lacks counts as zero.
    :param wire: Type of the elements on the network, as for :meth:`racksum.Session.allreduce`.
    :param lane: Lane of the op, below the session's ``lanes``.
    :param part_of: The collective call that the op belongs to; only the backend sets it.
    :return: A handle of a new tensor: coalesced, on the device of ``x``, with the entries that are
        not zero.
    :raises racksum.BadArgument: ``x`` or ``op`` is invalid. No element was sent.
    """
    session = checked_session(session)
    reporting = partial(session.reporting_refusals, part_of)
    how: dict[str, Any] = {"wire": wire, "lane": lane, "part_of": part_of}
    with reporting():
        _check(x, op)
        staging = staging_of(session)
        packed = None if staging.takes(x.device) else _Packed.of(x)
    if packed is not None:
        return _started(session, packed, op, **how)

    def start() -> Handle[torch.Tensor]:
        with reporting():
            indices, values = to_host(x._indices(), x._values())
            entries = torch.sparse_coo_tensor(indices, values, x.shape, check_invariants=False)
            on_host = _Packed.of(entries)
        return _started(session, on_host, op, **how)

    finish = lambda sums: sums.to(x.device, non_blocking=True)  # noqa: E731
    return staging.stage(x.device, start, finish, reporting)


def _check(x: torch.Tensor, op: str) -> None:
    if op not in ("sum", "avg"):
        raise BadArgument(f'op must be "sum" or "avg" for a sparse tensor, not {op!r}')
    if x.layout is not torch.sparse_coo or x.sparse_dim() == 0:
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} and layout {x.layout} has no sparse COO "
            "dimension; pass x.to_sparse(), or use Session.allreduce for dense tensors"
        )
    if math.prod(x.shape) > MAX_ELEMENTS:
        raise BadArgument(
            f"the sparse tensor of shape {tuple(x.shape)} has {math.prod(x.shape)} places for "
            f"elements, more than the limit of {MAX_ELEMENTS}; split it"
        )


def _started(
    session: Session,
    packed: _Packed,
    op: str,
    *,
    wire: str | None,
    lane: int,
    part_of: PartOf | None,
) -> Handle[torch.Tensor]:
    layout, indices, values, unpack = packed
    handle: Handle[tuple[torch.Tensor, torch.Tensor]] = session.allreduce_blocks(
        indices,
        values,
        layout.rows * layout.width,
        op,
        wire=wire,
        block=layout.block,
        lane=lane,
        # Ranks that pass another shape or a dense tensor get `Mismatch`.
        tag=f"sparse {tuple(layout.shape)} {layout.sparse_dim}",
        async_op=True,
        part_of=part_of,
    )
    return handle.then(lambda sums: layout.sparse(*unpack(*sums)))


class _Packed(NamedTuple):
    """A sparse tensor, in the form of the blocks that hold its entries."""

    layout: _Layout
    indices: torch.Tensor
    values: torch.Tensor
    #: Converts the blocks of the result back to rows.
    unpack: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Packed:
        layout = _Layout.of(x)
        return cls(layout, *layout.pack(x))


class _Layout(NamedTuple):
    """A sparse tensor's layout in rows: a row of `width` elements for each sparse index."""

    shape: torch.Size
    sparse_dim: int
    rows: int
    width: int
    block: int

    @classmethod
    def of(cls, x: torch.Tensor) -> _Layout:
        sparse_dim = x.sparse_dim()
        rows, width = x.shape[:sparse_dim].numel(), x.shape[sparse_dim:].numel()
        # If rows consist of whole blocks, their elements need no rearranging.
        block = max(width & -width, 1)
        if block < _LEAST_BLOCK:
            block = DEFAULT_BLOCK
        return cls(x.shape, sparse_dim, rows, width, min(block, _MOST_BLOCK))

    def pack(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
        """Returns the blocks that hold entries, and a function that unpacks the result's blocks."""
        rows = self._flat(x._indices())
        values = x._values().reshape(len(rows), self.width)
        if self.width % self.block == 0:
            return (*self._split(rows, values), self._joined)
        return (*self._scattered(rows, values), self._gathered)

    def _flat(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns the row numbers of entries with these indices."""
        rows = indices[0]
        for index, size in zip(indices[1:], self.shape[1 : self.sparse_dim], strict=True):
            rows = rows * size + index
        return rows

    def _split(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits rows into blocks. Each row must consist of whole blocks."""
        each = self.width // self.block
        if each > 1:
            rows = (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
        return rows.contiguous(), values.contiguous().flatten()

    def _joined(
        self, blocks: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Joins blocks into rows of whole blocks. Blocks that are not listed become zeros."""
        each = self.width // self.block
        if each <= 1:
            return blocks, values
        rows, of_block = torch.unique_consecutive(blocks // each, return_inverse=True)
        joined = values.new_zeros(len(rows), each, self.block)
        joined[of_block, blocks % each] = values.view(-1, self.block)
        return rows, joined.view(-1, self.width)

    def _scattered(
        self, rows: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes rows, which may begin or end within a block, to new blocks. Sums repeated rows."""
        elements = (
            rows[:, None] * self.width + torch.arange(self.width, device=rows.device)
        ).flatten()
        blocks, of_element = torch.unique(elements // self.block, return_inverse=True)
        scattered = values.new_zeros(len(blocks) * self.block)
        scattered.index_add_(0, of_element * self.block + elements % self.block, values.flatten())
        beyond = (blocks[-1].item() + 1) * self.block - self.rows * self.width if len(blocks) else 0
        return blocks, scattered[: len(scattered) - max(beyond, 0)]

    def _gathered(
        self, blocks: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers the rows that are not all zeros from the blocks that hold parts of them."""
        elements = (
            blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)
        ).flatten()
        elements = elements[: len(values)]
        nonzero = values != 0
        elements, values = elements[nonzero], values[nonzero]
        rows, of_element = torch.unique_consecutive(elements // self.width, return_inverse=True)
        gathered = values.new_zeros(len(rows), self.width)
        gathered[of_element, elements % self.width] = values
        return rows, gathered

    def sparse(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns a coalesced tensor of these rows."""
        # `torch.unravel_index` would import SymPy, which takes a long time.
        parts: list[torch.Tensor] = []
        for size in reversed(self.shape[1 : self.sparse_dim]):
            parts.append(rows % size)
            rows = rows.div(size, rounding_mode="floor")
        indices = torch.stack([rows, *reversed(parts)]) if parts else rows[None]
        values = values.view(len(rows), *self.shape[self.sparse_dim :])
        return torch.sparse_coo_tensor(
            indices, values, self.shape, is_coalesced=True, check_invariants=False
        )
