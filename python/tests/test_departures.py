"""Ranks that leave before they have joined: nobody waits for a store that does not answer."""

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
from racksum.torch.roll import RollCall

#: Seconds that no test waits for.
LONG = 3600.0


class Stuck:
    """A store whose server is gone: connections to it take until somebody lets them fail."""

    def __init__(self) -> None:
        self.gives_up = threading.Event()
        self.gave_up = threading.Event()

    def clone(self) -> Any:
        assert self.gives_up.wait(60), "the caller has waited"
        self.gave_up.set()
        raise RuntimeError("no server")


def until_it_fails(call: Callable[[], None]) -> None:
    while True:
        call()
        time.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches look at once."""
    monkeypatch.setattr(departures, "_GRACE", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(departures, "_PATIENCE", 0.01)


@pytest.mark.parametrize("call", [Watch.check, Watch.look], ids=["check", "look"])
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
    monkeypatch.setattr(first._voice, "_shared", store)
    first.note()
    # One group after the other leaves: that it is late costs time only once.
    monkeypatch.setattr(departures, "_PATIENCE", LONG)
    second.note()
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
        leaving.note()
    # A thread of the test before may make another of its store.
    assert connections.count(store) == 1
    for _, waiting in groups:
        with pytest.raises(racksum.PeerLost, match="rank 0 left the process group"):
            until_it_fails(waiting.watch(LONG).check)


def test_ranks_that_have_left_are_named(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    watch = ranks[0].watch(LONG)
    watch.check()
    # A look that is late would find the first of them alone.
    assert watch._rests.wait(60)
    for rank in (1, 2):
        ranks[rank].note()
    with pytest.raises(racksum.PeerLost, match="ranks 1, 2 left the process group g") as lost:
        until_it_fails(watch.check)
    assert lost.value.ranks == (1, 2)


def test_whom_a_rank_has_waited_for_in_vain_is_named_to_those_that_wait_too(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[0].note(racksum.JoinTimeout("rank 1 did not come", [1]))
    with pytest.raises(racksum.JoinTimeout, match=r"rank 0 left .* rank 1 did not come") as late:
        until_it_fails(ranks[2].watch(LONG).check)
    assert late.value.missing == (1,)
    with pytest.raises(racksum.PeerLost, match=r"rank 0 left .* rank 1 did not come") as lost:
        until_it_fails(ranks[1].watch(LONG).check)
    assert lost.value.ranks == (0,)


def test_ranks_that_cannot_say_so_are_said_to_have_ended(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[0].note_ended([1])
    with pytest.raises(racksum.PeerLost, match="rank 1 ended before joining") as lost:
        until_it_fails(ranks[2].watch(LONG).check)
    assert lost.value.ranks == (1,)


def test_what_a_rank_says_itself_stays_whatever_others_say_of_it(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[2].note(racksum.BadArgument("no interface none0"))
    ranks[1].note_ended([2])
    with pytest.raises(racksum.PeerLost, match=r"rank 2 left .* no interface none0"):
        until_it_fails(ranks[0].watch(LONG).check)


def test_each_rank_that_has_left_is_named_with_its_own_reason(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 5) for rank in range(5)]
    ranks[3].note(racksum.BadArgument("no interface none0"))
    ranks[1].note_ended([0, 2])
    ranks[1].note(racksum.JoinTimeout("rank 0 did not come", [0]))
    with pytest.raises(racksum.PeerLost) as lost:
        until_it_fails(ranks[4].watch(LONG).check)
    assert lost.value.ranks == (0, 1, 2, 3)
    assert str(lost.value) == (
        "ranks 0, 2 ended before joining the process group g, or closed its connections after a "
        "collective had failed there; check the log of its process; "
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

    def do_on_a_thread(thing: Callable[[], None]) -> None:
        begun.append(threading.Thread(target=thing, daemon=True))
        begun[-1].start()

    monkeypatch.setattr(departures, "do_waiting", do_on_a_thread)
    del server
    for group in groups:
        group.note()
    assert not watch.look()
    for thread in begun:
        thread.join(30)
        assert not thread.is_alive(), "it still tries"
    assert len(begun) == 2, "a server that is gone is tried once, and once by the watch"


def test_the_roll_call_waits_for_no_lazy_connection(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    gloo = MagicMock()
    RollCall(gloo, 0, 2, "g", timedelta(seconds=60))
    gloo.recv.assert_not_called()


def test_the_roll_call_is_of_tensors_of_the_host_whatever_the_default_device_is():
    """Gloo takes the address of a tensor of a GPU for one of the host."""
    gloo = MagicMock()
    gloo.all_to_all_single.return_value.is_completed.return_value = False
    with torch.device("meta"):
        roll = RollCall(gloo, 0, 2, "g", timedelta(seconds=60))
        assert not roll._why_closed(1)
        roll.give_up([1])
    tensors = tree_leaves([call.args for call in gloo.mock_calls])
    devices = [x.device.type for x in tensors if isinstance(x, torch.Tensor)]
    assert devices == ["cpu"] * 6, "to receive, an exchange of two, to look, to send, to close"
