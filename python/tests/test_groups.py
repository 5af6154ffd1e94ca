"""Sessions of process groups: their generations, names, memory and ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import racksum
import racksum.torch
from conftest import Aggregator
from racksum.torch.backend import RacksumBackend
from ranks import TIMEOUT, Ranks, backend_options


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def generation_of_none(address: str, job: str) -> int:
    with racksum.torch.connect(address, job=job, timeout=TIMEOUT, generation=None) as session:
        return session.generation


def test_a_generation_of_none_is_not_given(ranks, cluster):
    before = int(time.time())
    [generation] = ranks.run(generation_of_none, cluster.address, cluster.new_job())
    assert generation >= before


def generations_in_a_row(address: str, job: str) -> list[int]:
    return [generation_of_none(address, job) for _ in range(8)]


def test_lives_that_begin_within_a_second_have_generations_of_their_own(ranks, cluster):
    [lives] = ranks.run(generations_in_a_row, cluster.address, cluster.new_job())
    assert lives == sorted(set(lives))


def options_that_are_none(address: str) -> None:
    for options in ({"rank": 0}, {"world": 1}, {"jobb": "mine"}):
        with pytest.raises(racksum.BadArgument, match=next(iter(options))):
            racksum.torch.connect(address, **options)


def test_what_is_no_option_is_refused(ranks, cluster):
    ranks.run(options_that_are_none, cluster.address)


def destroy_without_a_collection(address: str, job: str) -> None:
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    name = group.group_name
    dist.all_reduce(torch.ones(3), group=group)
    gc.disable()
    try:
        dist.destroy_process_group(group)
        del group
        left = [it for it in gc.get_objects() if type(it) is RacksumBackend]
        assert name not in [it._name for it in left]
    finally:
        gc.enable()


def test_a_group_that_is_destroyed_keeps_nothing_of_the_store(ranks, cluster):
    """Checks that nothing keeps the store alive: the next group may need its port."""
    ranks.run(destroy_without_a_collection, cluster.address, cluster.new_job())


def several_sessions(address: str, job: str) -> list[str]:
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    options = {"job": job, "timeout": TIMEOUT, "join_timeout": TIMEOUT}
    names = []
    for of in (None, group):
        first, second = (racksum.torch.connect(address, group=of, **options) for _ in range(2))
        dist.all_reduce(torch.ones(3), group=group)
        first.close()
        third = racksum.torch.connect(address, group=of, generation=2**30, **options)
        for session in (second, third):
            session.allreduce(torch.ones(3))
            session.close()
        names += [it.options.name for it in (first, second, third)]
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    return names


def test_a_process_may_have_several_sessions_of_a_group(ranks, cluster):
    job = cluster.new_job()
    [names] = ranks.run(several_sessions, cluster.address, job)
    assert names[:3] == [job, f"{job}/session-2", job]
    assert names[3] == names[5] != names[4]


@pytest.fixture
def mesh() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def groups_of_a_mesh(address: str, times: int) -> None:
    """Makes groups for rows and columns of two by two ranks, sums in each, and destroys them."""
    lines = [[0, 1], [2, 3], [0, 2], [1, 3]] * times
    groups = [
        dist.new_group(line, backend="racksum", pg_options=backend_options(address, "mesh"))
        for line in lines
    ]
    mine = [group for line, group in zip(lines, groups, strict=True) if dist.get_rank() in line]
    for group in mine:
        x = torch.ones(100_000)
        dist.all_reduce(x, group=group)
        assert x.eq(2).all()
    for group in mine:
        dist.destroy_process_group(group)


def test_a_job_has_many_groups_at_once_and_their_places_are_given_back(
    mesh: Ranks, aggregator: Aggregator
) -> None:
    """Runs 64 groups twice. The second 64 groups need the memory of the first 64."""
    for _ in range(2):
        mesh.run(groups_of_a_mesh, aggregator.address, 16)
