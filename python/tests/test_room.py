"""Callers that start more collectives than may be in flight do not wait; see docs/c10d.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import racksum
import racksum.torch
from conftest import Cluster
from ranks import Ranks, backend_options, group_on_backend
from test_calls import REFUSED

WORLD = 2

Group = dist.ProcessGroup


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def session_of(group: Group) -> racksum.Session:
    session: racksum.Session = group._get_backend(torch.device("cpu")).session
    return session


def by_all_reduce(group: Group, how_many: int) -> tuple[list[Any], list[Tensor]]:
    tensors = [torch.ones(3) for _ in range(how_many)]
    return [dist.all_reduce(x, group=group, async_op=True) for x in tensors], tensors


def coalesced(group: Group, how_many: int) -> tuple[list[Any], list[Tensor]]:
    tensors = [torch.ones(3) for _ in range(how_many)]
    return [dist.all_reduce_coalesced(tensors, group=group, async_op=True)], tensors


def with_refusals(group: Group, how_many: int) -> tuple[list[Any], list[Tensor]]:
    """Adds refused calls, each of which also takes the place of an op."""
    works, tensors = by_all_reduce(group, how_many)
    for _ in range(3):
        with pytest.raises(racksum.BadArgument):
            REFUSED["all_reduce"](group)
    more, others = by_all_reduce(group, 3)
    return works + more, tensors + others


def of_a_device_and_of_the_host(group: Group, how_many: int) -> tuple[list[Any], list[Tensor]]:
    """Reduces host tensors on the path of GPU tensors, and then others on the usual path."""
    staging = group._get_backend(torch.device("cpu"))._staging
    staging.takes = lambda device: True
    try:
        works, tensors = by_all_reduce(group, how_many)
    finally:
        del staging.takes
    more, others = by_all_reduce(group, 3)
    return works + more, tensors + others


Many = Callable[[Group, int], tuple[list[Any], list[Tensor]]]


def through_a_group(one: Group, other: Group, first: bool) -> None:
    dist.all_reduce(torch.ones(3), group=other)


def through_gloo(one: Group, other: Group, first: bool) -> None:
    x = torch.ones(3)
    if first:
        dist.send(x, group_dst=1, group=one)
    else:
        dist.recv(x, group_src=0, group=one)


@pytest.mark.parametrize("meet", [through_a_group, through_gloo])
@pytest.mark.parametrize(
    "many", [by_all_reduce, coalesced, with_refusals, of_a_device_and_of_the_host]
)
def test_who_calls_more_than_there_is_room_for_does_not_wait(
    ranks: Ranks, cluster: Cluster, many: Many, meet: Callable[..., None]
) -> None:
    ranks.run(call_many, many, meet, cluster.address, cluster.new_job())


#: Seconds that an op may take on a busy machine. A deadlock of ranks is still detected, because
#: `Ranks.run` waits no longer than this.
PATIENCE = 100.0


def call_many(many: Many, meet: Callable[..., None], address: str, job: str) -> None:
    """Makes many calls, and meets the other rank: rank 0 after its calls, rank 1 before them."""
    one, other = (
        dist.new_group(
            backend="racksum", pg_options=backend_options(address, f"{job}-{of}", timeout=PATIENCE)
        )
        for of in "ab"
    )
    for group in (one, other):
        dist.barrier(group)
    how_many = session_of(one).max_ops + 6
    first = dist.get_rank() == 0
    if first:
        works, tensors = many(one, how_many)
        meet(one, other, first)
    else:
        meet(one, other, first)
        works, tensors = many(one, how_many)
    for work in works:
        work.wait()
    assert [x.tolist() for x in tensors] == [[WORLD] * 3] * len(tensors)
    for group in (one, other):
        dist.destroy_process_group(group)


def test_who_calls_what_all_ranks_agree_on_first_does_not_wait(
    ranks: Ranks, racks: list[Cluster]
) -> None:
    addresses = [rack.address for rack in racks]
    ranks.run(agree_later, addresses, racks[0].new_job())


def agree_later(addresses: list[str], job: str) -> None:
    """Reduces across two racks, whose ranks agree on exponents once all have called."""
    rank = dist.get_rank()
    exact = {"wire": "fixed32", "timeout": PATIENCE}
    one, other = (
        dist.new_group(
            backend="racksum",
            pg_options=backend_options(addresses[rank], f"{job}-{of}", **exact),
        )
        for of in "ab"
    )
    for group in (one, other):
        dist.barrier(group)
    # The ranks use the groups in different orders.
    groups = (one, other) if rank == 0 else (other, one)
    tensors = [torch.ones(300) for _ in groups]
    works = [
        dist.all_reduce(x, group=group, async_op=True)
        for x, group in zip(tensors, groups, strict=True)
    ]
    for work in works:
        work.wait()
    assert all(x.eq(WORLD).all() for x in tensors)
    for group in (one, other):
        dist.destroy_process_group(group)


def test_what_waits_for_room_fails_when_its_group_is_aborted(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(abort_many, cluster.address, cluster.new_job())


def abort_many(address: str, job: str) -> None:
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    dist.barrier(group)
    if dist.get_rank() == 0:
        works, _ = by_all_reduce(group, session_of(group).max_ops + 6)
        group._get_backend(torch.device("cpu")).abort()
        for work in works:
            with pytest.raises(racksum.Error):
                work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_what_was_called_of_a_device_begins_before_what_waits_for_it(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(wait_for_a_device, cluster.address, cluster.new_job())


def wait_for_a_device(address: str, job: str) -> None:
    """Starts collectives on memory that an earlier collective on the device still uses."""
    group = group_on_backend(address, job)
    dist.barrier(group)
    staging = group._get_backend(torch.device("cpu"))._staging
    staging.takes = lambda device: True
    x = torch.ones(3)
    try:
        busy = torch.futures.Future[None]()
        staging._up.do(busy.wait)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        busy.set_result(None)
        for work in works:
            work.wait()
    finally:
        del staging.takes
    assert x.tolist() == [WORLD**3] * 3


def test_thousands_of_tensors_are_looked_at_once_each(ranks: Ranks, cluster: Cluster) -> None:
    ranks.run(reduce_thousands, cluster.address, cluster.new_job())


def reduce_thousands(address: str, job: str) -> None:
    group = group_on_backend(address, job)
    works, tensors = coalesced(group, 2000)
    more, others = by_all_reduce(group, 500)
    again = [dist.all_reduce(x, group=group, async_op=True) for x in tensors[::4]]
    for work in works + more + again:
        work.wait()
    assert all(x.eq(WORLD).all() for x in others)
    assert torch.stack(tensors)[:, 0].view(-1, 4).eq(torch.tensor([4.0, 2, 2, 2])).all()
