"""Timeouts of sessions: by default a session has those of its process group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import racksum
import racksum.torch
from conftest import Cluster
from racksum.options import ConnectOptions
from ranks import Ranks, backend_options

WORLD = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def limits(session: racksum.Session) -> tuple[float, float]:
    with session:
        return session.options.timeout, session.options.join_timeout


def connected(address: str, job: str, **options: Any) -> racksum.Session:
    own = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return racksum.connect(address, job=job, **own, **options)


def limits_with_groups(address: str, job: str) -> list[tuple[float, float]]:
    dist.set_timeout(timedelta(seconds=77))
    other = dist.new_group(timeout=timedelta(seconds=55))
    seconds = timedelta(seconds=44)
    options = backend_options(address, f"{job}-backend")
    del options.connect["timeout"], options.connect["join_timeout"]
    backend = dist.new_group(backend="racksum", timeout=seconds, pg_options=options)
    named = {"aggregator": address, "job": f"{job}-torch"}
    found = [
        limits(connected(address, job)),
        limits(connected(address, f"{job}-given", timeout=12, join_timeout=13)),
        limits(racksum.torch.connect(**named)),
        limits(racksum.torch.connect(**named, group=other)),
        limits(racksum.torch.connect(**named, group=other, timeout=12)),
        limits(racksum.torch.connect(**named, group=backend)),
    ]
    x = torch.ones(3)
    dist.all_reduce(x, group=backend)
    found.append(limits(backend._get_backend(torch.device("cpu")).session))
    os.environ["RACKSUM_TIMEOUT"] = "17"
    try:
        found.append(limits(connected(address, f"{job}-environment")))
    finally:
        del os.environ["RACKSUM_TIMEOUT"]
    return found


def test_limits_are_those_of_the_group_unless_given(ranks: Ranks, cluster: Cluster) -> None:
    expected = [
        (77, 77),
        (12, 13),
        (77, 77),
        (55, 55),
        (12, 55),
        (44, 44),
        (44, 44),
        (17, 77),
    ]
    assert ranks.run(limits_with_groups, cluster.address, cluster.new_job()) == [expected] * 2


def busy_for_longer_than_without_a_group(address: str, job: str) -> list[float]:
    defaults: dict[str, Any] = ConnectOptions.__init__.__kwdefaults__
    before, defaults["timeout"] = defaults["timeout"], 0.5
    try:
        with connected(address, job) as session:
            for busy in range(WORLD):
                if busy == dist.get_rank():
                    time.sleep(2)
                x = session.allreduce(torch.ones(3))
            return list(x.tolist())
    finally:
        defaults["timeout"] = before


def test_a_rank_that_is_busy_is_waited_for_as_long_as_in_its_group(
    ranks: Ranks, cluster: Cluster
) -> None:
    made = ranks.run(busy_for_longer_than_without_a_group, cluster.address, cluster.new_job())
    assert made == [[2.0] * 3] * 2


def test_without_a_group_limits_are_racksums_own(cluster: Cluster) -> None:
    with racksum.connect(cluster.address, job=cluster.new_job(), rank=0, world=1) as session:
        assert (session.options.timeout, session.options.join_timeout) == (60, 300)
