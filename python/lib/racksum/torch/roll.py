"""Detection of ranks of a process group that end before they begin to join.

The aggregator does not know a rank before it has joined, and a killed process reports nothing. But
Gloo connects every rank with every other. So an exchange of all ranks is in flight until the last
rank has begun to join, and fails at every rank at once when one of them ends.

After the exchange nothing watches a rank until it has joined at the aggregator. If it ends in
between, the others raise ``JoinTimeout`` with its number once ``join_timeout`` is over.

With ``TORCH_GLOO_LAZY_INIT``, Gloo connects two ranks when they first exchange something, and waits
for a rank that is gone. Then the exchange fails at some ranks only, and others may wait longer.
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

#: A tag of messages that are never received. Users' tags start from 0.
_TAG = 2**31 - 1
#: The tag of a rank's last message to those that join: one byte a rank, 1 if that rank has ended.
_LAST_WORD = 2**31 - 2
#: How long Gloo waits for a message that will not come.
_SOON = timedelta(milliseconds=1)
#: Gloo's words for a connection that it closed because an op of this rank took too long.
_OWN_TIMEOUT = "Application timeout"


class RollCall:
    """The exchange of the ranks that join. All ranks begin it at the same point of their calls.

    :param gloo: The group's Gloo.
    :param rank: The number of this rank in the group.
    :param world: The number of ranks in the group.
    :param name: The name of the group, which messages contain.
    :param limit: How long the exchange may take; longer than joining at any rank.
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
        # With lazy connections, last words would make this rank wait for a rank that is gone.
        self._tells = not _connects_lazily()
        for other, word in self._words.items() if self._tells else ():
            # Ask now, because Gloo sends only what the other side has asked for. If the rank is
            # gone already, the exchange fails.
            with suppress(RuntimeError):
                self._receiving[other] = gloo.recv([word], other, _LAST_WORD)
        options = dist.AllToAllOptions()
        options.timeout = limit
        given, taken = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
        self._work = gloo.all_to_all_single(taken, given, [], [], options)

    def check(self, watch: Watch) -> None:
        """Checks that all ranks are still there, without waiting.

        :raises PeerLost: A rank has ended or left.
        :raises racksum.Error: The exchange failed otherwise, as :meth:`explain` says.
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
        """Raises the error that explains why Gloo failed, with the ranks that Gloo does not name.

        :raises PeerLost: Ranks have left or ended. ``ranks`` holds those that could be found.
        :raises SessionClosed: This rank closed its connections before.
        :raises JoinTimeout: A rank that has left waited in vain for another.
        """
        # Ask first, because the others learn of the failure too, and soon end.
        why = {other: self._why_closed(other) for other in self._others}
        gone = [other for other in self._others if why[other]]
        if any(_OWN_TIMEOUT in why[other] for other in gone):
            raise SessionClosed(
                f"a collective of the process group {self._name} timed out at rank {self._rank} "
                "before the group had joined, so Gloo closed the connections of that rank; make a "
                "new group"
            ) from error
        words = self._last_words(gone)
        try:
            has_answered = watch.look()
        except Error as left:
            raise left from error
        found = sorted({rank for ended in words.values() for rank in ended})
        silent = [rank for rank in gone if rank not in words]
        # Without a last word from any rank, one may have closed its connections because of another.
        if not found and (has_answered or len(silent) == 1):
            found = silent
        self.ended = found
        raise self._lost(found, gone) from error

    def _lost(self, ended: Sequence[int], gone: Sequence[int]) -> PeerLost:
        """Returns the error about ranks that have ended, or else about all that are gone."""
        if ended:
            return lost(ended, how_ended(self._name))
        if gone:
            how = (
                f"left the process group {self._name} before joining it, or ended; the store does "
                "not say which, so check the log of each of these processes"
            )
            return PeerLost(sentence(gone, how))
        return PeerLost(
            f"a rank of the process group {self._name} is gone; check the logs of its ranks"
        )

    def give_up(self, ended: Sequence[int] = ()) -> None:
        """Ends the exchange at all ranks, if it is in flight, and every other wait of Gloo.

        Otherwise Gloo's threads would go on waiting, and the end of the group would wait for them.
        First tells the other ranks that this one lives and which ranks have ended, because the
        store may be gone.

        :param ended: The ranks that have ended.
        """
        if self._work is None or self._is_done():
            return
        word = self._bytes()
        word[list(ended)] = 1
        sending = []
        for other in self._others if self._tells else ():
            # Gloo sends at once to a rank that joins. Do not wait for others.
            with suppress(RuntimeError):
                sending.append(self._gloo.send([word], other, _LAST_WORD))
        for other in self._others:
            # Gloo closes all connections when an op times out.
            with suppress(RuntimeError):
                self._gloo.recv([self._bytes()], other, _TAG).wait(_SOON)

    def _last_words(self, gone: Sequence[int]) -> dict[int, list[int]]:
        """Returns the last words of gone ranks: the ranks that each has found to have ended."""
        words = {}
        for other in set(gone) & set(self._receiving):
            # This ends at once: the message has come, or its connection has failed.
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
        """Returns why Gloo has no connection to a rank, or "". Without one, it refuses to send."""
        try:
            self._gloo.send([self._bytes()], other, _TAG)
        except RuntimeError as error:
            return str(error)
        return ""

    def _bytes(self) -> torch.Tensor:
        """Returns a tensor of bytes with a zero for each rank."""
        return torch.zeros(self._world, dtype=torch.uint8, device="cpu")


def _connects_lazily() -> bool:
    """Returns whether Gloo connects two ranks only when they first exchange something."""
    given = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower()
    return given in ("1", "t", "true", "y", "yes")
