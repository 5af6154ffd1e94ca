"""What PyTorch's profiler shows of the backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from conftest import Cluster
from ranks import Ranks, group_on_backend

WORLD = 2


@pytest.fixture(scope="module")
def job(shared_aggregator: Any) -> tuple[str, str]:
    return shared_aggregator.address, Cluster.new_job()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def shown(address: str, job: str, key: str) -> dict[str, Any]:
    """When each event of racksum began and ended, by its name, and what a rank did meanwhile."""
    group = group_on_backend(address, job)
    store = dist.distributed_c10d._get_default_store()
    x, parts = torch.ones(3), torch.zeros(WORLD * 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        if dist.get_rank() == 1:
            store.wait([key])
        work = dist.all_reduce(x, group=group, async_op=True)
        with record_function("meanwhile"):
            torch.ones(3).sum()
        # The other rank calls after this.
        store.set(key, "1")
        work.wait()
        dist.all_gather_into_tensor(parts, x, group=group)
        dist.barrier(group)
    events = [event for event in profiled.events() if event.name.startswith(("racksum:", "mean"))]
    assert len(events) == 4
    return {event.name: (event.time_range.start, event.time_range.end) for event in events}


@pytest.mark.parametrize("calls", ["before its ranks have joined", "after that"])
def test_the_profiler_shows_collectives_from_their_call_to_their_end(
    ranks: Ranks, job: tuple[str, str], calls: str
) -> None:
    first, second = ranks.run(shown, *job, calls)
    names = {"racksum:all_reduce", "racksum:all_gather", "racksum:barrier", "meanwhile"}
    assert set(first) == set(second) == names
    begun, ended = first["racksum:all_reduce"]
    assert begun <= first["meanwhile"][0] <= first["meanwhile"][1] <= ended


def recorded(address: str, job: str) -> list[Any]:
    """What is done for an event where nobody profiles."""
    group = group_on_backend(address, job)
    with mock.patch("racksum.torch.profiled.Event") as event:
        dist.all_reduce(torch.ones(3), group=group)
    return list(event.mock_calls)


def test_nothing_is_recorded_where_nobody_profiles(ranks: Ranks, job: tuple[str, str]) -> None:
    assert ranks.run(recorded, *job) == [[]] * WORLD
