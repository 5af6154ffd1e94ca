"""The memory that tensors cover, and the works in flight that use it.

Sorted spans make overlaps quick to find: a call may have thousands of tensors, and thousands of
calls may be in flight.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from racksum.torch.work import Work

__all__ = ["Extents", "OnMemory", "extents_of", "share_memory"]

#: Ranges of memory: the device, the first address, and the address after the last.
Extents = list[tuple[torch.device, int, int]]

#: Once a device has more spans than this, those of ended works are removed for the first time.
_FEW = 64


def extents_of(tensors: Any) -> Extents:
    """Returns the memory of tensors, from the first to the last element of each."""
    return [extent for x in tree_leaves(tensors) if isinstance(x, Tensor) for extent in _extents(x)]


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Returns whether any two of the tensors have memory in common."""
    spans = sorted(
        (str(device), start, end, which)
        for which, x in enumerate(tensors)
        for device, start, end in _extents(x)
    )
    at, last, owner = "", 0, -1
    for device, start, end, which in spans:
        if device != at:
            at, last = device, 0
        if start < last and which != owner:
            return True
        if end > last:
            last, owner = end, which
    return False


class OnMemory:
    """An index of the works in flight, keyed by the memory that they use.

    A work begins when earlier works on its memory have ended. So for each part of the memory only
    the last work counts.

    :param in_flight: The works that have not ended.
    """

    def __init__(self, in_flight: dict[Work, None]) -> None:
        self._in_flight = in_flight
        self._devices: dict[torch.device, _Spans] = {}

    def works(self, extents: Extents) -> list[Work]:
        """Returns the works that last used this memory, except those that have ended."""
        found: dict[Work, None] = {}
        for device, start, end in extents:
            spans = self._devices.get(device)
            if spans is not None:
                for named in spans.works[spans.overlapping(start, end)]:
                    work = named()
                    if work is not None and work in self._in_flight:
                        found[work] = None
        return [work for work in found if not work.has_ended()]

    def add(self, work: Work, extents: Extents) -> None:
        """Records a work as the last one that uses this memory."""
        # A work keeps its tensors alive, so this index must not keep the work alive.
        named = weakref.ref(work)
        for device, start, end in extents:
            spans = self._devices.get(device)
            if spans is None:
                spans = self._devices[device] = _Spans()
            spans.put(start, end, named)
            if len(spans.works) > spans.most:
                spans.keep(self._in_flight)


class _Spans:
    """Sorted spans of a device's memory that do not overlap, each with its last work."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.works: list[weakref.ref[Work]] = []
        #: If there are more spans than this, those of ended works are removed.
        self.most = _FEW

    def overlapping(self, start: int, end: int) -> slice:
        """Returns the spans that have memory in common with this range."""
        first = bisect_right(self.ends, start)
        return slice(first, max(first, bisect_left(self.starts, end)))

    def put(self, start: int, end: int, work: weakref.ref[Work]) -> None:
        """Assigns a range to a work. Spans that reach beyond the range are cut."""
        overlap = self.overlapping(start, end)
        new = [(start, end, work)]
        if overlap.start < overlap.stop:
            first, last = overlap.start, overlap.stop - 1
            if self.starts[first] < start:
                new.insert(0, (self.starts[first], start, self.works[first]))
            if self.ends[last] > end:
                new.append((end, self.ends[last], self.works[last]))
        self.starts[overlap] = [start for start, _, _ in new]
        self.ends[overlap] = [end for _, end, _ in new]
        self.works[overlap] = [work for _, _, work in new]

    def keep(self, in_flight: dict[Work, None]) -> None:
        """Removes the spans of works that are no longer in flight."""
        kept = [at for at, work in enumerate(self.works) if work() in in_flight]
        self.starts = [self.starts[at] for at in kept]
        self.ends = [self.ends[at] for at in kept]
        self.works = [self.works[at] for at in kept]
        self.most = max(_FEW, 2 * len(kept))


def _extents(x: Tensor) -> Iterable[tuple[torch.device, int, int]]:
    if x.is_sparse:
        return [*_extents(x._indices()), *_extents(x._values())]
    if x.layout is not torch.strided or not x.numel():
        return []
    try:
        start = x.data_ptr()
    except RuntimeError:
        # A FakeTensor has no memory.
        return []
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return [(x.device, start, start + (last + 1) * x.element_size())]
