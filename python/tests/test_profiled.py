"""Events of the backend in PyTorch's profiler."""

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
    """Returns the times of racksum's events by name, and of the rank's other work."""
    group = group_on_backend(address, job)
    store = dist.distributed_c10d._get_default_store()
    x, parts = torch.ones(3), torch.zeros(WORLD * 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        if dist.get_rank() == 1:
            store.wait([key])
        work = dist.all_reduce(x, group=group, async_op=True)
        with record_function("meanwhile"):
            torch.ones(3).sum()
        # The other rank makes its call only once this key is set.
        store.set(key, "1")
        work.wait()
        work.wait()
        dist.all_gather_into_tensor(parts, x, group=group)
        dist.barrier(group)
    events = [event for event in profiled.events() if event.name.startswith(("racksum:", "mean"))]
    assert len(events) == 7
    return {event.name: (event.time_range.start, event.time_range.end) for event in events}


@pytest.mark.parametrize("calls", ["before its ranks have joined", "after that"])
def test_the_profiler_shows_each_call_and_each_wait(
    ranks: Ranks, job: tuple[str, str], calls: str
) -> None:
    first, second = ranks.run(shown, *job, calls)
    names = {f"racksum:{name}" for name in ("all_reduce", "all_gather", "barrier")}
    assert set(first) == set(second) == names | {f"{name}:wait" for name in names} | {"meanwhile"}
    in_turn = [
        first[name] for name in ("racksum:all_reduce", "meanwhile", "racksum:all_reduce:wait")
    ]
    assert [moment for event in in_turn for moment in event] == sorted(
        moment for event in in_turn for moment in event
    )


def outlived(address: str, job: str, count: int) -> list[float]:
    """Returns the results of collectives whose profile ends before the wait."""
    group = group_on_backend(address, job)
    results = []
    for _ in range(count):
        with profile(activities=[ProfilerActivity.CPU]):
            tensors = [torch.ones(4) for _ in range(10)]
            works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        results += [float(x.sum()) for x in tensors]
    return results


def test_collectives_outlive_the_profile_that_they_begin_in(
    ranks: Ranks, job: tuple[str, str]
) -> None:
    profiles = 10
    # torch crashes if another thread ends an event while the profile ends.
    assert ranks.run(outlived, *job, profiles) == [[4.0 * WORLD] * 10 * profiles] * WORLD


def recorded(address: str, job: str) -> list[Any]:
    """Returns the events that are recorded without a profiler."""
    group = group_on_backend(address, job)
    with mock.patch("racksum.torch.profiled.record_function") as event:
        dist.all_reduce(torch.ones(3), group=group)
    return list(event.mock_calls)


def test_nothing_is_recorded_where_nobody_profiles(ranks: Ranks, job: tuple[str, str]) -> None:
    assert ranks.run(recorded, *job) == [[]] * WORLD
