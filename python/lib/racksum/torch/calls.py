"""The calls of a process group: numbered alike at every rank, and in turns where they share memory.

A rank that refuses a call tells the others so (:meth:`racksum.Session.refuse`): otherwise its next
call would be taken for the one that it refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from racksum.errors import WaitTimeout
from racksum.futures import as_exception, own_streams_on
from racksum.session import PartOf, begin_ops_here
from racksum.tensor import address_of, check_unmoved
from racksum.threads import SerialExecutor
from racksum.torch.staging import so_far
from racksum.torch.work import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from racksum.torch.work import Waits, Work

__all__ = ["Call", "Chain", "numbered"]


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

    @property
    def left(self) -> int:
        """How many ops it has yet to begin."""
        return self._left

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
                    self._catch_up()
                    return method(self, call, *args, **named)
                except BaseException:
                    self._refuse(call)
                    raise

        return call_it

    return decorate


class Chain:
    """Begins collectives on a thread where they cannot begin at once, so that no caller waits.

    They wait there for earlier ones on the same memory, for room, or to join. While one waits,
    those after it go there as well: all ranks begin ops in one order.
    """

    def __init__(self) -> None:
        self._thread = SerialExecutor("racksum-chain", begin_ops_here)
        # Of the last collective: its ops are in flight, or have failed.
        self._has_begun = threading.Event()
        self._has_begun.set()

    def is_behind(self) -> bool:
        """Whether something has yet to begin, and this is not the thread that begins it."""
        return not self._has_begun.is_set() and not self._thread.is_current()

    def is_current(self) -> bool:
        """Whether this is the thread that begins what waits."""
        return self._thread.is_current()

    def defer(
        self,
        earlier: Sequence[Work],
        begin: Callable[[], Sequence[Waits]],
        touched: Sequence[Tensor],
        refuse: Callable[[], None] = lambda: None,
    ) -> Deferred:
        """Has a collective begin once these have ended, well or not.

        :param touched: What it reads and writes. A tensor that is given other memory before is
            refused, as while an op runs.
        :param refuse: Tells the other ranks of what has not begun, if something fails before.
        """
        devices = {x.device for x in touched}
        ready = [so_far(device) for device in devices if device.type != "cpu"]
        inference = torch.is_inference_mode_enabled()
        addresses = [address_of(x) for x in touched]

        def begin_in_turn() -> Sequence[Waits]:
            with own_streams_on(devices), torch.inference_mode(inference), torch.no_grad():
                for event in ready:
                    event.synchronize()
                for work in earlier:
                    # Whoever waits for it is told.
                    with contextlib.suppress(Exception):
                        work.wait_for(None)
                for x, address in zip(touched, addresses, strict=True):
                    check_unmoved(x, address)
                return begin()

        deferred = Deferred()
        before, self._has_begun = self._has_begun, deferred.begun
        try:
            self._thread.do(partial(deferred.begin, begin_in_turn, refuse))
        except BaseException:
            # The thread may have it already, if it was a signal's handler that raised this.
            if deferred.take():
                self._has_begun = before
            raise
        return deferred

    def drain(self) -> None:
        """Waits until all has begun."""
        if self.is_behind():
            self._thread.drain()


class Deferred:
    """A collective that begins later."""

    def __init__(self) -> None:
        #: Its ops are in flight, or have failed.
        self.begun = threading.Event()
        self._taken = threading.Lock()
        self._parts = Parts(())
        self._error: Exception | None = None

    def take(self) -> bool:
        """Whether it has yet to begin; then only whoever asked may begin or refuse it."""
        return self._taken.acquire(blocking=False)

    def begin(self, begin: Callable[[], Sequence[Waits]], refuse: Callable[[], None]) -> None:
        """Begins it, or refuses it if that fails."""
        if not self.take():
            return
        try:
            self._parts = Parts(begin())
        except BaseException as error:
            # Whoever waits for it is told.
            self._error = as_exception(error)
            refuse()
        finally:
            self.begun.set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for it to begin and end."""
        if not self.begun.wait(timeout):
            raise WaitTimeout("the collective waits for its turn after earlier ones")
        if self._error is not None:
            raise self._error
        self._parts.wait(timeout)
