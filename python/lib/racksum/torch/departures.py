"""Ranks that leave a process group before they have joined its job.

The aggregator does not know them yet, so the group's store tells the ranks that wait for them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from racksum.errors import JoinTimeout, PeerLost
from racksum.threads import do_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from racksum.errors import Error

__all__ = ["Departures", "Watch", "asking_store", "how_ended", "lost", "of_this_life"]

#: Seconds until the first look at the store, which takes a connection: most ranks come sooner.
_GRACE = 1.0
#: Seconds between two looks.
_PERIOD = 0.2
#: Seconds that the end of the group or of its joining waits for a store whose server is there.
_PATIENCE = 5.0
#: Seconds that connecting to the store's server may take.
_REACH = 1.0
#: The key that is there once any rank has left; each that has left has its number as well.
_ANY = "any"
#: Servers of stores that could not be reached when a rank last left: host and port.
_unreachable: set[tuple[str, int]] = set()


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


def _server_of(store: Store) -> tuple[str, int] | None:
    """Returns the host and port of a store's server, if it has one."""
    while (under := getattr(store, "underlying_store", None)) is not None:
        store = under
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def _connected(store: Store) -> Store:
    """Returns a connection of its own to a store.

    A server that is gone is found out here. torch would try for minutes, and a process that ends
    meanwhile has to wait for that: Python aborts if a thread comes back from C++ at its end.

    :raises OSError: If the server cannot be reached.
    :raises RuntimeError: If it does not serve the store.
    """
    server = _server_of(store)
    if server is not None:
        try:
            socket.create_connection(server, _REACH).close()
        except OSError:
            _unreachable.add(server)
            raise
        _unreachable.discard(server)
    return store.clone()


class _Voice:
    """A connection to a store, over which a rank speaks of all of its groups.

    The process that serves the store may be gone, and then each call takes longer than the store's
    own limit; and another thread may wait at the store for a rank that waits for this one. So it
    speaks on a thread and a connection of its own. That is one for all groups: where the store's
    host has a name server that does not answer, torch's server takes seconds for each new one.
    """

    def __init__(self, store: Store) -> None:
        self._shared = store
        self._own: Store | None = None
        self._turn = threading.Lock()
        # Something that it was to say was not said in time.
        self._is_late = False

    def say(self, words: Callable[[Store], None]) -> None:
        """Has something said, and waits for that while the store takes it soon."""
        # One group after the other leaves: a server that is down costs time only once.
        if _server_of(self._shared) in _unreachable:
            return
        said = threading.Event()

        def speak() -> None:
            try:
                with self._turn:
                    self._speak(words)
            finally:
                said.set()

        do_waiting(speak)
        self._is_late = not said.wait(0 if self._is_late else _PATIENCE)

    def _speak(self, words: Callable[[Store], None]) -> None:
        try:
            if self._own is None:
                self._own = _connected(self._shared)
            words(self._own)
        except (RuntimeError, OSError):
            # The next words are worth another try.
            self._own = None


#: For the store of all ranks, for as long as a group of it is there.
_voices: weakref.WeakValueDictionary[Store, _Voice] = weakref.WeakValueDictionary()


class Departures:
    """What the ranks of a group say of their leaving.

    Made before the ranks first meet: an earlier group of this name may have used the same store.

    :param store: That of all ranks.
    :param name: The name of the group, which messages contain.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int) -> None:
        self._voice = _voices.setdefault(store, _Voice(store))
        self._store = _part_of(store, name)
        self._name = name
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        with asking_store():
            for key in (_ANY, str(rank), _here(rank)):
                self._store.delete_key(key)
        server = _server_of(store)
        if server is not None:
            _unreachable.discard(server)

    def note(self, why: Error | None = None) -> None:
        """Says that this rank leaves, if the store takes it soon."""
        how = f"left the process group {self._name} before joining it"
        missing = why.missing if isinstance(why, JoinTimeout) else ()
        self._say([self._rank], f"{how}: {why}" if why else how, missing)

    def note_ended(self, ranks: Sequence[int]) -> None:
        """Says that other ranks have ended without a word, if the store takes it soon."""
        self._say(ranks, how_ended(self._name))

    def watch(self, limit: float) -> Watch:
        """Returns a view for a thread that waits for the other ranks for so many seconds."""
        return Watch(self._store, self._rank, self._others, limit)

    def _say(self, ranks: Sequence[int], how: str, missing: Sequence[int] = ()) -> None:
        word = json.dumps([how, *missing])
        # Not the group's: what speaks may be late, and must not keep it.
        own, name = self._rank, self._name

        def words(store: Store) -> None:
            part = _part_of(store, name)
            for rank in ranks:
                if rank == own:
                    part.set(str(rank), word)
                else:
                    # A reason that the rank has given itself is kept.
                    part.compare_set(str(rank), "", word)
            part.set(_ANY, "yes")

        self._voice.say(words)


def _part_of(store: Store, name: str) -> PrefixStore:
    """The part of a store that is about a group."""
    return of_this_life(store, f"left/{name}")


def _here(rank: int) -> str:
    """Returns the key that is there once a rank has begun to join, and has waited a moment."""
    return f"here/{rank}"


class Watch:
    """Finds out that other ranks have left.

    :param limit: How many seconds the rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, others: list[int], limit: float = 3600.0) -> None:
        self._shared = store
        self._own: Store | None = None
        self._rank = rank
        self._others = others
        # Ranks that wait for less than the grace still say that they are here.
        self._next = time.monotonic() + min(_GRACE, limit / 4)
        # For each rank that has left: what messages say after its name, and whom it waited for.
        self._left: dict[int, list[Any]] = {}
        self._absent: list[int] = []
        self._has_answered = False
        #: Whether this has raised an error, whose cause all ranks can read in the store.
        self.has_raised = False
        # Set while no thread looks.
        self._rests = threading.Event()
        self._rests.set()

    def check(self) -> None:
        """Looks from time to time, if it is called often, and never waits for that.

        :raises PeerLost: If a rank has been seen to have left.
        :raises JoinTimeout: If it has waited for another in vain, as this one would.
        """
        if time.monotonic() >= self._next and self._rests.is_set():
            self._begin(self._look)
        self._raise_if_left()

    def look(self) -> bool:
        """Looks now, and returns whether the store has answered soon.

        :raises PeerLost: If a rank has left.
        :raises JoinTimeout: As ``check`` does.
        """
        has_answered = self._ask(self._look)
        self._raise_if_left()
        return has_answered

    def absent(self) -> list[int]:
        """Returns the ranks that have not begun to join, or none if the store does not answer."""
        return self._absent if self._ask(self._find_absent) else []

    def _ask(self, question: Callable[[Store], None]) -> bool:
        """Asks the store now, and returns whether it has answered soon."""
        if not self._rests.wait(_PATIENCE):
            return False
        self._begin(question)
        return self._rests.wait(_PATIENCE) and self._has_answered

    def _begin(self, question: Callable[[Store], None]) -> None:
        self._rests.clear()
        self._has_answered = False
        do_waiting(partial(self._do, question))

    def _do(self, question: Callable[[Store], None]) -> None:
        try:
            with suppress(RuntimeError, OSError):
                if self._own is None:
                    own = _connected(self._shared)
                    own.set(_here(self._rank), "yes")
                    self._own = own
                question(self._own)
                self._has_answered = True
        finally:
            self._next = time.monotonic() + _PERIOD
            self._rests.set()

    def _look(self, store: Store) -> None:
        if store.check([_ANY]):
            left = [rank for rank in self._others if store.check([str(rank)])]
            self._left = {rank: json.loads(store.get(str(rank))) for rank in left}

    def _find_absent(self, store: Store) -> None:
        self._absent = [rank for rank in self._others if not store.check([_here(rank)])]

    def _raise_if_left(self) -> None:
        left = self._left
        if not left:
            return
        ranks = sorted(left)
        by_reason: dict[str, list[int]] = {}
        for rank in ranks:
            by_reason.setdefault(left[rank][0], []).append(rank)
        text = "; ".join(sentence(those, how) for how, those in by_reason.items())
        missing = sorted({missed for _, *waited_for in left.values() for missed in waited_for})
        # A rank that waits for others hears the same as ranks that have waited for longer.
        all_waited = all(waited_for for _, *waited_for in left.values())
        self.has_raised = True
        if all_waited and set(missing) <= set(self._others):
            raise JoinTimeout(text, missing)
        raise PeerLost(text, ranks)


def lost(ranks: Sequence[int], how: str) -> PeerLost:
    """The error about ranks that are gone."""
    return PeerLost(sentence(ranks, how), ranks)


def sentence(ranks: Sequence[int], how: str) -> str:
    """Returns a sentence with the ranks as its subject."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {how}"


def how_ended(name: str) -> str:
    """Returns the rest of the sentence about ranks that ended without a word."""
    return (
        f"ended before joining the process group {name}, or closed its connections after a "
        "collective had failed there; see what its process said last"
    )
