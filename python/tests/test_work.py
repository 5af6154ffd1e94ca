"""Threads that begin collectives or wait for them survive any failure of their tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import racksum
from conftest import Cluster
from racksum import threads
from racksum.errors import WaitTimeout
from racksum.futures import future_of
from racksum.threads import SerialExecutor
from racksum.torch import call_order
from racksum.torch.call_order import Chain, Deferred
from racksum.torch.work import handle_of
from ranks import Ranks, in_group

#: Seconds after which a wait counts as hanging.
PATIENCE = 60.0


class Panic(BaseException):
    """A panic as the extension raises it, which is not an ``Exception``."""


class Failing:
    """An event on a device that has failed."""

    def synchronize(self) -> None:
        raise RuntimeError("device-side assert")


def panic() -> Any:
    raise Panic("at the worst moment")


def begins(chain: Chain) -> None:
    """Checks that a chain has begun all its collectives, and that it begins another one."""
    assert not chain.is_behind()
    chain.defer([], lambda: [], []).wait(PATIENCE)


def in_begin(chain: Chain, refuse: Callable[[], None]) -> Deferred:
    return chain.defer([], panic, [], refuse)


def in_an_event(chain: Chain, refuse: Callable[[], None]) -> Deferred:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_order, "so_far", lambda _: Failing())
        patch.setattr(call_order, "own_streams_on", lambda _: nullcontext())
        deferred = chain.defer([], lambda: [], [torch.empty(1, device="meta")], refuse)
        deferred.begun.wait(PATIENCE)
    return deferred


def in_a_stream(chain: Chain, refuse: Callable[[], None]) -> Deferred:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_order, "own_streams_on", lambda _: panic())
        deferred = chain.defer([], lambda: [], [], refuse)
        deferred.begun.wait(PATIENCE)
    return deferred


def on_other_memory(chain: Chain, refuse: Callable[[], None]) -> Deferred:
    x, may_begin = torch.ones(2), threading.Event()
    earlier: Any = SimpleNamespace(wait_for=lambda _: may_begin.wait(PATIENCE))
    deferred = chain.defer([earlier], lambda: [], [torch.ones(2), x], refuse)
    x.data = torch.zeros(2)
    may_begin.set()
    return deferred


@pytest.mark.parametrize("fail", [in_begin, in_an_event, in_a_stream, on_other_memory])
def test_what_fails_on_the_chain_is_told_and_the_next_begins(
    fail: Callable[[Chain, Callable[[], None]], Deferred],
) -> None:
    chain, refused = Chain(), threading.Event()
    why = r"device-side assert|at the worst moment|was replaced, by"
    with pytest.raises(RuntimeError, match=why) as error:
        fail(chain, refused.set).wait(PATIENCE)
    assert not isinstance(error.value, WaitTimeout)
    assert refused.is_set(), "the other ranks were not told"
    begins(chain)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Prevents the process from starting threads until the fixture's value is called."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    yield monkeypatch.undo
    monkeypatch.undo()


def test_a_thread_that_does_not_start_is_started_for_the_next(
    no_threads: Callable[[], None],
) -> None:
    chain = Chain()
    with pytest.raises(RuntimeError, match="new thread"):
        chain.defer([], lambda: [], [])
    # These calls must do nothing, because there is no thread to end.
    chain._thread.end()
    chain._thread.join(PATIENCE)
    no_threads()
    begins(chain)


def test_a_call_whose_begin_was_interrupted_begins_never() -> None:
    """Simulates a signal handler that raises once the thread has received the collective."""
    chain, begun = Chain(), threading.Event()
    busy = threading.Event()
    chain._thread.do(lambda: busy.wait(PATIENCE))
    do = chain._thread.do

    def do_and_raise(thing: Callable[[], None]) -> None:
        do(thing)
        raise KeyboardInterrupt

    chain._thread.do = do_and_raise  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        chain.defer([], lambda: begun.set() or [], [])
    chain._thread.do = do  # type: ignore[method-assign]
    busy.set()
    begins(chain)
    assert not begun.is_set()


def test_a_future_of_what_panics_has_the_error() -> None:
    future = future_of(panic)
    with pytest.raises(RuntimeError, match="at the worst moment"):
        future.wait()


class OfGloo:
    """An op of another backend. Like Gloo, it raises if a wait takes too long."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.waits = 0

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        assert timeout != timedelta(0), "to Gloo, a timeout of zero means no limit"
        if not self.ended.wait(PATIENCE if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error


def test_an_op_of_gloo_is_waited_for_until_it_ends_and_then_never_again() -> None:
    op, made = OfGloo(), []
    handle = handle_of(op)
    child = handle.then(lambda result: made.append(result) or "made")
    for one in (handle, child):
        for seconds in (0, 0.01):
            with pytest.raises(WaitTimeout, match="it continues, so wait again"):
                one.wait(seconds)
        assert not one.done()
    op.ended.set()
    op.waits = 0
    for _ in range(2):
        assert child.wait() == "made"
        assert handle.wait(0.0) is None
        assert child.done()
        assert child.absent == ()
    assert (made, op.waits) == ([None], 1)


def test_an_op_of_gloo_that_fails_has_ended_and_says_so_to_every_caller() -> None:
    op = OfGloo()
    handle = handle_of(op)
    op.error = ConnectionError("connection reset by peer")
    op.ended.set()
    assert handle.done()
    for seconds in (None, 0, 0.01):
        with pytest.raises(ConnectionError, match="connection reset"):
            handle.wait(seconds)


def test_of_the_callers_of_an_op_of_gloo_one_waits() -> None:
    op = OfGloo()
    handle = handle_of(op)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(handle.wait) for _ in range(2)]
        while not op.waits:
            time.sleep(0.001)
        with pytest.raises(WaitTimeout):
            handle.wait(0.01)
        op.ended.set()
        assert [one.result(PATIENCE) for one in running] == [None, None]
    assert op.waits == 1


def test_all_stuck_threads_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Stuck(SerialExecutor):
        def join(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    stuck = [Stuck(f"stuck-{nth}") for nth in range(5)]
    monkeypatch.setattr(threads, "_all", stuck)
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now))
    threads.end_all()
    assert now == threads._PATIENCE


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_a_call_that_fails_before_its_turn_is_told_to_the_others(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(fail_before_the_turn, cluster.address, cluster.new_job())


def fail_before_the_turn(address: str, job: str) -> None:
    """Lets the first call fail on the chain at one rank, before the rank joins."""

    def check(group: dist.ProcessGroup) -> None:
        if dist.get_rank() == 1:
            with pytest.raises(racksum.Mismatch, match="rank 0 has a call that it rejected"):
                dist.all_reduce(torch.ones(3), group=group)
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("racksum.torch.call_order.own_streams_on", failing)
            with pytest.raises(RuntimeError, match="device-side assert"):
                dist.all_reduce(torch.ones(3), group=group)

    def failing(_: object) -> None:
        raise RuntimeError("device-side assert")

    in_group(check, address, job)


def test_what_the_chain_begins_comes_after_a_call_that_was_interrupted(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(begin_after_an_interrupt, cluster.address, cluster.new_job())


def begin_after_an_interrupt(address: str, job: str) -> None:
    def check(group: dist.ProcessGroup) -> None:
        dist.barrier(group)
        x = torch.ones(3)
        if dist.get_rank() == 1:
            with pytest.raises(racksum.Mismatch, match="rank 0 has a call that it rejected"):
                dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(x, group=group)
        else:
            backend: Any = group._get_backend(torch.device("cpu"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend.session, "_before_op", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    dist.all_reduce(torch.ones(3), group=group)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "_would_wait", lambda *_, **__: True)
                work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()
        assert x.tolist() == [2.0] * 3

    def interrupt() -> None:
        raise KeyboardInterrupt

    in_group(check, address, job)
