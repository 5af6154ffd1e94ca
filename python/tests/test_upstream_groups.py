"""Groups behave as PyTorch's own tests expect: subsets, order, and destruction."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks, backend_options

WORLD = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def new_group(address: str, ranks: list[int] | None, **options: Any) -> Any:
    pg_options = backend_options(address, "groups")
    return dist.new_group(ranks, backend="racksum", pg_options=pg_options, **options)


def gathered(group: dist.ProcessGroup) -> list[int]:
    """Returns the world ranks of the group's members, in the group's order."""
    mine = torch.tensor([dist.get_rank()])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return [int(part) for part in parts]


def subsets(address: str) -> None:
    """Makes overlapping groups, and uses them in reverse order."""
    pairs = list(itertools.combinations(range(WORLD), 2))
    groups = [new_group(address, list(pair)) for pair in pairs]
    mine = [i for i, pair in enumerate(pairs) if dist.get_rank() in pair]
    for i in reversed(mine):
        assert gathered(groups[i]) == list(pairs[i])
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=groups[i])
        assert x.item() == sum(pairs[i])
        dist.barrier(groups[i])
    for i in mine:
        dist.destroy_process_group(groups[i])


def in_the_order_given(address: str) -> None:
    backwards = list(reversed(range(WORLD)))
    group = new_group(address, backwards, sort_ranks=False)
    assert dist.get_group_rank(group, dist.get_rank()) == backwards[dist.get_rank()]
    assert gathered(group) == dist.get_process_group_ranks(group) == backwards
    x = torch.tensor([float(dist.get_rank())])
    dist.broadcast(x, group_src=0, group=group)
    assert x.item() == WORLD - 1
    dist.destroy_process_group(group)


def made_by_their_members_alone(address: str) -> None:
    """Makes two groups of the same ranks, while the other ranks take no part."""
    first = dist.get_rank() // 2 * 2
    members = [first, first + 1]
    groups = [new_group(address, members, use_local_synchronization=True) for _ in range(2)]
    for group in groups:
        assert gathered(group) == members
    for group in groups:
        dist.destroy_process_group(group)
    others = [rank for rank in range(WORLD) if rank not in members]
    stranger = new_group(address, others, use_local_synchronization=True)
    assert stranger is dist.GroupMember.NON_GROUP_MEMBER


def from_outside(address: str) -> None:
    group = new_group(address, [1, 3])
    x, parts = torch.ones(2), [torch.ones(2), torch.ones(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: dist.all_gather(parts, x, group=group),
        "broadcast": lambda: dist.broadcast(x, 1, group=group),
        "barrier": lambda: dist.barrier(group),
    }
    for name, call in calls.items():
        if dist.get_rank() in (1, 3):
            call()
        else:
            with pytest.warns(UserWarning, match=f"{name}.*does not belong to"):
                assert call() is None
    assert x.sum() == (4 if dist.get_rank() in (1, 3) else 2)
    if dist.get_rank() in (1, 3):
        assert dist.get_global_rank(group, 1) == 3
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_group_rank(group, 0)
        dist.destroy_process_group(group)


def enumerated(address: str) -> None:
    options = backend_options(address, "groups")
    group, groups = dist.new_subgroups_by_enumeration(
        [[0, 2], [1, 3]], backend="racksum", pg_options=options
    )
    assert gathered(group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert len(groups) == 2
    dist.destroy_process_group(group)


def watched_by_torch(address: str) -> None:
    """Reduces in debug mode, where torch compares the ranks' calls first."""
    try:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        group = new_group(address, None)
        gc.collect()
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == WORLD
        with pytest.raises(RuntimeError, match="mismatch between collectives"):
            dist.all_reduce(torch.ones(1 + dist.get_rank()), group=group)
        dist.destroy_process_group(group)
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level_from_env()


CHECKS = [
    watched_by_torch,
    subsets,
    in_the_order_given,
    made_by_their_members_alone,
    from_outside,
    enumerated,
]


@pytest.mark.parametrize("behaviour", CHECKS, ids=lambda behaviour: behaviour.__name__)
def test_groups(ranks, shared_aggregator, behaviour):
    ranks.run(behaviour, shared_aggregator.address)


def come_and_go(address: str, path: str) -> list[float]:
    """Makes and destroys the default group several times in a row."""
    rank, sums = dist.get_rank(), []
    store = dist.FileStore(path, WORLD)
    dist.destroy_process_group()
    os.environ |= {"RACKSUM_AGGREGATOR": address, "RACKSUM_JOB": "again"}
    for i in range(6):
        dist.init_process_group(
            "cpu:racksum" if i % 2 else "racksum",
            store=dist.PrefixStore(str(i), store),
            rank=rank,
            world_size=WORLD,
            pg_options=backend_options(address, "again") if i % 2 == 0 else None,
        )
        x = torch.ones(1)
        dist.all_reduce(x)
        sums.append(x.item())
        dist.destroy_process_group()
    # Other tests expect this group.
    store = dist.PrefixStore("end", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    return sums


def test_the_default_group_comes_and_goes(ranks, shared_aggregator, tmp_path):
    sums = ranks.run(come_and_go, shared_aggregator.address, str(tmp_path / "store"))
    assert sums == [[WORLD] * 6] * WORLD
