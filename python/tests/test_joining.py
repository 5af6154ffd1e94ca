"""Ranks learn which rank of their process group does not join, and why."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import racksum
import racksum.torch
from conftest import Cluster, stop
from racksum.torch import membership
from racksum.torch.call_order import Chain
from racksum.torch.departures import Departures
from racksum.torch.membership import Membership
from racksum.torch.staging import Staging
from ranks import Ranks, backend_options

#: A time in seconds that no test reaches.
LONG = 3600.0


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    three = Ranks(3)
    yield three
    three.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def reduced(group: dist.ProcessGroup) -> list[float]:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x.tolist()


def until_only_these_are_absent(group: dist.ProcessGroup, absent: list[int]) -> None:
    """Returns once all other ranks have begun to join, and have waited a moment."""
    backend: Any = group._get_backend(torch.device("cpu"))
    watch = backend._membership._departures.watch(LONG)
    assert watch.poll(), "without an answer from the store, no rank would count as absent"
    while watch.absent() != absent:
        time.sleep(0.05)


def end_before_joining(address: str, job: str, doomed: int) -> None:
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG)
    group = dist.new_group(backend="racksum", pg_options=options)
    if dist.get_rank() == doomed:
        # The other ranks wait, each at a different stage of joining.
        until_only_these_are_absent(group, [])
        os.kill(os.getpid(), signal.SIGKILL)
    reduced(group)


@pytest.mark.parametrize("doomed", range(4))
def test_a_rank_that_is_killed_before_it_joins_is_named_to_all_others(
    cluster: Cluster, doomed: int
) -> None:
    outcomes = Ranks(4).outcomes(end_before_joining, cluster.address, cluster.new_job(), doomed)
    assert isinstance(outcomes.pop(doomed), BrokenProcessPool)
    for error in outcomes:
        assert isinstance(error, racksum.PeerLost), error
        assert error.ranks == (doomed,), error
        assert f"rank {doomed} ended before joining" in str(error)


def stall(address: str, job: str, stalled: int) -> None:
    """Stops one rank, and kills rank 0, which serves the store.

    The stopped rank continues once the call of the third rank has failed.
    """
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG)
    group = dist.new_group(backend="racksum", pg_options=options)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    own = dist.get_rank()
    if own == 0:
        until_only_these_are_absent(group, [])
        stop(pids[stalled])
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        reduced(group)
    finally:
        if own != stalled:
            os.kill(pids[stalled], signal.SIGCONT)


@pytest.mark.parametrize("stalled", [1, 2])
def test_ranks_that_live_are_not_named_as_ended_once_they_have_left(
    cluster: Cluster, stalled: int
) -> None:
    outcomes = Ranks(3).outcomes(stall, cluster.address, cluster.new_job(), stalled)
    assert isinstance(outcomes.pop(0), BrokenProcessPool)
    for error in outcomes:
        assert isinstance(error, racksum.PeerLost), error
        assert error.ranks == (0,), error
        assert "rank 0 ended before joining" in str(error)


def come_after_the_server_has_gone(address: str, job: str) -> None:
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG)
    group = dist.new_group(backend="racksum", pg_options=options)
    if dist.get_rank() == 0:
        until_only_these_are_absent(group, [2])
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        # Join only once rank 1 has left.
        dist.recv(torch.zeros(1), src=1)
    try:
        reduced(group)
    finally:
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), dst=2)


def test_a_rank_that_comes_late_blames_no_rank_that_lives(cluster: Cluster) -> None:
    outcomes = Ranks(3).outcomes(come_after_the_server_has_gone, cluster.address, cluster.new_job())
    assert isinstance(outcomes[0], BrokenProcessPool)
    assert isinstance(outcomes[1], racksum.PeerLost), outcomes[1]
    assert outcomes[1].ranks == (0,), outcomes[1]
    assert isinstance(outcomes[2], racksum.PeerLost), outcomes[2]
    assert outcomes[2].ranks == (), outcomes[2]
    assert "ranks 0, 1 left the process group" in str(outcomes[2])


def failing_late(
    group: dist.ProcessGroup, late: int, first: Callable[[], None] = lambda: None
) -> racksum.Error:
    """Returns the error of a group if one rank joins after the group has failed at the others."""
    if dist.get_rank() == late:
        # Wait in the default group until the others have failed.
        dist.barrier()
    first()
    with pytest.raises(racksum.Error) as error:
        reduced(group)
    if dist.get_rank() != late:
        dist.barrier()
    return error.value


def fail_before_joining(address: str, job: str) -> str:
    """Lets a collective of Gloo time out, and then reduces in the group."""
    options = backend_options(address, job, join_timeout=LONG)
    limit = timedelta(seconds=0.5)
    group = dist.new_group(backend="racksum", timeout=limit, pg_options=options)

    def exchange() -> None:
        with pytest.raises(RuntimeError):
            dist.all_to_all_single(torch.zeros(2), torch.ones(2), group=group)

    error = failing_late(group, 1, exchange)
    # Neither rank may leave before both have the error.
    dist.barrier()
    dist.destroy_process_group(group)
    return f"{type(error).__name__}: {error}"


def test_who_has_closed_its_connections_and_lives_is_not_said_to_have_ended(
    ranks: Ranks, cluster: Cluster
) -> None:
    first, second = ranks.run(fail_before_joining, cluster.address, cluster.new_job())
    why = first.removeprefix("SessionClosed: ")
    assert "timed out at rank 0" in why
    assert second.startswith("PeerLost: rank 0 left the process group ")
    assert second.endswith(f" before joining it: {why}")


def refuse_before_one_comes(address: str, job: str, refused: int, late: int) -> str:
    # If the generation is given, no rank waits for the first rank to broadcast one.
    given: dict[str, Any] = {"generation": 1, "timeout": LONG, "join_timeout": LONG}
    if dist.get_rank() == refused:
        given["interface"] = "none0"
    options = backend_options(address, job, **given)
    group = dist.new_group(backend="racksum", pg_options=options)
    error = failing_late(group, late)
    # No rank may leave before all have the error.
    dist.barrier()
    dist.destroy_process_group(group)
    return f"{type(error).__name__}: {error}"


def test_why_a_rank_has_left_is_told_to_one_that_comes_late(three: Ranks, cluster: Cluster) -> None:
    errors = three.run(refuse_before_one_comes, cluster.address, cluster.new_job(), 2, 0)
    why = errors[2].removeprefix("BadArgument: ")
    for error in errors[:2]:
        assert error.startswith("PeerLost: rank 2 left the process group ")
        assert error.endswith(f" before joining it: {why}")


def refuse_at_one(address: str, job: str, refused: int) -> tuple[str, str]:
    """Returns the errors of two calls in a group that one rank cannot join."""
    wrong = {"interface": "none0"} if dist.get_rank() == refused else {}
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG, **wrong)
    group = dist.new_group(backend="racksum", pg_options=options)
    errors = []
    for _ in range(2):
        with pytest.raises(racksum.Error) as error:
            reduced(group)
        errors.append(f"{type(error.value).__name__}: {error.value}")
    dist.destroy_process_group(group)
    return errors[0], errors[1]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_rank_that_cannot_join_tells_the_others_why(
    ranks: Ranks, cluster: Cluster, refused: int
) -> None:
    errors = ranks.run(refuse_at_one, cluster.address, cluster.new_job(), refused)
    assert all(first == second for first, second in errors), "a rank tried to join again"
    why, of_other = errors[refused][0], errors[1 - refused][0]
    kind, text = why.split(": ", 1)
    assert kind == "BadArgument"
    assert "none0" in text
    assert of_other.startswith(f"PeerLost: rank {refused} left the process group ")
    assert of_other.endswith(f" before joining it: {text}")


def come_late(address: str, job: str, late: int) -> tuple[str, tuple[int, ...]]:
    options = backend_options(address, job, timeout=LONG, join_timeout=1.0)
    group = dist.new_group(backend="racksum", pg_options=options)
    error = failing_late(group, late)
    dist.destroy_process_group(group)
    return type(error).__name__, getattr(error, "missing", ())


@pytest.mark.parametrize("late", [0, 1])
def test_the_limit_of_joining_is_that_of_agreeing_too(
    ranks: Ranks, cluster: Cluster, late: int
) -> None:
    errors = ranks.run(come_late, cluster.address, cluster.new_job(), late)
    assert errors[1 - late] == ("JoinTimeout", (late,))
    assert errors[late] == ("PeerLost", ())


def join_without_the_first(address: str, job: str) -> list[float]:
    options = backend_options(address, job)
    group = dist.new_group([1, 2], backend="racksum", pg_options=options)
    # Wait until all ranks have made the group.
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):
        while not store.check(["never set"]):
            time.sleep(0.01)
    with pytest.raises(racksum.PeerLost, match="the store of the process groups does not answer"):
        racksum.torch.connect(address, group=group, generation=1)
    return reduced(group)


def test_a_group_joins_although_the_store_has_gone_meanwhile(cluster: Cluster) -> None:
    outcomes = Ranks(3).outcomes(join_without_the_first, cluster.address, cluster.new_job())
    assert outcomes[1:] == [[2.0] * 3] * 2


def join_while_a_thread_waits(address: str, job: str) -> None:
    """Joins while a thread of rank 0 waits at the store for rank 1, which waits for rank 0."""
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        waiting = threading.Thread(target=store.get, args=(f"{job}-reduced",))
        waiting.start()
        until_it_is_held(store)
    reduced(group)
    if dist.get_rank() == 1:
        store.set(f"{job}-reduced", "yes")
    else:
        waiting.join()
    dist.destroy_process_group(group)


def until_it_is_held(store: dist.Store) -> None:
    """Returns once another thread blocks the connection to the store."""
    while True:
        query = threading.Thread(target=store.check, args=(["never set"],), daemon=True)
        query.start()
        query.join(0.5)
        if query.is_alive():
            return


def test_joining_does_not_wait_for_a_thread_that_waits_at_the_store(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(join_while_a_thread_waits, cluster.address, cluster.new_job())


def test_all_groups_of_a_world_draw_one_name(cluster: Cluster) -> None:
    [names] = Ranks(1).outcomes(names_of_groups, cluster.address)
    assert len(set(names)) == 1, names


def names_of_groups(address: str) -> list[str]:
    dist.destroy_process_group()
    options = racksum.torch.Options(aggregator=address)
    store = dist.HashStore()
    dist.init_process_group("racksum", store=store, rank=0, world_size=1, pg_options=options)
    names = []
    for group in (dist.group.WORLD, dist.new_group(), dist.new_group(backend="racksum")):
        reduced(group)
        names.append(group._get_backend(torch.device("cpu")).session.job)
    with racksum.torch.connect(address) as session:
        names.append(session.job)
    dist.destroy_process_group()
    return names


@pytest.fixture
def alone() -> Membership:
    """The membership of the only rank of a group, before it has joined."""
    store = dist.HashStore()
    group = SimpleNamespace(group_rank=0, group_size=1, group_id="g", store=store)
    options = racksum.torch.Options(aggregator="127.0.0.1:1", generation=1, job="j")
    departures = Departures(store, "g", 0, 1)
    return Membership(group, options, None, Chain(), Staging(), departures=departures)


class Joining:
    """A join that lasts until the test lets it end, and counts how often it is called."""

    def __init__(self) -> None:
        self.session = object()
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        assert self.count == 1, "another thread is already joining"
        self.begun.set()
        assert self.may_end.wait(60)
        return self.session


@pytest.mark.parametrize("ends", [False, True], ids=["joins", "is-left"])
def test_a_thread_that_wants_the_session_waits_for_the_one_that_joins(alone, monkeypatch, ends):
    joining = Joining()
    monkeypatch.setattr(alone, "_joined", joining)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: alone.session)
        assert joining.begun.wait(60)
        second = pool.submit(lambda: alone.session)
        if ends:
            alone.leave()
            with pytest.raises(racksum.SessionClosed, match="was destroyed or aborted"):
                second.result(60)
            joining.may_end.set()
            return
        # Within half a second, the second thread either waits or has failed.
        with suppress(TimeoutError):
            second.result(0.5)
        alone._session = joining.session
        joining.may_end.set()
        assert first.result(60) is joining.session
        assert second.result(60) is joining.session


class Refusals:
    """A session that records the refused ops that it receives."""

    def __init__(self, options: Any, check: Any) -> None:
        self.kept: list[Any] = []

    def refuse(self, part_of: Any) -> None:
        self.kept.append(part_of)


def test_an_op_that_is_refused_while_the_rank_joins_is_told_of(alone, monkeypatch):
    monkeypatch.setattr(membership, "Session", Refusals)
    threads: list[threading.Thread] = []

    class PendingRefusals(list[Any]):
        def clear(self) -> None:
            threads.append(threading.Thread(target=alone.refuse, args=("second",)))
            threads[0].start()
            # If nothing blocks the thread, it refuses its op within half a second.
            threads[0].join(0.5)
            super().clear()

    monkeypatch.setattr(alone, "_pending_refusals", PendingRefusals())
    alone.refuse("first")
    session: Any = alone.session
    threads[0].join(60)
    assert session.kept == ["first", "second"]
