"""Ranks that leave a process group before they have joined its job.

The aggregator does not know them yet, so the group's store tells the ranks that wait for them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from racksum.errors import PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Departures", "of_this_life"]

#: Seconds until the first look at the store, which takes a connection: most ranks come sooner.
_GRACE = 1.0
#: Seconds between two looks.
_PERIOD = 0.2
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
        """Says that this rank leaves."""
        # The process that serves the store may be gone, and with it whoever would ask.
        with suppress(RuntimeError):
            for key in (str(self._rank), _ANY):
                self._store.set(key, "left")

    def watch(self) -> Watch:
        """A view for a thread that waits for the other ranks."""
        return Watch(self._store, self._name, self._others)


class Watch:
    """Finds out that other ranks have left.

    It has a connection of its own: another thread may wait at the store for a rank that waits for
    this one.
    """

    def __init__(self, store: Store, name: str, others: list[int]) -> None:
        self._shared = store
        self._own: Store | None = None
        self._name = name
        self._others = others
        self._next = time.monotonic() + _GRACE

    def check(self) -> None:
        """Looks from time to time, if it is called often.

        :raises PeerLost: If a rank has left.
        """
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PERIOD
            self.look()

    def look(self) -> None:
        """Looks now.

        :raises PeerLost: If a rank has left.
        """
        left = self._left()
        if left:
            who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
            raise PeerLost(f"{who} left the process group {self._name} before joining it", left)

    def _left(self) -> list[int]:
        # The process that serves the store may be gone: the wait for its rank has a limit then.
        with suppress(RuntimeError):
            store = self._own = self._own or self._shared.clone()
            if store.check([_ANY]):
                return [rank for rank in self._others if store.check([str(rank)])]
        return []
