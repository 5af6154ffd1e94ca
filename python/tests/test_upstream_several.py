"""Behaviours of Gloo beyond single tensors: several tensors in a call, split groups, options.

`docs/c10d.md` names the queries that torch does not forward to a backend in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import racksum
import racksum.torch
from ranks import Checks, Ranks, backend_options, in_group

WORLD = 3

CHECKS = Checks()
check = CHECKS.add

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def as_gloo(group: dist.ProcessGroup, call: Callable[[Any], list[Tensor]]) -> None:
    """Checks that the backend gives the same result as Gloo."""
    torch.testing.assert_close(call(group), call(dist.group.WORLD))


def own(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = (count, 5, 3)
    return list(torch.randint(-4, 5, shape, generator=draw).to(dtype).unbind())


@check
def several_tensors_are_reduced_together(group: dist.ProcessGroup) -> None:
    def reduced(by: Any, dtype: torch.dtype, group: Any) -> list[Tensor]:
        xs, opts = own(3, dtype), c10d.AllreduceOptions()
        opts.reduceOp = by
        group.allreduce(xs, opts).wait()
        return xs

    for name in ("SUM", "MIN", "MAX", "PRODUCT"):
        for dtype in (torch.float32, torch.int64, torch.uint8):
            as_gloo(group, partial(reduced, getattr(dist.ReduceOp, name), dtype))
    for name in ("BAND", "BOR", "BXOR"):
        as_gloo(group, partial(reduced, getattr(dist.ReduceOp, name), torch.int32))
    # Gloo divides only the first of the tensors.
    averages, sums = (
        reduced(by, torch.float32, group) for by in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)
    )
    torch.testing.assert_close(averages, [x / WORLD for x in sums])


@check
def several_sparse_tensors_are_reduced_together(group: dist.ProcessGroup) -> None:
    def reduced(group: Any) -> list[Tensor]:
        xs = [torch.sparse_coo_tensor([[dist.get_rank() + i]], [1.0], (6,)) for i in range(2)]
        group.allreduce(xs, c10d.AllreduceOptions()).wait()
        return [x.to_dense() for x in xs]

    as_gloo(group, reduced)


@check
def one_of_several_tensors_is_broadcast(group: dist.ProcessGroup) -> None:
    def given(root: int, tensor: int, group: Any) -> list[Tensor]:
        xs, opts = own(3), c10d.BroadcastOptions()
        opts.rootRank, opts.rootTensor = root, tensor
        group.broadcast(xs, opts).wait()
        return xs

    for root in range(WORLD):
        for tensor in range(3):
            as_gloo(group, partial(given, root, tensor))


@check
def several_tensors_are_gathered_into_as_many_lists(group: dist.ProcessGroup) -> None:
    def gathered(group: Any) -> list[list[Tensor]]:
        outputs = [[torch.empty(5, 3) for _ in range(2 * WORLD)] for _ in range(2)]
        group.allgather(outputs, own(2), c10d.AllgatherOptions()).wait()
        return outputs

    as_gloo(group, gathered)


@check
def what_a_backend_says_of_itself(group: dist.ProcessGroup) -> None:
    backend, gloo = group._get_backend(CPU), dist.group.WORLD._get_backend(CPU)
    values: dict[str, list[Any]] = {}
    for which in (backend, gloo):
        for name in (name for name in dir(c10d.Backend) if not name.startswith("__")):
            try:
                value = getattr(which, name)
            except RuntimeError as error:
                # Both backends must raise the same error. If torch recurses forever for one backend
                # alone, that backend's RecursionError differs.
                value = type(error).__name__
            values.setdefault(name, []).append(value if not callable(value) else callable)
    differ = {name for name, (ours, gloos) in values.items() if ours != gloos}
    # Gloo lets ranks join a running group. A job permits that only with `rejoin`.
    assert differ == {"options", "supports_reconfigure"}, differ
    assert backend.options is backend.options
    assert backend.options.backend == "racksum"
    assert backend.options._timeout == gloo.options._timeout
    assert backend.options.group_name == group.group_name


@check
def a_work_is_waited_for_and_torch_does_not_ask_it_more(group: dist.ProcessGroup) -> None:
    """If this fails, torch forwards the queries: change docs/c10d.md."""
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    assert work.get_future().done()
    assert not work.is_completed()


@pytest.mark.parametrize("behaviour", CHECKS, ids=lambda behaviour: behaviour.__name__)
def test_as_of_gloo(ranks, shared_aggregator, behaviour):
    ranks.run(in_group, behaviour, shared_aggregator.address, "several")


def reduced_in(group: Any) -> float:
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=group)
    return x.item()


def split(address: str, job: str) -> None:
    options = backend_options(address, job, block=64)
    parent = dist.new_group(backend="racksum", pg_options=options)
    limit = timedelta(seconds=17)
    halves = [[0], [2, 1]]
    for pg_options in (None, options):
        half = dist.split_group(parent, halves, timeout=limit, pg_options=pg_options)
        assert reduced_in(half) == (1 if dist.get_rank() == 0 else 6)
        mine = half._get_backend(CPU)
        assert mine.options.block == 64
        assert mine.options._timeout == limit
        assert half.rank() == [0, 1, 0][dist.get_rank()]
        dist.destroy_process_group(half)
    assert reduced_in(parent) == 7
    if dist.get_rank() == 2:
        with pytest.raises(RuntimeError, match="rank 2 is in none of the groups"):
            dist.split_group(parent, [[0, 1]])
    else:
        assert reduced_in(dist.split_group(parent, [[0, 1]])) == 3
    assert reduced_in(parent) == 7
    dist.destroy_process_group(parent)


def test_a_group_is_split(ranks, cluster):
    ranks.run(split, cluster.address, cluster.new_job())


def given_options_of_others(address: str, job: str) -> None:
    """Passes options of another backend, as "cpu:racksum,cuda:nccl" does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKSUM_AGGREGATOR", address)
        patch.setenv("RACKSUM_JOB", job)
        for options in (c10d.ProcessGroupGloo._Options(), c10d.Backend.Options("other")):
            group = dist.new_group(backend="racksum", pg_options=options)
            assert reduced_in(group) == 7
            dist.destroy_process_group(group)
        with pytest.raises(racksum.BadArgument, match=r"must be racksum\.torch\.Options, not dict"):
            dist.new_group(backend="racksum", pg_options={"aggregator": address})


def test_options_of_another_backend_are_left_alone(ranks, cluster):
    ranks.run(given_options_of_others, cluster.address, cluster.new_job())
