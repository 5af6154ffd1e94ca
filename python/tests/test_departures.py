"""Ranks that leave before they have joined do not wait for a store that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import racksum
from racksum.torch import departures
from racksum.torch.departures import Departures, Watch
from racksum.torch.join_exchange import JoinExchange

#: A time in seconds that no test reaches.
LONG = 3600.0


class Stuck:
    """A store whose server has ended. Connection attempts hang until a test lets them fail."""

    def __init__(self) -> None:
        self.gives_up = threading.Event()
        self.gave_up = threading.Event()

    def clone(self) -> Any:
        assert self.gives_up.wait(60), "the caller waited for the store"
        self.gave_up.set()
        raise RuntimeError("no server")


def until_it_fails(call: Callable[[], None]) -> None:
    while True:
        call()
        time.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes watches query the store at once."""
    monkeypatch.setattr(departures, "_GRACE", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens waits for the store."""
    monkeypatch.setattr(departures, "_PATIENCE", 0.01)


@pytest.mark.parametrize("call", [Watch.check, Watch.poll], ids=["check", "poll"])
def test_a_watch_does_not_wait_for_a_store_that_does_not_answer(at_once, impatient, call):
    store: Any = Stuck()
    watch = Watch(store, 0, [1])
    for _ in range(3):
        call(watch)
    assert not store.gave_up.is_set()
    store.gives_up.set()
    assert store.gave_up.wait(60)


def test_leaving_does_not_wait_for_a_store_that_does_not_answer(impatient, monkeypatch):
    of_all = dist.HashStore()
    first, second = (Departures(of_all, name, 0, 2) for name in "ab")
    store: Any = Stuck()
    monkeypatch.setattr(first._reporter, "_shared", store)
    first.report_left()
    # Groups leave one after another. A late report costs time only once.
    monkeypatch.setattr(departures, "_PATIENCE", LONG)
    second.report_left()
    assert not store.gave_up.is_set()
    store.gives_up.set()
    assert store.gave_up.wait(60)


def test_a_rank_leaves_all_groups_of_a_store_over_one_connection(at_once, monkeypatch):
    connected = departures._connected
    connections = []
    monkeypatch.setattr(
        departures, "_connected", lambda store: connections.append(store) or connected(store)
    )
    store = dist.HashStore()
    groups = [[Departures(store, name, rank, 2) for rank in range(2)] for name in "abc"]
    for leaving, _ in groups:
        leaving.report_left()
    # Count only this store: a thread of the previous test may still connect to another.
    assert connections.count(store) == 1
    for _, waiting in groups:
        with pytest.raises(racksum.PeerLost, match="rank 0 left the process group"):
            until_it_fails(waiting.watch(LONG).check)


def test_ranks_that_have_left_are_named(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    watch = ranks[0].watch(LONG)
    watch.check()
    # A query that runs late might find only the first of the two reports.
    assert watch._idle.wait(60)
    for rank in (1, 2):
        ranks[rank].report_left()
    with pytest.raises(racksum.PeerLost, match="ranks 1, 2 left the process group g") as lost:
        until_it_fails(watch.check)
    assert lost.value.ranks == (1, 2)


def test_whom_a_rank_has_waited_for_in_vain_is_named_to_those_that_wait_too(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[0].report_left(racksum.JoinTimeout("rank 1 did not come", [1]))
    with pytest.raises(racksum.JoinTimeout, match=r"rank 0 left .* rank 1 did not come") as late:
        until_it_fails(ranks[2].watch(LONG).check)
    assert late.value.missing == (1,)
    with pytest.raises(racksum.PeerLost, match=r"rank 0 left .* rank 1 did not come") as lost:
        until_it_fails(ranks[1].watch(LONG).check)
    assert lost.value.ranks == (0,)


def test_ranks_that_cannot_say_so_are_said_to_have_ended(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[0].report_ended([1])
    with pytest.raises(racksum.PeerLost, match="rank 1 ended before joining") as lost:
        until_it_fails(ranks[2].watch(LONG).check)
    assert lost.value.ranks == (1,)


def test_what_a_rank_says_itself_stays_whatever_others_say_of_it(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[2].report_left(racksum.BadArgument("no interface none0"))
    ranks[1].report_ended([2])
    with pytest.raises(racksum.PeerLost, match=r"rank 2 left .* no interface none0"):
        until_it_fails(ranks[0].watch(LONG).check)


def test_each_rank_that_has_left_is_named_with_its_own_reason(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 5) for rank in range(5)]
    ranks[3].report_left(racksum.BadArgument("no interface none0"))
    ranks[1].report_ended([0, 2])
    ranks[1].report_left(racksum.JoinTimeout("rank 0 did not come", [0]))
    with pytest.raises(racksum.PeerLost) as lost:
        until_it_fails(ranks[4].watch(LONG).check)
    assert lost.value.ranks == (0, 1, 2, 3)
    assert str(lost.value) == (
        "ranks 0, 2 ended before joining the process group g, or closed all connections after a "
        "collective of the group had failed; check the logs; "
        "rank 1 left the process group g before joining it: rank 0 did not come; "
        "rank 3 left the process group g before joining it: no interface none0"
    )


def test_ranks_that_do_not_say_that_they_are_here_are_absent(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    here = ranks[1].watch(LONG)
    while 1 in ranks[0].watch(LONG).absent():
        here.check()
        time.sleep(0.01)
    watch = ranks[0].watch(LONG)
    while not (absent := watch.absent()):
        time.sleep(0.01)
    assert absent == [2]


def test_leaving_does_not_try_for_long_to_reach_a_server_that_is_gone(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=100)
    port = server.port
    client = dist.TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)
    groups = [Departures(client, name, 0, 2) for name in "abc"]
    watch = groups[0].watch(LONG)
    begun: list[threading.Thread] = []

    def do_on_a_thread(task: Callable[[], None]) -> None:
        begun.append(threading.Thread(target=task, daemon=True))
        begun[-1].start()

    monkeypatch.setattr(departures, "do_waiting", do_on_a_thread)
    del server
    for group in groups:
        group.report_left()
    assert not watch.poll()
    for thread in begun:
        thread.join(30)
        assert not thread.is_alive(), "a thread still tries to reach the server"
    assert len(begun) == 2, "reports and the watch must each try an ended server only once"


def test_the_roll_call_waits_for_no_lazy_connection(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    gloo = MagicMock()
    JoinExchange(gloo, 0, 2, "g", timedelta(seconds=60))
    gloo.recv.assert_not_called()


def test_the_roll_call_is_of_tensors_of_the_host_whatever_the_default_device_is():
    """Gloo would use the address of a GPU tensor as an address in host memory."""
    gloo = MagicMock()
    gloo.all_to_all_single.return_value.is_completed.return_value = False
    with torch.device("meta"):
        exchange = JoinExchange(gloo, 0, 2, "g", timedelta(seconds=60))
        assert not exchange._why_closed(1)
        exchange.give_up([1])
    tensors = tree_leaves([call.args for call in gloo.mock_calls])
    devices = [x.device.type for x in tensors if isinstance(x, torch.Tensor)]
    assert devices == ["cpu"] * 6, (
        "expected a tensor to receive, two to exchange, and one each to probe, to send and to close"
    )
