"""How a rank of a process group joins its job with its first op, and leaves with the group."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from racksum.errors import Error, SessionClosed
from racksum.options import ConnectOptions, limits_of_group
from racksum.session import PartOf, Session
from racksum.torch.groups import (
    default_store,
    drawn_in,
    is_generation_given,
    new_generation,
    of_group,
)
from racksum.torch.staging import staging_of
from racksum.torch.work import let_go

if TYPE_CHECKING:
    from racksum.torch.calls import Chain
    from racksum.torch.departures import Departures, Watch
    from racksum.torch.options import Options
    from racksum.torch.staging import Staging

__all__ = ["Membership", "start_earlier"]

#: How long ranks that end the default group wait for each other.
_MOMENT = timedelta(milliseconds=200)
#: Seconds between two looks at what does not say by itself that it has ended.
_SLICE = 0.002


class Membership:
    """A rank's part in the job of its process group.

    :param group: What torch says of the group when it makes a backend.
    :param options: The group's own.
    :param gloo: The group's Gloo, through which its ranks agree.
    :param departures: Where the rank says that it leaves, if it has not joined.
    """

    def __init__(
        self,
        group: Any,
        options: Options,
        gloo: Any,
        chain: Chain,
        staging: Staging,
        *,
        departures: Departures,
    ) -> None:
        self._rank = group.group_rank
        self._world = group.group_size
        self._name = group.group_id
        self._store = group.store
        self._options = options
        self._gloo = gloo
        self._departures = departures
        self._chain = chain
        self._staging = staging
        self._session: Session | None = None
        self._has_ever_joined = False
        self._is_over = threading.Event()
        # Ops that the rank has refused, and nobody could be told of before it joined.
        self._unsaid: list[PartOf] = []

    @property
    def has_joined(self) -> bool:
        """Whether the rank is in the job now."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session, for which the rank joins when it is first wanted.

        :raises racksum.SessionClosed: After the group has ended.
        """
        # An op that comes first is deferred, so the thread of the chain is the one that joins.
        self._chain.drain()
        return self._session or self._join()

    def refuse(self, part_of: PartOf) -> None:
        """Tells the other ranks of an op that this one does not begin."""
        if self._session is None:
            # They have joined by then, or will.
            self._unsaid.append(part_of)
            return
        # One that is over has no ops to keep in step.
        with suppress(Error):
            self._session.refuse(part_of)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits ops, if the rank has yet to join: the limit is the session's."""
        if self._session is None:
            self._options._timeout = timeout
        else:
            warnings.warn(
                f"racksum: the timeout of {self._name} stays: its ranks have joined", stacklevel=3
            )

    def leave(self) -> None:
        """Leaves the job, for good: what is in flight fails."""
        self._is_over.set()
        session, self._session = self._session, None
        if session is not None:
            session.close()
            # Its threads take a moment to end, and the store's port may be wanted again.
            let_go(session)
        if not self._has_ever_joined:
            self._departures.note()

    def meet(self) -> None:
        """Waits a moment for the other ranks to come here too.

        The store of the first rank closes its port next. A rank that was much earlier, and makes
        the next process group at once, would meet the old store there.
        """
        options = dist.BarrierOptions()
        options.timeout = _MOMENT
        # Others may be gone, or have yet to do something.
        with suppress(RuntimeError):
            self._gloo.barrier(options).wait()

    def _join(self) -> Session:
        self._check_open()
        watch = self._departures.watch()

        def check() -> None:
            self._check_open()
            watch.check()

        limits = limits_of_group(self._options._timeout.total_seconds())
        options = ConnectOptions.resolve(
            drawn=drawn_in(default_store() or self._store),
            **{**limits, **self._options.connect},
            rank=self._rank,
            world=self._world,
        )
        if not is_generation_given(self._options.connect):
            self._staging.drain()
            agreed = self._agreed(new_generation(), watch)
            options = dataclasses.replace(options, generation=agreed)
        session = Session(of_group(options, self._name), check=check)
        self._has_ever_joined = True
        staging_of(session, self._staging)
        # Not a method: what is in no cycle ends with its last reference, and so does the store,
        # whose port the next process group may want.
        session._before_op = partial(start_earlier, self._chain, self._staging)
        for part_of in self._unsaid:
            session.refuse(part_of)
        self._unsaid.clear()
        self._session = session
        if self._is_over.is_set():
            # Meanwhile: whoever ended the group had no session to close.
            session.close()
        return session

    def _check_open(self) -> None:
        if self._is_over.is_set():
            raise SessionClosed(f"the process group {self._name} was destroyed or aborted")

    def _agreed(self, number: int, watch: Watch) -> int:
        """The number of the group's first rank."""
        agreed = torch.tensor([number], device="cpu")
        work = self._gloo.broadcast(agreed, 0)
        # Gloo goes on waiting when it is shut down.
        while not work.is_completed():
            self._is_over.wait(_SLICE)
            self._check_open()
            watch.check()
        try:
            work.wait()
        except RuntimeError:
            # Gloo names no rank.
            watch.look()
            raise
        return int(agreed)


def start_earlier(chain: Chain, staging: Staging) -> None:
    """Has the ops started that were called before one on the host."""
    chain.drain()
    staging.drain()
