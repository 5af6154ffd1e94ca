"""Ranks that leave a process group before they have joined its job.

The aggregator does not know them yet, so the ranks that wait for them ask the group's store.
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

__all__ = ["Departures", "Watch", "converting_store_errors", "how_ended", "lost", "of_this_life"]

#: Seconds before the first query of the store. Most ranks join sooner and need not connect to it.
_GRACE = 1.0
#: Seconds between two queries.
_PERIOD = 0.2
#: Seconds to wait for the store when a rank leaves or stops joining.
_PATIENCE = 5.0
#: Seconds that connecting to the store's server may take.
_REACH = 1.0
#: The key that exists once any rank has left. Each rank that has left also has a key of its own.
_ANY = "any"
#: The host and port of each store server that could not be reached at the last attempt.
_unreachable: set[tuple[str, int]] = set()


def of_this_life(store: Store, what: str) -> PrefixStore:
    """Returns a part of a store that no earlier life of the job has written to.

    With torch 2.15, ranks that torchrun restarts find the store as the earlier life left it.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"racksum/{what}/{life}", store)


@contextmanager
def converting_store_errors() -> Iterator[None]:
    """Replaces the C++ stack trace in the error of an unreachable store with a sentence.

    :raises PeerLost: The store does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            "the store of the process groups does not answer, so ranks cannot meet there: the "
            "process that serves it, rank 0 or torchrun, has ended or cannot be reached; check "
            "that process and its log"
        ) from error


def _server_of(store: Store) -> tuple[str, int] | None:
    """Returns the host and port of a store's server, or None for a store without a server."""
    while (under := getattr(store, "underlying_store", None)) is not None:
        store = under
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def _connected(store: Store) -> Store:
    """Returns a new connection to a store.

    First checks that the server answers, because torch would retry for minutes. A process that ends
    meanwhile would have to wait: Python aborts if a thread returns from C++ during finalization.

    :raises OSError: The server cannot be reached.
    :raises RuntimeError: The server does not serve the store.
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


class _Reporter:
    """Writes a rank's reports to a store, for all groups of the rank.

    A background thread writes the reports, over a connection that nothing else uses. The process
    that serves the store may have ended, and then each call takes longer than the store's timeout.
    Another thread may also block the rank's first connection: it may wait at the store for a rank
    that waits for this one.

    All groups share the connection: torch's server may take seconds to accept each connection if
    the name server of its host does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._shared = store
        self._own: Store | None = None
        self._lock = threading.Lock()
        # Whether the last report took too long.
        self._is_late = False

    def publish(self, write: Callable[[Store], None]) -> None:
        """Writes a report on another thread. Waits up to 5 s, or not at all after a late report.

        :param write: Writes the report to the store that it receives.
        """
        # Groups leave one after another, and an unreachable server should cost time only once.
        if _server_of(self._shared) in _unreachable:
            return
        done = threading.Event()

        def run() -> None:
            try:
                with self._lock:
                    self._connect_and_write(write)
            finally:
                done.set()

        do_waiting(run)
        self._is_late = not done.wait(0 if self._is_late else _PATIENCE)

    def _connect_and_write(self, write: Callable[[Store], None]) -> None:
        try:
            if self._own is None:
                self._own = _connected(self._shared)
            write(self._own)
        except (RuntimeError, OSError):
            # Let the next report connect again.
            self._own = None


#: The :class:`_Reporter` of each store, as long as a group that uses the store exists.
_reporters: weakref.WeakValueDictionary[Store, _Reporter] = weakref.WeakValueDictionary()


class Departures:
    """Publishes, in a store, which ranks of a group have left.

    Create this object before the ranks first meet. It removes the reports of an earlier group of
    this name that used the same store.

    :param store: The store of all ranks.
    :param name: The name of the group, for messages.
    :param rank: The number of this rank in the group.
    :param world: The number of ranks in the group.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int) -> None:
        self._reporter = _reporters.setdefault(store, _Reporter(store))
        self._store = _part_of(store, name)
        self._name = name
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        with converting_store_errors():
            for key in (_ANY, str(rank), _here(rank)):
                self._store.delete_key(key)
        server = _server_of(store)
        if server is not None:
            _unreachable.discard(server)

    def report_left(self, why: Error | None = None) -> None:
        """Reports that this rank leaves. Gives up if the store is slow.

        :param why: The reason, if the rank could not join.
        """
        how = f"left the process group {self._name} before joining it"
        missing = why.missing if isinstance(why, JoinTimeout) else ()
        self._report([self._rank], f"{how}: {why}" if why else how, missing)

    def report_ended(self, ranks: Sequence[int]) -> None:
        """Reports that other ranks ended without a report. Gives up if the store is slow."""
        self._report(ranks, how_ended(self._name))

    def watch(self, limit: float) -> Watch:
        """Returns a watch for a thread that waits up to ``limit`` seconds for the other ranks."""
        return Watch(self._store, self._rank, self._others, limit)

    def _report(self, ranks: Sequence[int], how: str, missing: Sequence[int] = ()) -> None:
        record = json.dumps([how, *missing])
        # Writing the report may take long, so the closure must not keep the group alive.
        own, name = self._rank, self._name

        def write(store: Store) -> None:
            part = _part_of(store, name)
            for rank in ranks:
                if rank == own:
                    part.set(str(rank), record)
                else:
                    # Keep the reason that the rank itself gave.
                    part.compare_set(str(rank), "", record)
            part.set(_ANY, "yes")

        self._reporter.publish(write)


def _part_of(store: Store, name: str) -> PrefixStore:
    """Returns the part of a store that holds the reports of a group."""
    return of_this_life(store, f"left/{name}")


def _here(rank: int) -> str:
    """Returns the key that exists once a rank has begun to join and has waited a moment."""
    return f"here/{rank}"


class Watch:
    """Checks the store for other ranks that have left.

    :param store: The group's part of the store.
    :param rank: The number of this rank.
    :param others: The numbers of the other ranks.
    :param limit: Seconds that this rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, others: list[int], limit: float = 3600.0) -> None:
        self._shared = store
        self._own: Store | None = None
        self._rank = rank
        self._others = others
        # Ranks that wait for less than the grace time must still report that they are here.
        self._next = time.monotonic() + min(_GRACE, limit / 4)
        # For each rank that has left: the text of errors about it, then the ranks it waited for.
        self._left: dict[int, list[Any]] = {}
        self._absent: list[int] = []
        self._has_answered = False
        #: Whether this watch has raised an error. All ranks can read its cause in the store.
        self.has_raised = False
        # Set while no thread queries the store.
        self._idle = threading.Event()
        self._idle.set()

    def check(self) -> None:
        """Raises if a rank is known to have left. Call this often.

        Another thread queries the store periodically, so this method never waits.

        :raises PeerLost: A rank has left.
        :raises JoinTimeout: Every rank that left had waited in vain for ranks that this one needs.
        """
        if time.monotonic() >= self._next and self._idle.is_set():
            self._start_query(self._find_left)
        self._raise_if_left()

    def poll(self) -> bool:
        """Queries the store now, and returns whether it answered in time.

        :raises PeerLost: A rank has left.
        :raises JoinTimeout: Every rank that left had waited in vain for ranks that this one needs.
        """
        has_answered = self._query(self._find_left)
        self._raise_if_left()
        return has_answered

    def absent(self) -> list[int]:
        """Returns the ranks that have not begun to join, or no ranks if the store is silent."""
        return self._absent if self._query(self._find_absent) else []

    def _query(self, query: Callable[[Store], None]) -> bool:
        """Queries the store now, and returns whether it answered in time."""
        if not self._idle.wait(_PATIENCE):
            return False
        self._start_query(query)
        return self._idle.wait(_PATIENCE) and self._has_answered

    def _start_query(self, query: Callable[[Store], None]) -> None:
        self._idle.clear()
        self._has_answered = False
        do_waiting(partial(self._run_query, query))

    def _run_query(self, query: Callable[[Store], None]) -> None:
        try:
            with suppress(RuntimeError, OSError):
                if self._own is None:
                    own = _connected(self._shared)
                    own.set(_here(self._rank), "yes")
                    self._own = own
                query(self._own)
                self._has_answered = True
        finally:
            self._next = time.monotonic() + _PERIOD
            self._idle.set()

    def _find_left(self, store: Store) -> None:
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
        # If every rank that has left waited in vain for other ranks, this rank would too.
        all_waited = all(waited_for for _, *waited_for in left.values())
        self.has_raised = True
        if all_waited and set(missing) <= set(self._others):
            raise JoinTimeout(text, missing)
        raise PeerLost(text, ranks)


def lost(ranks: Sequence[int], how: str) -> PeerLost:
    """Returns the error about ranks that are lost."""
    return PeerLost(sentence(ranks, how), ranks)


def sentence(ranks: Sequence[int], how: str) -> str:
    """Returns a sentence with the ranks as its subject."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {how}"


def how_ended(name: str) -> str:
    """Returns the text of errors about ranks that ended without a report."""
    return (
        f"ended before joining the process group {name}, or closed all connections after a "
        "collective of the group had failed; check the logs"
    )
