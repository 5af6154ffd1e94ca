"""How a rank of a process group joins its job with its first op, and leaves with the group."""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from racksum.errors import Error, JoinTimeout, SessionClosed
from racksum.options import ConnectOptions, limits_of_group
from racksum.session import PartOf, Session
from racksum.threads import let_go
from racksum.torch.departures import sentence
from racksum.torch.groups import (
    drawn_in,
    is_generation_given,
    new_generation,
    of_group,
    store_of_all,
)
from racksum.torch.roll import RollCall
from racksum.torch.staging import staging_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from racksum.torch.calls import Chain
    from racksum.torch.departures import Departures, Watch
    from racksum.torch.options import Options
    from racksum.torch.staging import Staging

__all__ = ["Membership", "start_earlier"]

#: How long ranks that end the default group wait for each other.
_MOMENT = timedelta(milliseconds=200)
#: Seconds between two looks at what does not say by itself that it has ended.
_SLICE = 0.002
#: Seconds between two looks at whether the group ends while another thread joins.
_TURN = 0.05
#: How long Gloo's waits go on after the limit of joining, so that they are never what ends it.
_SLACK = timedelta(minutes=1)


class Membership:
    """A rank's part in the job of its process group.

    :param group: What torch says of the group when it makes a backend.
    :param options: The options of the group.
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
        # Not while it joins: whoever serves the store may be gone by then, and another thread may
        # wait at it for a rank that waits for this one.
        self._drawn = drawn_in(store_of_all(group.store))
        self._options = options
        self._gloo = gloo
        self._departures = departures
        self._chain = chain
        self._staging = staging
        self._session: Session | None = None
        self._has_ever_joined = False
        self._is_over = threading.Event()
        self._failure: Error | None = None
        self._roll: RollCall | None = None
        self._watch: Watch | None = None
        # Held by the thread that joins, as long as that takes.
        self._joining = threading.Lock()
        # Held for a moment, by whoever refuses an op and by the thread that has joined.
        self._refusing = threading.Lock()
        self._pid = os.getpid()
        # Ops that the rank has refused, and nobody could be told of before it joined.
        self._unsaid: list[PartOf] = []

    @property
    def has_joined(self) -> bool:
        """Whether the rank is in the job now."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session, for which the rank joins when it is first wanted.

        Joining that has failed is not tried again: the other ranks have heard of it.

        :raises racksum.SessionClosed: After the group has ended, and in a fork.
        :raises racksum.Error: Why the rank could not join.
        """
        # An op that comes first is deferred, so the thread of the chain is the one that joins.
        self._chain.drain()
        return self._session or self._join()

    def would_begin(self, ops: int) -> bool:
        """Whether so many ops would begin at once, or be refused at once."""
        session = self._session
        return not ops or session is None or session._session.would_begin(ops, self._options.wire)

    def refuse(self, part_of: PartOf) -> None:
        """Tells the other ranks of an op that this one does not begin."""
        with self._refusing:
            session = self._session
            if session is None:
                # They have joined by then, or will.
                self._unsaid.append(part_of)
                return
        # One that is over has no ops to keep in step.
        with suppress(Error):
            session.refuse(part_of)

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
        self.check_process()
        self._is_over.set()
        session, self._session = self._session, None
        if session is not None:
            session.close()
            # Its threads take a moment to end, and the store's port may be wanted again.
            let_go(session)
        # One that could not join has said why.
        if not self._has_ever_joined and self._failure is None:
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

    def check_process(self) -> None:
        """Refuses what a process does that was forked from the group's: it has none of its threads.

        :raises racksum.SessionClosed: If this is such a process.
        """
        if os.getpid() != self._pid:
            raise SessionClosed(
                f"the process group {self._name} is of the process that this one was forked from; "
                "make another group here, or leave this one alone"
            )

    def _join(self) -> Session:
        """Joins, unless another thread does: then waits for that."""
        self._check_open()
        while not self._joining.acquire(timeout=_TURN):
            self._check_open()
        try:
            return self._session or self._join_first()
        finally:
            self._joining.release()

    def _join_first(self) -> Session:
        self._check_open()
        if self._failure is not None:
            raise copy.copy(self._failure)
        try:
            return self._joined()
        except Error as error:
            self._fail(error)
            raise
        except BaseException as error:
            what = f"joining the process group {self._name} was ended by {error!r}"
            self._fail(SessionClosed(what))
            raise

    def _fail(self, error: Error) -> None:
        """Tells the other ranks that this one will not join, or whom it has missed."""
        # A copy has no traceback, which would keep the store.
        self._failure = copy.copy(error)
        ended = self._roll.ended if self._roll is not None else []
        has_heard = self._watch is not None and self._watch.has_raised
        if ended:
            self._departures.note_ended(ended)
        elif not has_heard:
            # Of what it has heard the others hear the cause, from the same store.
            self._departures.note(error)
        # Afterwards: this ends what they wait for, and then they ask why.
        if self._roll is not None:
            self._roll.give_up(ended)

    def _joined(self) -> Session:
        limits = limits_of_group(self._options._timeout.total_seconds())
        options = ConnectOptions.resolve(
            drawn=self._drawn,
            **{**limits, **self._options.connect},
            rank=self._rank,
            world=self._world,
        )
        watch = self._watch = self._departures.watch(options.join_timeout)
        # Gloo pairs collectives by the order in which they begin.
        self._staging.drain()
        # Twice: the ranks agree first, and then join.
        limit = 2 * timedelta(seconds=options.join_timeout) + _SLACK
        agreeing = None
        if not is_generation_given(self._options.connect):
            agreeing = _Number(self._gloo, new_generation(self._name), limit)
        if self._world > 1:
            self._roll = RollCall(self._gloo, self._rank, self._world, self._name, limit)

        def check() -> None:
            self._check_open()
            watch.check()
            if self._roll is not None:
                self._roll.check(watch)

        if agreeing is not None:
            agreed = self._agreed(agreeing, options.join_timeout, watch, check)
            options = dataclasses.replace(options, generation=agreed)
        session = Session(of_group(options, self._name), check=check)
        self._roll = None
        self._has_ever_joined = True
        staging_of(session, self._staging)
        # Not a method: what is in no cycle ends with its last reference, and so does the store,
        # whose port the next process group may want.
        session._before_op = partial(start_earlier, self._chain, self._staging)
        with self._refusing:
            for part_of in self._unsaid:
                session.refuse(part_of)
            self._unsaid.clear()
            self._session = session
        if self._is_over.is_set():
            # Meanwhile: whoever ended the group had no session to close.
            session.close()
        return session

    def _check_open(self) -> None:
        self.check_process()
        if self._is_over.is_set():
            raise SessionClosed(f"the process group {self._name} was destroyed or aborted")

    def _agreed(
        self, number: _Number, seconds: float, watch: Watch, check: Callable[[], None]
    ) -> int:
        """The number of the group's first rank."""
        ends = time.monotonic() + seconds
        # Gloo goes on waiting when it is shut down.
        while not number.work.is_completed():
            self._is_over.wait(_SLICE)
            check()
            if time.monotonic() > ends:
                raise self._late(watch.absent(), seconds)
        try:
            number.work.wait()
        except RuntimeError as error:
            if self._roll is None:
                raise
            self._roll.explain(error, watch)
        return int(number.value)

    def _late(self, missing: list[int], seconds: float) -> JoinTimeout:
        """Makes the error about ranks that have not begun to join."""
        if missing:
            what = (
                f"called no collective of the process group {self._name} within the timeout of "
                f"{seconds:g} s"
            )
            return JoinTimeout(
                f"{sentence(missing, what)}; see what they do, or raise join_timeout", missing
            )
        return JoinTimeout(
            f"not all ranks of the process group {self._name} called a collective of it within the "
            f"timeout of {seconds:g} s; see what the others do, or raise join_timeout"
        )


class _Number:
    """A number of each rank, which becomes that of the group's first."""

    def __init__(self, gloo: Any, own: int, limit: timedelta) -> None:
        self.value = torch.tensor([own], device="cpu")
        options = dist.BroadcastOptions()
        options.timeout = limit
        options.rootRank = 0
        self.work = gloo.broadcast([self.value], options)


def start_earlier(chain: Chain, staging: Staging) -> None:
    """Has the ops started that were called before one on the host."""
    # Those that are staged were called before what waits in the chain, which may wait for them.
    if not staging.is_current():
        chain.drain()
        staging.drain()
