"""Ranks that leave a process group before they have joined its job.

The aggregator does not know them yet, so the group's store tells the ranks that wait for them.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from racksum.errors import PeerLost
from racksum.torch.work import do_waiting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Departures", "of_this_life"]

#: Seconds until the first look at the store, which takes a connection: most ranks come sooner.
_GRACE = 1.0
#: Seconds between two looks.
_PERIOD = 0.2
#: Seconds that the end of the group or of its joining waits for the store.
_PATIENCE = 1.0
#: The key that is there once any rank has left; each that has left has its number as well.
_ANY = "any"


def of_this_life(store: Store, what: str) -> PrefixStore:
    """A part of a store that no life of the job before has written to.

    Ranks that torchrun 2.15 starts again find the store as it was.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"racksum/{what}/{life}", store)


class Departures:
    """What the ranks of a group say of their leaving.

    Made before the ranks first meet: an earlier group of this name may have used the same store.

    The process that serves the store may be gone, and then each call takes longer than the store's
    own limit; and another thread may wait at the store for a rank that waits for this one. So calls
    are made on threads and connections of their own.

    :param name: The group's, for messages.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int) -> None:
        self._store = of_this_life(store, "left")
        self._name = name
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        for key in (_ANY, str(rank)):
            self._store.delete_key(key)

    def note(self) -> None:
        """Says that this rank leaves, if the store takes it soon."""
        said = threading.Event()

        def say() -> None:
            try:
                store = self._store.clone()
                for key in (str(self._rank), _ANY):
                    store.set(key, "left")
            finally:
                said.set()

        do_waiting(say)
        said.wait(_PATIENCE)

    def watch(self) -> Watch:
        """A view for a thread that waits for the other ranks."""
        return Watch(self._store, self._name, self._others)


class Watch:
    """Finds out that other ranks have left."""

    def __init__(self, store: Store, name: str, others: list[int]) -> None:
        self._shared = store
        self._own: Store | None = None
        self._name = name
        self._others = others
        self._next = time.monotonic() + _GRACE
        self._left: list[int] = []
        # Set while no thread looks.
        self._rests = threading.Event()
        self._rests.set()

    def check(self) -> None:
        """Looks from time to time, if it is called often, and never waits for that.

        :raises PeerLost: If a rank has been seen to have left.
        """
        if time.monotonic() >= self._next and self._rests.is_set():
            self._begin()
        self._raise_if_left()

    def look(self) -> None:
        """Looks now, if the store answers soon.

        :raises PeerLost: If a rank has left.
        """
        if self._rests.wait(_PATIENCE):
            self._begin()
            self._rests.wait(_PATIENCE)
        self._raise_if_left()

    def _begin(self) -> None:
        self._rests.clear()
        do_waiting(self._look)

    def _look(self) -> None:
        try:
            with suppress(RuntimeError):
                store = self._own = self._own or self._shared.clone()
                if store.check([_ANY]):
                    self._left = [rank for rank in self._others if store.check([str(rank)])]
        finally:
            self._next = time.monotonic() + _PERIOD
            self._rests.set()

    def _raise_if_left(self) -> None:
        left = self._left
        if left:
            who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
            raise PeerLost(f"{who} left the process group {self._name} before joining it", left)
