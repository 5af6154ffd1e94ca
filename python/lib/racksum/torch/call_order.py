"""The calls of a process group, which all ranks number alike. Calls on the same memory take turns.

A rank that refuses a call tells the others (:meth:`racksum.Session.refuse`). Otherwise its next
call would pair with the call that it refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from racksum.call import PartOf
from racksum.errors import WaitTimeout
from racksum.futures import as_exception, own_streams_on
from racksum.session import begin_ops_here
from racksum.tensor import address_of, check_unmoved
from racksum.threads import SerialExecutor
from racksum.torch.staging import so_far
from racksum.torch.work import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from racksum.torch.work import Wait, Work

__all__ = ["Call", "Chain", "numbered"]


class Call:
    """A call of a collective, with the number of ops that it has yet to begin."""

    def __init__(self, collective: str, number: int, ops: int) -> None:
        self.collective = collective
        self.number = number
        self.root = 0
        self._left = ops

    def part(self) -> PartOf:
        """Counts the call's next op as begun, and returns its ``part_of``."""
        self._left -= 1
        return PartOf(self.collective, self.root, self.number)

    @property
    def left(self) -> int:
        """The number of ops that the call has yet to begin."""
        return self._left

    def rest(self) -> list[PartOf]:
        """Removes all remaining ops from the call, and returns the ``part_of`` of each."""
        return [self.part() for _ in range(self._left)]


def numbered(
    collective: str, ops: Callable[..., int] = lambda *_: 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that numbers the calls of a method within its group.

    The method receives the :class:`Call` before its arguments. A refused call is numbered too.
    Calls of several threads run one after another, so that ops begin in the order of their numbers.

    :param ops: A function of the call's arguments. Returns how many ops the call has at ranks that
        do not refuse it.
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
    """Begins collectives on a thread if they cannot begin immediately, so that no caller waits.

    On that thread a collective waits for earlier collectives on the same memory, for room, or for
    the rank to join. Meanwhile later collectives queue behind it, because all ranks must begin ops
    in the same order.
    """

    def __init__(self) -> None:
        self._thread = SerialExecutor("racksum-chain", begin_ops_here)
        # Set once the ops of the last collective are in flight or have failed.
        self._has_begun = threading.Event()
        self._has_begun.set()

    def is_behind(self) -> bool:
        """Returns whether a collective has yet to begin on a thread other than the current one."""
        return not self._has_begun.is_set() and not self._thread.is_current()

    def is_current(self) -> bool:
        """Returns whether the current thread is the one that begins collectives."""
        return self._thread.is_current()

    def defer(
        self,
        earlier: Sequence[Work],
        begin: Callable[[], Sequence[Wait]],
        touched: Sequence[Tensor],
        refuse: Callable[[], None] = lambda: None,
    ) -> Deferred:
        """Queues a collective, which begins once earlier works have succeeded or failed.

        :param earlier: The works to wait for.
        :param begin: Begins the ops of the collective. Returns, for each op, a function that waits.
        :param touched: The tensors that the collective reads or writes. It fails if the memory
            of one of these tensors is replaced before it begins.
        :param refuse: Called if the collective fails before its ops have begun. Tells the other
            ranks which ops do not begin.
        """
        devices = {x.device for x in touched}
        ready = [so_far(device) for device in devices if device.type != "cpu"]
        inference = torch.is_inference_mode_enabled()
        addresses = [address_of(x) for x in touched]

        def begin_in_turn() -> Sequence[Wait]:
            with own_streams_on(devices), torch.inference_mode(inference), torch.no_grad():
                for event in ready:
                    event.synchronize()
                for work in earlier:
                    # Ignore the error: a caller that waits for the work gets it.
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
            # If a signal handler raised this, the thread may already have begun the collective.
            if deferred.take():
                self._has_begun = before
            raise
        return deferred

    def drain(self) -> None:
        """Waits until all queued collectives have begun."""
        if self.is_behind():
            self._thread.drain()


class Deferred:
    """A collective that begins later, on the thread of the chain."""

    def __init__(self) -> None:
        #: Set once the collective's ops are in flight or have failed.
        self.begun = threading.Event()
        self._taken = threading.Lock()
        self._parts = Parts(())
        self._error: Exception | None = None

    def take(self) -> bool:
        """Returns true to the first caller, which alone may begin or refuse the collective."""
        return self._taken.acquire(blocking=False)

    def begin(self, begin: Callable[[], Sequence[Wait]], refuse: Callable[[], None]) -> None:
        """Begins the collective, or refuses it if it cannot begin."""
        if not self.take():
            return
        try:
            self._parts = Parts(begin())
        except BaseException as error:
            # A caller that waits for the collective gets this error.
            self._error = as_exception(error)
            refuse()
        finally:
            self.begun.set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the collective to begin and to end, each for ``timeout`` seconds at most."""
        if not self.begun.wait(timeout):
            raise WaitTimeout(
                "the collective has not begun yet: it is waiting for earlier collectives to end or "
                "for all ranks to join; wait again"
            )
        if self._error is not None:
            raise self._error
        self._parts.wait(timeout)
