"""Membership of a rank in the job of its process group, from its first op to the group's end."""

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

from racksum.call import PartOf
from racksum.errors import Error, JoinTimeout, SessionClosed
from racksum.options import ConnectOptions, limits_of_group
from racksum.session import Session
from racksum.torch.departures import sentence
from racksum.torch.groups import (
    drawn_in,
    is_generation_given,
    new_generation,
    of_group,
    store_of_all,
)
from racksum.torch.join_exchange import JoinExchange
from racksum.torch.staging import staging_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from racksum.torch.call_order import Chain
    from racksum.torch.departures import Departures, Watch
    from racksum.torch.options import Options
    from racksum.torch.staging import Staging

__all__ = ["Membership", "start_earlier"]

#: How long ranks wait for each other when they end the default group.
_MOMENT = timedelta(milliseconds=200)
#: Seconds between two polls of a Gloo collective.
_SLICE = 0.002
#: Seconds between two checks for the end of the group, while another thread joins.
_TURN = 0.05
#: How much longer Gloo waits than joining may take, so that Gloo's timeout never ends a join.
_SLACK = timedelta(minutes=1)


class Membership:
    """The membership of a rank in the job of its process group.

    :param group: The description of the group that torch passes to a new backend.
    :param options: The options of the group.
    :param gloo: The group's Gloo backend, over which its ranks agree on a generation.
    :param chain: The chain that begins the group's collectives.
    :param staging: The staging of the group's GPU tensors.
    :param departures: The reports of ranks that leave before they have joined.
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
        # Ask the store now. By the time the rank joins, the store may have ended, or another thread
        # may block it by waiting there for a rank that waits for this one.
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
        self._exchange: JoinExchange | None = None
        self._watch: Watch | None = None
        # Held by the joining thread until the rank has joined or failed to join.
        self._joining = threading.Lock()
        # Held briefly by a thread that refuses an op, and by the thread that has just joined.
        self._refusing = threading.Lock()
        self._pid = os.getpid()
        # Ops that the rank refused before it joined. It tells the other ranks once it has joined.
        self._pending_refusals: list[PartOf] = []

    @property
    def has_joined(self) -> bool:
        """Whether the rank has joined the job and has not left it."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session. The first access joins the job.

        If joining fails, later accesses raise the same error, because the other ranks have been
        told that this one does not join.

        :raises racksum.SessionClosed: The group has ended, or this process is a forked child.
        :raises racksum.Error: The rank could not join.
        """
        # Earlier collectives may wait in the chain, so let the chain's thread join first.
        self._chain.drain()
        return self._session or self._join()

    def would_begin(self, ops: int) -> bool:
        """Returns whether that many ops would begin, or be refused, without a wait."""
        session = self._session
        return not ops or session is None or session._session.would_begin(ops, self._options.wire)

    def refuse(self, part_of: PartOf) -> None:
        """Tells the other ranks that this rank does not begin an op."""
        with self._refusing:
            session = self._session
            if session is None:
                # Tell the other ranks once this rank has joined.
                self._pending_refusals.append(part_of)
                return
        # If the session is over, no later op has to pair, so ignore its errors.
        with suppress(Error):
            session.refuse(part_of)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of ops. Warns and changes nothing once the rank has joined."""
        if self._session is None:
            self._options._timeout = timeout
        else:
            warnings.warn(
                f"racksum: the timeout of the process group {self._name} cannot be changed, "
                "because this rank has joined; set it before the first collective",
                stacklevel=3,
            )

    def leave(self) -> None:
        """Leaves the job for good. Collectives in flight fail."""
        self.check_process()
        self._is_over.set()
        session, self._session = self._session, None
        if session is not None:
            session.close()
        # A rank that could not join has reported that already.
        if not self._has_ever_joined and self._failure is None:
            self._departures.report_left()

    def meet(self) -> None:
        """Waits up to 200 ms for the other ranks to call this too.

        The store of the first rank closes its port next. Without this wait, a rank that is early
        and immediately makes the next process group would find the old store at that port.
        """
        options = dist.BarrierOptions()
        options.timeout = _MOMENT
        # The other ranks may have ended, or may be busy.
        with suppress(RuntimeError):
            self._gloo.barrier(options).wait()

    def check_process(self) -> None:
        """Checks that this process made the group. A forked child lacks the group's threads.

        :raises racksum.SessionClosed: This process was forked from the one that made the group.
        """
        if os.getpid() != self._pid:
            raise SessionClosed(
                f"the process group {self._name} belongs to the process that this one was forked "
                "from; make another group in this process"
            )

    def _join(self) -> Session:
        """Joins, or waits for another thread that joins, and returns the session."""
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
            what = f"joining the process group {self._name} was interrupted by {error!r}"
            self._fail(SessionClosed(what))
            raise

    def _fail(self, error: Error) -> None:
        """Tells the other ranks which ranks have ended, or why this rank will not join."""
        # A copy has no traceback, which would keep the store alive.
        self._failure = copy.copy(error)
        ended = self._exchange.ended if self._exchange is not None else []
        is_cause_stored = self._watch is not None and self._watch.has_raised
        if ended:
            self._departures.report_ended(ended)
        elif not is_cause_stored:
            # An error that came from the store needs no report: the others read its cause there.
            self._departures.report_left(error)
        # Give up only after the reports: giving up ends the other ranks' waits, and they then look
        # for the reason.
        if self._exchange is not None:
            self._exchange.give_up(ended)

    def _joined(self) -> Session:
        limits = limits_of_group(self._options._timeout.total_seconds())
        options = ConnectOptions.resolve(
            drawn=self._drawn,
            **{**limits, **self._options.connect},
            rank=self._rank,
            world=self._world,
        )
        watch = self._watch = self._departures.watch(options.join_timeout)
        # Gloo pairs collectives in the order in which they begin, so let staged ones begin first.
        self._staging.drain()
        # The ranks first agree on a generation and then join. Each step may take the whole timeout.
        limit = 2 * timedelta(seconds=options.join_timeout) + _SLACK
        agreeing = None
        if not is_generation_given(self._options.connect):
            agreeing = _Number(self._gloo, new_generation(self._name), limit)
        if self._world > 1:
            self._exchange = JoinExchange(self._gloo, self._rank, self._world, self._name, limit)

        def check() -> None:
            self._check_open()
            watch.check()
            if self._exchange is not None:
                self._exchange.check(watch)

        if agreeing is not None:
            agreed = self._agreed(agreeing, options.join_timeout, watch, check)
            options = dataclasses.replace(options, generation=agreed)
        session = Session(of_group(options, self._name), check=check)
        self._exchange = None
        self._has_ever_joined = True
        staging_of(session, self._staging)
        # A bound method would make a reference cycle. Without a cycle, dropping the last reference
        # frees the store, and its port for the next process group.
        session._before_op = partial(start_earlier, self._chain, self._staging)
        with self._refusing:
            for part_of in self._pending_refusals:
                session.refuse(part_of)
            self._pending_refusals.clear()
            self._session = session
        if self._is_over.is_set():
            # The group ended while there was no session to close yet.
            session.close()
        return session

    def _check_open(self) -> None:
        self.check_process()
        if self._is_over.is_set():
            raise SessionClosed(f"the process group {self._name} was destroyed or aborted")

    def _agreed(
        self, number: _Number, seconds: float, watch: Watch, check: Callable[[], None]
    ) -> int:
        """Waits for the number that the group's first rank broadcasts, and returns it."""
        ends = time.monotonic() + seconds
        # Poll, because Gloo's own wait does not end when Gloo is shut down.
        while not number.work.is_completed():
            self._is_over.wait(_SLICE)
            check()
            if time.monotonic() > ends:
                raise self._late(watch.absent(), seconds)
        try:
            number.work.wait()
        except RuntimeError as error:
            if self._exchange is None:
                raise
            self._exchange.explain(error, watch)
        return int(number.value)

    def _late(self, missing: list[int], seconds: float) -> JoinTimeout:
        """Returns the error about ranks that have not begun to join."""
        if missing:
            what = (
                f"called no collective of the process group {self._name} within the timeout of "
                f"{seconds:g} s"
            )
            return JoinTimeout(
                f"{sentence(missing, what)}; check the logs, or raise join_timeout", missing
            )
        return JoinTimeout(
            f"not all ranks of the process group {self._name} called one of its collectives within "
            f"the timeout of {seconds:g} s; check the other ranks, or raise join_timeout"
        )


class _Number:
    """A number that the group's first rank broadcasts to all ranks."""

    def __init__(self, gloo: Any, own: int, limit: timedelta) -> None:
        self.value = torch.tensor([own], device="cpu")
        options = dist.BroadcastOptions()
        options.timeout = limit
        options.rootRank = 0
        self.work = gloo.broadcast([self.value], options)


def start_earlier(chain: Chain, staging: Staging) -> None:
    """Waits until all earlier ops have started, so that an op on host tensors may start."""
    # The staging thread must not wait: collectives in the chain may wait for its staged ops.
    if not staging.is_current():
        chain.drain()
        staging.drain()
