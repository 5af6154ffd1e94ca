"""The calls of a process group: numbered alike at every rank, and in turns where they share memory.

A rank that refuses a call tells the others so (:meth:`racksum.Session.refuse`): otherwise its next
call would be taken for the one that it refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from racksum.errors import WaitTimeout
from racksum.session import PartOf
from racksum.torch.staging import so_far
from racksum.torch.work import InOrder, own_streams_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from racksum.torch.work import Waits, Work

__all__ = ["Call", "Chain", "Extents", "extents_of", "meet", "numbered"]

#: Where tensors lie: the device, and the first address and the one after the last.
Extents = list[tuple[torch.device, int, int]]


class Call:
    """A call of a collective, and how many ops it has yet to begin."""

    def __init__(self, collective: str, number: int, ops: int) -> None:
        self.collective = collective
        self.number = number
        self.root = 0
        self._left = ops

    def part(self) -> PartOf:
        """What the next op says that it is part of."""
        self._left -= 1
        return PartOf(self.collective, self.root, self.number)

    def rest(self) -> list[PartOf]:
        """The ops that the call has not begun, and will not."""
        return [self.part() for _ in range(self._left)]


def numbered(
    collective: str, ops: Callable[..., int] = lambda *_: 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a method one call of its group, which has its number also if it is refused.

    The method is given the :class:`Call` before its arguments. Calls of several threads come one
    after the other: their ops begin in the order of their numbers.

    :param ops: How many ops the call has at the ranks that do not refuse it, by its arguments.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call_it(self: Any, *args: Any, **named: Any) -> Any:
            with self._calling:
                call = self._new_call(collective, ops(*args, **named))
                try:
                    return method(self, call, *args, **named)
                except BaseException:
                    self._refuse(call)
                    raise

        return call_it

    return decorate


class Chain:
    """Begins collectives on a thread where they wait for earlier ones on the same memory.

    While one waits there, those after it go there as well: all ranks begin ops in one order.
    """

    def __init__(self) -> None:
        self._thread = InOrder("racksum-chain")
        self._last: Deferred | None = None

    def is_behind(self) -> bool:
        """Whether something has yet to begin, and this is not the thread that begins it."""
        return (
            self._last is not None and not self._last.has_begun() and not self._thread.is_current()
        )

    def defer(
        self,
        earlier: Sequence[Work],
        begin: Callable[[], Sequence[Waits]],
        touched: Sequence[Tensor],
    ) -> Deferred:
        """Has a collective begin once these have ended, well or not."""
        devices = {x.device for x in touched}
        ready = [so_far(device) for device in devices if device.type != "cpu"]
        inference = torch.is_inference_mode_enabled()
        self._last = deferred = Deferred()

        def begin_in_turn() -> None:
            with own_streams_on(devices), torch.inference_mode(inference), torch.no_grad():
                for event in ready:
                    event.synchronize()
                for work in earlier:
                    # Whoever waits for it is told.
                    with contextlib.suppress(Exception):
                        work.wait_for(None)
                deferred.begin(begin)

        self._thread.do(begin_in_turn)
        return deferred

    def drain(self) -> None:
        """Waits until all has begun."""
        if self.is_behind():
            self._thread.drain()


class Deferred:
    """A collective that begins later."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._parts: Sequence[Waits] = ()
        self._error: Exception | None = None

    def has_begun(self) -> bool:
        """Whether its ops are in flight, or have failed."""
        return self._begun.is_set()

    def begin(self, begin: Callable[[], Sequence[Waits]]) -> None:
        """Begins it."""
        try:
            self._parts = begin()
        except Exception as error:
            # Whoever waits for it is told.
            self._error = error
        self._begun.set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for it to begin and end."""
        if not self._begun.wait(timeout):
            raise WaitTimeout("the collective waits for one on the same memory")
        if self._error is not None:
            raise self._error
        for part in self._parts:
            part.wait(timeout)


def extents_of(tensors: Any) -> Extents:
    """Where tensors lie, from the first to the last element of each."""
    return [extent for x in tree_leaves(tensors) if isinstance(x, Tensor) for extent in _extents(x)]


def _extents(x: Tensor) -> Iterable[tuple[torch.device, int, int]]:
    if x.is_sparse:
        return [*_extents(x._indices()), *_extents(x._values())]
    if x.layout is not torch.strided or not x.numel():
        return []
    try:
        start = x.data_ptr()
    except RuntimeError:
        # What only stands for a tensor has no memory to share.
        return []
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return [(x.device, start, start + (last + 1) * x.element_size())]


def meet(one: Extents, other: Extents) -> bool:
    """Whether tensors of both have memory in common."""
    return any(
        device == its and start < its_end and its_start < end
        for device, start, end in one
        for its, its_start, its_end in other
    )
