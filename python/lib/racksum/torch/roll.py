"""Finds out that ranks of a process group have ended while others wait for them to begin to join.

The aggregator does not know a rank before it has joined, and a process that is killed says nothing.
Gloo connects every rank with every other: an exchange of all of them is in flight until the last
rank has begun to join, and fails at every rank at once when one of them ends. After that nothing
watches a rank until it has joined at the aggregator. If it ends in between, the others raise
``JoinTimeout`` with its number once ``join_timeout`` is over.

With ``TORCH_GLOO_LAZY_INIT`` Gloo connects two ranks when they first exchange something, and waits
for one that is gone. Then the exchange still fails at some ranks, and the others may wait longer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from racksum.errors import Error, PeerLost, SessionClosed
from racksum.torch.departures import how_ended, lost, sentence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from racksum.torch.departures import Watch

__all__ = ["RollCall"]

#: A tag for what is never received: ops that users tag go from 0.
_TAG = 2**31 - 1
#: The tag of a rank's last message to those that join: one byte a rank, 1 if that rank has ended.
_LAST_WORD = 2**31 - 2
#: How long Gloo waits for what it is not to get.
_SOON = timedelta(milliseconds=1)
#: How Gloo says that it has closed a connection because an op of this rank took too long.
_OWN_TIMEOUT = "Application timeout"


class RollCall:
    """The exchange of the ranks that join; all of them begin it, in the same turn.

    :param gloo: The group's Gloo.
    :param name: The name of the group, which messages contain.
    :param limit: How long it may take; longer than any rank joins.
    """

    def __init__(self, gloo: Any, rank: int, world: int, name: str, limit: timedelta) -> None:
        self._gloo = gloo
        self._name = name
        self._rank = rank
        self._world = world
        self._others = [other for other in range(world) if other != rank]
        #: The ranks that :meth:`explain` has found to have ended.
        self.ended: list[int] = []
        self._words = {other: self._bytes() for other in self._others}
        self._receiving: dict[int, Any] = {}
        # With lazy connections this would keep the rank waiting for one that is gone.
        self._tells = not _connects_lazily()
        for other, word in self._words.items() if self._tells else ():
            # Ready from now on: Gloo sends only what the other side has asked for. A rank that is
            # gone already fails the exchange.
            with suppress(RuntimeError):
                self._receiving[other] = gloo.recv([word], other, _LAST_WORD)
        options = dist.AllToAllOptions()
        options.timeout = limit
        given, taken = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
        self._work = gloo.all_to_all_single(taken, given, [], [], options)

    def check(self, watch: Watch) -> None:
        """Looks whether all ranks are still there, without waiting.

        :raises PeerLost: If one is not.
        """
        if self._work is None or not self._work.is_completed():
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            self.explain(error, watch)
        # All ranks have begun to join.
        self._work = None

    def explain(self, error: RuntimeError, watch: Watch) -> NoReturn:
        """Says why Gloo has failed, which names no rank.

        :raises PeerLost: With the ranks that have left or ended, as far as that can be known.
        :raises SessionClosed: If it is this rank that has closed its connections before.
        :raises JoinTimeout: If one has left that waited for another in vain.
        """
        # First: others end soon as well, since they have heard of the same.
        why = {other: self._why_closed(other) for other in self._others}
        gone = [other for other in self._others if why[other]]
        if any(_OWN_TIMEOUT in why[other] for other in gone):
            raise SessionClosed(
                f"a collective of the process group {self._name} ran into its timeout at rank "
                f"{self._rank} before the group had joined, and Gloo has closed that rank's "
                "connections; make the group anew"
            ) from error
        words = self._last_words(gone)
        try:
            has_answered = watch.look()
        except Error as left:
            raise left from error
        found = sorted({rank for ended in words.values() for rank in ended})
        silent = [rank for rank in gone if rank not in words]
        # Without a word from anyone, a rank may have closed its connections because of another.
        if not found and (has_answered or len(silent) == 1):
            found = silent
        self.ended = found
        raise self._lost(found, gone) from error

    def _lost(self, ended: Sequence[int], gone: Sequence[int]) -> PeerLost:
        """Makes the error about ranks that have ended, or else about all that are gone."""
        if ended:
            return lost(ended, how_ended(self._name))
        if gone:
            how = (
                f"left the process group {self._name} before joining it, or ended; the store does "
                "not say which, so see what each of their processes said last"
            )
            return PeerLost(sentence(gone, how))
        return PeerLost(f"a rank of the process group {self._name} has gone")

    def give_up(self, ended: Sequence[int] = ()) -> None:
        """Ends the exchange at all ranks, if it is in flight, and all else that Gloo waits for.

        Otherwise Gloo's threads would wait, and whoever destroys the group for them. Before that it
        tells the other ranks that this one lives, and which others have ended: the store may be
        gone that would tell them.
        """
        if self._work is None or self._is_done():
            return
        word = self._bytes()
        word[list(ended)] = 1
        sending = []
        for other in self._others if self._tells else ():
            # Sent at once to a rank that joins. Nobody waits for one that does not yet.
            with suppress(RuntimeError):
                sending.append(self._gloo.send([word], other, _LAST_WORD))
        for other in self._others:
            # Gloo closes all connections when one op takes too long.
            with suppress(RuntimeError):
                self._gloo.recv([self._bytes()], other, _TAG).wait(_SOON)

    def _last_words(self, gone: Sequence[int]) -> dict[int, list[int]]:
        """Returns what ranks have said that are gone: which ranks they have found to have ended."""
        words = {}
        for other in set(gone) & set(self._receiving):
            # Ends at once: it has come, or failed with the connection.
            with suppress(RuntimeError):
                self._receiving[other].wait(_SOON)
                words[other] = self._words[other].nonzero().flatten().tolist()
        return words

    def _is_done(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    def _why_closed(self, other: int) -> str:
        """Why Gloo has no connection with a rank: it refuses to begin what cannot be sent."""
        try:
            self._gloo.send([self._bytes()], other, _TAG)
        except RuntimeError as error:
            return str(error)
        return ""

    def _bytes(self) -> torch.Tensor:
        """Returns a zero for each rank."""
        return torch.zeros(self._world, dtype=torch.uint8, device="cpu")


def _connects_lazily() -> bool:
    """Whether Gloo connects two ranks only once one has something for the other."""
    given = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower()
    return given in ("1", "t", "true", "y", "yes")
