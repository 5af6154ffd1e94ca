"""Ranks that leave before they have joined: nobody waits for a store that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import racksum
from racksum.torch import departures
from racksum.torch.departures import Departures, Watch


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
    """Watches look at once, and nobody waits for long."""
    monkeypatch.setattr(departures, "_GRACE", 0.0)
    monkeypatch.setattr(departures, "_PATIENCE", 0.01)


@pytest.mark.parametrize("call", [Watch.check, Watch.look], ids=["check", "look"])
def test_a_watch_does_not_wait_for_a_store_that_does_not_answer(at_once, call):
    store: Any = Stuck()
    watch = Watch(store, [1])
    for _ in range(3):
        call(watch)
    assert not store.gave_up.is_set()
    store.gives_up.set()
    assert store.gave_up.wait(60)


def test_leaving_does_not_wait_for_a_store_that_does_not_answer(at_once, monkeypatch):
    left = Departures(dist.HashStore(), "g", 0, 2)
    store: Any = Stuck()
    monkeypatch.setattr(left, "_store", store)
    left.note()
    assert not store.gave_up.is_set()
    store.gives_up.set()
    assert store.gave_up.wait(60)


def test_ranks_that_have_left_are_named(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    watch = ranks[0].watch()
    watch.check()
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
        until_it_fails(ranks[2].watch().check)
    assert late.value.missing == (1,)
    with pytest.raises(racksum.PeerLost, match=r"rank 0 left .* rank 1 did not come") as lost:
        until_it_fails(ranks[1].watch().check)
    assert lost.value.ranks == (0,)


def test_ranks_that_cannot_say_so_are_said_to_have_ended(at_once):
    store = dist.HashStore()
    ranks = [Departures(store, "g", rank, 3) for rank in range(3)]
    ranks[0].note_ended([1])
    with pytest.raises(racksum.PeerLost, match="rank 1 ended before joining") as lost:
        until_it_fails(ranks[2].watch().check)
    assert lost.value.ranks == (1,)
