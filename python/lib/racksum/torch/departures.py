"""Ranks that leave a process group before they have joined its job.

The aggregator does not know them yet, so the group's store tells the ranks that wait for them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from racksum.errors import JoinTimeout, PeerLost
from racksum.torch.work import do_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from racksum.errors import Error

__all__ = ["Departures", "Watch", "asking_store", "how_ended", "lost", "of_this_life"]

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


@contextmanager
def asking_store() -> Iterator[None]:
    """Says it in a sentence where a store is gone, of which torch prints a stack in C++.

    :raises PeerLost: If it is.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            "the store of the process groups does not answer, so no ranks can meet there: the "
            "process that served it, which is rank 0's or torchrun's, has ended or cannot be "
            "reached"
        ) from error


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
        with asking_store():
            for key in (_ANY, str(rank)):
                self._store.delete_key(key)

    def note(self, why: Error | None = None) -> None:
        """Says that this rank leaves, if the store takes it soon."""
        how = f"left the process group {self._name} before joining it"
        missing = why.missing if isinstance(why, JoinTimeout) else ()
        self._say([self._rank], f"{how}: {why}" if why else how, missing)

    def note_ended(self, ranks: Sequence[int]) -> None:
        """Says that other ranks have ended, which cannot say so, if the store takes it soon."""
        if ranks:
            self._say(ranks, how_ended(self._name))

    def watch(self) -> Watch:
        """A view for a thread that waits for the other ranks."""
        return Watch(self._store, self._others)

    def _say(self, ranks: Sequence[int], how: str, missing: Sequence[int] = ()) -> None:
        word = json.dumps([how, *missing])
        said = threading.Event()

        def say() -> None:
            try:
                store = self._store.clone()
                for rank in ranks:
                    store.set(str(rank), word)
                store.set(_ANY, "yes")
            finally:
                said.set()

        do_waiting(say)
        said.wait(_PATIENCE)


class Watch:
    """Finds out that other ranks have left."""

    def __init__(self, store: Store, others: list[int]) -> None:
        self._shared = store
        self._own: Store | None = None
        self._others = others
        self._next = time.monotonic() + _GRACE
        # What is said of each that has left, after its name, and whom it has waited for.
        self._left: dict[int, list[Any]] = {}
        # Set while no thread looks.
        self._rests = threading.Event()
        self._rests.set()

    def check(self) -> None:
        """Looks from time to time, if it is called often, and never waits for that.

        :raises PeerLost: If a rank has been seen to have left.
        :raises JoinTimeout: If it has waited for another in vain, as this one would.
        """
        if time.monotonic() >= self._next and self._rests.is_set():
            self._begin()
        self._raise_if_left()

    def look(self) -> None:
        """Looks now, if the store answers soon.

        :raises PeerLost: If a rank has left.
        :raises JoinTimeout: As ``check`` does.
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
                    left = [rank for rank in self._others if store.check([str(rank)])]
                    self._left = {rank: json.loads(store.get(str(rank))) for rank in left}
        finally:
            self._next = time.monotonic() + _PERIOD
            self._rests.set()

    def _raise_if_left(self) -> None:
        left = self._left
        if left:
            ranks = list(left)
            how, *missing = left[ranks[0]]
            # Who waits for others hears what those hear that have waited for longer.
            if missing and not set(missing) - set(self._others):
                raise JoinTimeout(sentence(ranks, how), missing)
            raise lost(ranks, how)


def lost(ranks: Sequence[int], how: str) -> PeerLost:
    """The error about ranks that are gone."""
    return PeerLost(sentence(ranks, how), ranks)


def sentence(ranks: Sequence[int], how: str) -> str:
    """What is said of ranks."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {how}"


def how_ended(name: str) -> str:
    """What is said of ranks of a group that cannot say anything themselves."""
    return f"ended before joining the process group {name}; see what its process said last"
