"""Finds out that ranks of a process group have ended while others join.

The aggregator does not know a rank before it has joined, and a process that is killed says nothing.
Gloo connects every rank with every other: an exchange of all of them is in flight while they join,
and fails at every rank at once when one of them ends.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from racksum.errors import Error, PeerLost
from racksum.torch.departures import how_ended, lost

if TYPE_CHECKING:
    from typing import NoReturn

    from racksum.torch.departures import Watch

__all__ = ["RollCall"]

#: A tag for what is never received: ops that users tag go from 0.
_TAG = 2**31 - 1
#: How long Gloo waits for what it is not to get.
_SOON = timedelta(milliseconds=1)


class RollCall:
    """The exchange of the ranks that join; all of them begin it, in the same turn.

    :param gloo: The group's Gloo.
    :param name: The group's, for messages.
    :param limit: How long it may take; longer than any rank joins.
    """

    def __init__(self, gloo: Any, rank: int, world: int, name: str, limit: timedelta) -> None:
        self._gloo = gloo
        self._name = name
        self._others = [other for other in range(world) if other != rank]
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
        :raises JoinTimeout: If one has left that waited for another in vain.
        """
        # First: others end soon as well, since they have heard of the same.
        ended = [other for other in self._others if not self._is_connected(other)]
        try:
            watch.look()
        except Error as left:
            raise left from error
        if not ended:
            raise PeerLost(f"a rank of the process group {self._name} has gone: {error}") from error
        raise lost(ended, how_ended(self._name)) from error

    def give_up(self) -> None:
        """Ends the exchange at all ranks, if it is in flight, and all else that Gloo waits for.

        Otherwise Gloo's threads would wait, and whoever destroys the group for them.
        """
        if self._work is None or self._is_done():
            return
        for other in self._others:
            # Gloo closes all connections when one op takes too long.
            with suppress(RuntimeError):
                self._gloo.recv([torch.zeros(1)], other, _TAG).wait(_SOON)

    def _is_done(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    def _is_connected(self, other: int) -> bool:
        """Whether Gloo is connected with a rank: it refuses to begin what cannot be sent."""
        try:
            self._gloo.send([torch.zeros(1)], other, _TAG)
        except RuntimeError:
            return False
        return True
