"""Detects that a rank ends before it begins to join the job of its process group.

The aggregator does not know a rank until the rank has joined, and a killed process reports
nothing. But Gloo connects every rank with every other. So the ranks begin an exchange over Gloo. It
stays in flight until the last rank has begun to join, and fails at every rank as soon as one ends.

After the exchange, nothing detects that a rank ends before it has joined at the aggregator. The
other ranks then raise ``JoinTimeout`` with its number once ``join_timeout`` expires.

With ``TORCH_GLOO_LAZY_INIT``, Gloo connects two ranks when they first exchange something, and waits
even for a rank that has ended. Then only some ranks see the exchange fail, and others may wait
longer.
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

__all__ = ["JoinExchange"]

#: Gloo's tag for messages that are never received. It is far from users' tags, which start at 0.
_TAG = 2**31 - 1
#: The tag of a rank's last message to ranks that join. The message has a byte for each rank, which
#: is 1 if that rank has ended.
_LAST_MESSAGE_TAG = 2**31 - 2
#: How long to wait for a message that has either arrived already or will never arrive.
_SOON = timedelta(milliseconds=1)
#: Gloo's text about a connection that it closed because an op of this rank took too long.
_OWN_TIMEOUT = "Application timeout"


class JoinExchange:
    """An exchange among ranks that join. All ranks begin it at the same point in their call order.

    :param gloo: The group's Gloo backend.
    :param rank: The number of this rank in the group.
    :param world: The number of ranks in the group.
    :param name: The name of the group, for messages.
    :param limit: How long the exchange may take; must exceed the time that any rank may take to
        join.
    """

    def __init__(self, gloo: Any, rank: int, world: int, name: str, limit: timedelta) -> None:
        self._gloo = gloo
        self._name = name
        self._rank = rank
        self._world = world
        self._others = [other for other in range(world) if other != rank]
        #: The ranks that :meth:`explain` has found to have ended.
        self.ended: list[int] = []
        self._last_messages = {other: self._bytes() for other in self._others}
        self._receiving: dict[int, Any] = {}
        # With lazy connections, last messages would make this rank wait for a rank that has ended.
        self._sends_last_messages = not _connects_lazily()
        for other, message in self._last_messages.items() if self._sends_last_messages else ():
            # Receive now, because Gloo sends only messages that the other side waits for. Ignore
            # errors: if the rank has already ended, the exchange below fails.
            with suppress(RuntimeError):
                self._receiving[other] = gloo.recv([message], other, _LAST_MESSAGE_TAG)
        options = dist.AllToAllOptions()
        options.timeout = limit
        given, taken = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
        self._work = gloo.all_to_all_single(taken, given, [], [], options)

    def check(self, watch: Watch) -> None:
        """Checks, without waiting, that no rank has ended or left.

        :raises PeerLost: A rank has ended or left.
        :raises racksum.Error: The exchange failed for another reason that :meth:`explain` lists.
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
        :raises SessionClosed: This rank had closed its connections, because a collective timed out.
        :raises JoinTimeout: Every rank that left had waited in vain for ranks that this one needs.
        """
        # Check the connections first: the other ranks also see the failure, and may soon end.
        why = {other: self._why_closed(other) for other in self._others}
        closed = [other for other in self._others if why[other]]
        if any(_OWN_TIMEOUT in why[other] for other in closed):
            raise SessionClosed(
                f"a collective of the process group {self._name} timed out at rank {self._rank} "
                "before the group had joined, so Gloo closed the connections of that rank; make a "
                "new group"
            ) from error
        reports = self._read_last_messages(closed)
        try:
            has_answered = watch.poll()
        except Error as left:
            raise left from error
        found = sorted({rank for ended in reports.values() for rank in ended})
        silent = [rank for rank in closed if rank not in reports]
        # Some silent ranks may have closed their connections only because another rank ended. They
        # first report that to the store, so `poll` would have raised if the store had answered.
        if not found and (has_answered or len(silent) == 1):
            found = silent
        self.ended = found
        raise self._lost(found, closed) from error

    def _lost(self, ended: Sequence[int], closed: Sequence[int]) -> PeerLost:
        """Returns an error that names the ranks in ``ended``, or else all ranks in ``closed``."""
        if ended:
            return lost(ended, how_ended(self._name))
        if closed:
            how = (
                f"left the process group {self._name} before joining it, or ended; the store does "
                "not say which, so check the log of each of these processes"
            )
            return PeerLost(sentence(closed, how))
        return PeerLost(
            f"a rank of the process group {self._name} is lost; check the logs of its ranks"
        )

    def give_up(self, ended: Sequence[int] = ()) -> None:
        """Ends the exchange at all ranks if it is in flight, and with it every other wait of Gloo.

        Without this, Gloo's threads would keep waiting, and the end of the group would wait for
        them. First tells the other ranks, which may not reach the store, that this one is alive and
        which ranks have ended.

        :param ended: The ranks that have ended.
        """
        if self._work is None or self._is_done():
            return
        message = self._bytes()
        message[list(ended)] = 1
        sending = []
        for other in self._others if self._sends_last_messages else ():
            # Gloo sends immediately to a rank that joins. Do not wait for other ranks.
            with suppress(RuntimeError):
                sending.append(self._gloo.send([message], other, _LAST_MESSAGE_TAG))
        for other in self._others:
            # Gloo closes all connections when an op times out.
            with suppress(RuntimeError):
                self._gloo.recv([self._bytes()], other, _TAG).wait(_SOON)

    def _read_last_messages(self, closed: Sequence[int]) -> dict[int, list[int]]:
        """Returns the ended ranks, by the rank in ``closed`` whose last message named them."""
        reports = {}
        for other in set(closed) & set(self._receiving):
            # This returns soon: either the message has arrived or the connection has failed.
            with suppress(RuntimeError):
                self._receiving[other].wait(_SOON)
                reports[other] = self._last_messages[other].nonzero().flatten().tolist()
        return reports

    def _is_done(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    def _why_closed(self, other: int) -> str:
        """Returns Gloo's reason for refusing to send to a rank, or "" if it is connected."""
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
