"""The c10d backend: every collective gives the same result as with Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import racksum
import racksum.torch
from conftest import Aggregator
from racksum.torch.backend import _open
from ranks import Ranks, new_port

WORLD = 3


@pytest.fixture(scope="module")
def ranks(shared_aggregator: Aggregator) -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    ranks.run(make_group, shared_aggregator.address)
    yield ranks
    ranks.close()


_groups: dict[str, Any] = {}


def make_group(address: str) -> None:
    options = racksum.torch.Options(aggregator=address, job="backend")
    _groups["racksum"] = dist.new_group(backend="racksum", pg_options=options)
    _groups["gloo"] = None


def both(collective: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Returns the results of a collective with racksum and with Gloo, which runs on the host."""
    made = []
    for backend, device in (("racksum", torch.get_default_device()), ("gloo", "cpu")):
        torch.manual_seed(dist.get_rank())
        with torch.device(device):
            made.append(collective(_groups[backend], *arguments))
    return made[0], made[1]


def same(collective: Callable[..., Any], *arguments: Any) -> None:
    made = both(collective, *arguments)
    torch.testing.assert_close(*made, rtol=1e-6, atol=1e-6, check_device=False)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randint(-4, 5, shape, device="cpu").to(torch.get_default_device(), dtype)
    # A single element is contiguous with any stride, as in a column of a batch of one.
    return drawn.as_strided(shape, (6,)) if shape == (1,) else drawn


def allreduced(group: Any, op: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    x = numbers(shape, dtype)
    dist.all_reduce(x, op, group=group)
    return x


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
OPS = ["SUM", "MIN", "MAX", "PRODUCT"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_allreduce(ranks: Ranks, op: str, dtype: torch.dtype) -> None:
    ranks.run(check_allreduce, op, dtype)


def check_allreduce(op: str, dtype: torch.dtype) -> None:
    for shape in [(), (1,), (5, 7), (1000,), (0,)]:
        same(allreduced, getattr(dist.ReduceOp, op), dtype, shape)


def test_the_average_and_a_factor_are_gloos_sum_of_parts(ranks: Ranks) -> None:
    ranks.run(check_average)


def check_average() -> None:
    x, mean, scaled = torch.full((10,), dist.get_rank() + 1.0), torch.ones(10), torch.ones(10)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=_groups["racksum"])
    assert x.tolist() == [2.0] * 10
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group=_groups["racksum"])
    assert scaled.tolist() == [0.5 * WORLD] * 10
    assert mean.tolist() == [1.0] * 10


def test_complex_factors_scale_complex_tensors(ranks: Ranks) -> None:
    ranks.run(check_complex_factor)


def check_complex_factor() -> None:
    """Compares with computed sums, because Gloo does not support factors.

    Calls the group's own `allreduce`, because `dist.all_reduce` passes complex tensors on as real
    ones.
    """
    group, by = _groups["racksum"], dist._make_nccl_premul_sum(torch.tensor(1 + 2j))
    options = c10d.AllreduceOptions()
    options.reduceOp = by
    for dtype in (torch.complex64, torch.complex128):
        x = torch.tensor([1 + 1j, 2, 3j] * WORLD, dtype=dtype)
        expected, own = WORLD * (1 + 2j) * x, torch.zeros(3, dtype=dtype)
        dist.reduce_scatter_tensor(own, x, by, group=group)
        assert torch.equal(own, expected[:3])
        group.allreduce([x], options).wait()
        assert torch.equal(x, expected)
    with pytest.raises(racksum.BadArgument, match=r"torch\.float32 cannot hold its products"):
        dist.all_reduce(torch.ones(3), by, group=group)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX"])
def test_negative_zero_of_all_ranks_becomes_positive(ranks: Ranks, op: str) -> None:
    ranks.run(check_negative_zero, op)


def check_negative_zero(op: str) -> None:
    """Checks the sign of zeros: a block of zeros is not sent, and a sent block keeps signs."""
    x = torch.full((1000,), -0.0)
    x[0] = 1.0
    dist.all_reduce(x, getattr(dist.ReduceOp, op), group=_groups["racksum"])
    assert x[0] != 0
    assert x[1:].eq(0).all()
    assert x[1:256].signbit().all()
    assert not x[256:].signbit().any()


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_operators_are_gloos(ranks: Ranks, op: str) -> None:
    ranks.run(check_allreduce, op, torch.int32)


def test_booleans_and_complex_numbers(ranks: Ranks) -> None:
    ranks.run(check_booleans_and_complex_numbers)


def check_booleans_and_complex_numbers() -> None:
    group, rank = _groups["racksum"], dist.get_rank()
    for op, expected in [("SUM", True), ("MAX", True), ("MIN", False), ("PRODUCT", False)]:
        x = torch.tensor([rank == 0, False, True])
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
        assert x.tolist() == [expected, False, True], op
    z = torch.full((3,), complex(rank, 1))
    dist.all_reduce(z, group=group)
    assert z.tolist() == [complex(3, 3)] * 3


def test_the_average_of_integers_is_rounded_toward_zero(ranks: Ranks) -> None:
    ranks.run(check_average_of_integers)


def check_average_of_integers() -> None:
    group = _groups["racksum"]
    torch.manual_seed(dist.get_rank())
    for dtype in (torch.int32, torch.int64):
        x = numbers((7, 40), dtype) * 1000 + numbers((7, 40), dtype)
        part, whole = numbers((4,), dtype), numbers((4 * WORLD,), dtype)
        sums = [x.clone(), whole.clone()]
        for total in sums:
            dist.all_reduce(total, group=group)
        averages = [torch.div(total, WORLD, rounding_mode="trunc") for total in sums]
        dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
        assert torch.equal(x, averages[0])
        assert not torch.equal(x, sums[0] // WORLD), (
            "the sums cannot show whether averages are rounded down or toward zero"
        )
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group=group)
        assert torch.equal(part, averages[1].view(WORLD, 4)[dist.get_rank()])


def broadcasted(group: Any, dtype: torch.dtype, shape: tuple[int, ...], src: int) -> torch.Tensor:
    x = numbers(shape, dtype)
    dist.broadcast(x, src, group=group)
    return x


def gathered(group: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    parts = [torch.empty(shape, dtype=dtype) for _ in range(WORLD)]
    dist.all_gather(parts, numbers(shape, dtype), group=group)
    return parts


def gathered_in_one(group: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.empty((WORLD * (shape[0] if shape else 1), *shape[1:]), dtype=dtype)
    dist.all_gather_into_tensor(whole, numbers(shape or (1,), dtype), group=group)
    return whole


def scattered(group: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    own = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(own, [numbers(shape, dtype) for _ in range(WORLD)], group=group)
    return own


def scattered_of_one(group: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    own = torch.empty(shape or (1,), dtype=dtype)
    whole = numbers((WORLD * (shape[0] if shape else 1), *shape[1:]), dtype)
    before = whole.clone()
    dist.reduce_scatter_tensor(own, whole, group=group)
    assert torch.equal(whole, before), "the collective changed its input"
    return own


def reduced(group: Any, dtype: torch.dtype, shape: tuple[int, ...], dst: int) -> torch.Tensor:
    x = numbers(shape, dtype)
    dist.reduce(x, dst, group=group)
    return x if dist.get_rank() == dst else torch.empty(0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_collectives(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(check_collectives, dtype)


def check_collectives(dtype: torch.dtype) -> None:
    for shape in [(), (1,), (5, 7), (1000,)]:
        for root in range(WORLD):
            same(broadcasted, dtype, shape, root)
            same(reduced, dtype, shape, root)
        for collective in (gathered, gathered_in_one, scattered, scattered_of_one):
            same(collective, dtype, shape)


def test_what_is_broadcast_and_gathered_keeps_its_bits(ranks: Ranks) -> None:
    ranks.run(check_bits)


def check_bits() -> None:
    odd = torch.tensor([-0.0, float("nan"), 1e-45, float("-inf")])
    bits = odd.view(torch.int32).tolist()
    got = odd.clone() if dist.get_rank() == 1 else torch.ones(4)
    dist.broadcast(got, 1, group=_groups["racksum"])
    assert got.view(torch.int32).tolist() == bits
    parts = [torch.ones(4) for _ in range(WORLD)]
    dist.all_gather(parts, odd, group=_groups["racksum"])
    assert [part.view(torch.int32).tolist() for part in parts] == [bits] * WORLD


def test_gathering_in_place(ranks: Ranks) -> None:
    ranks.run(check_gathering_in_place)


def check_gathering_in_place() -> None:
    whole = torch.zeros(WORLD, 10)
    own = whole[dist.get_rank()]
    own.fill_(dist.get_rank())
    dist.all_gather_into_tensor(whole.view(-1), own, group=_groups["racksum"])
    assert whole.mean(1).tolist() == [0.0, 1.0, 2.0]


def test_what_goes_from_one_rank_to_another_is_gloos(ranks: Ranks) -> None:
    ranks.run(check_delegated)


def check_delegated() -> None:
    group, rank = _groups["racksum"], dist.get_rank()
    if rank == 0:
        dist.send(torch.arange(5), 2, group=group)
    if rank == 2:
        got = torch.empty(5, dtype=torch.int64)
        dist.recv(got, 0, group=group)
        assert got.tolist() == list(range(5))
    check_exchanges()


def check_exchanges() -> None:
    group, rank = _groups["racksum"], dist.get_rank()
    into = torch.empty(WORLD, dtype=torch.int64)
    dist.all_to_all_single(into, torch.full((WORLD,), rank), group=group)
    assert into.tolist() == [0, 1, 2]
    parts = [torch.empty(1) for _ in range(WORLD)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), parts, dst=1, group=group)
    assert parts is None or [part.item() for part in parts] == [0, 1, 2]
    own = torch.empty(1)
    dist.scatter(
        own,
        [torch.tensor([float(i)]) for i in range(WORLD)] if rank == 1 else None,
        src=1,
        group=group,
    )
    assert own.item() == rank


def test_objects(ranks: Ranks) -> None:
    ranks.run(check_objects)


def check_objects() -> None:
    group, rank = _groups["racksum"], dist.get_rank()
    things: list[Any] = [None] * WORLD
    dist.all_gather_object(things, {"rank": rank, "text": "x" * rank}, group=group)
    assert [thing["rank"] for thing in things] == [0, 1, 2]
    one = ["hello"] if rank == 2 else [None]
    dist.broadcast_object_list(one, src=2, group=group)
    assert one == ["hello"]


def test_asynchronous_and_coalesced(ranks: Ranks) -> None:
    ranks.run(check_asynchronous)


def check_asynchronous() -> None:
    group = _groups["racksum"]
    xs = [torch.full((100,), float(i)) for i in range(200)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    futures = [work.get_future() for work in works[::2]]
    for work in works[1::2]:
        work.wait()
    for future in futures:
        future.wait()
    assert [x[0].item() for x in xs] == [float(WORLD * i) for i in range(200)]
    assert all(future.done() for future in futures)
    with dist._coalescing_manager(group):
        for x in xs[:3]:
            dist.all_reduce(x, group=group)
    assert [x[0].item() for x in xs[:3]] == [0, 9, 18]


def test_sparse(ranks: Ranks) -> None:
    ranks.run(check_sparse)


def check_sparse() -> None:
    torch.manual_seed(dist.get_rank())
    rows = numbers((1, 0 if dist.get_rank() == 1 else 20), torch.int64) + 30
    x = torch.sparse_coo_tensor(rows, torch.randn(rows.shape[1], 8), (50, 8))
    dense = x.to_dense()
    dist.all_reduce(dense)
    dist.all_reduce(x, group=_groups["racksum"])
    torch.testing.assert_close(x.to_dense(), dense)


def test_subsets_and_a_barrier(ranks: Ranks, shared_aggregator: Aggregator) -> None:
    ranks.run(check_subsets, shared_aggregator.address)


def check_subsets(address: str) -> None:
    options = racksum.torch.Options(aggregator=address, job="subsets")
    group = dist.new_group([0, 2], backend="racksum", pg_options=options)
    if dist.get_rank() != 1:
        x = torch.ones(3) * dist.get_rank()
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0] * 3
        dist.broadcast(x, 2, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.barrier(_groups["racksum"])


def test_ranks_that_call_different_collectives_are_told(
    ranks: Ranks, shared_aggregator: Aggregator
) -> None:
    ranks.run(check_mismatch, shared_aggregator.address)


def check_mismatch(address: str) -> None:
    options = racksum.torch.Options(aggregator=address, job="mismatch")
    group = dist.new_group(backend="racksum", pg_options=options)
    x = torch.ones(8, dtype=torch.int32)
    with pytest.raises(racksum.Mismatch):
        dist.broadcast(x, dist.get_rank(), group=group)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)


def test_no_aggregator_is_an_error_of_its_type(ranks: Ranks) -> None:
    ranks.run(check_nobody_there)


def check_nobody_there() -> None:
    options = racksum.torch.Options(aggregator="127.0.0.1:9", job="nobody", join_timeout=2.0)
    group = dist.new_group(backend="racksum", pg_options=options)
    with pytest.raises(racksum.NoAggregator, match=r"127\.0\.0\.1:9"):
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


def test_groups_have_the_options_of_the_default_group_and_the_environment(shared_aggregator):
    ranks = Ranks(2)
    try:
        ranks.run(check_inherited, shared_aggregator.address)
    finally:
        ranks.close()


def check_inherited(address: str) -> None:
    port = [new_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, 0)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ["RACKSUM_TIMEOUT"] = "17"
    dist.init_process_group(
        "racksum",
        init_method=f"tcp://127.0.0.1:{port[0]}",
        rank=rank,
        world_size=world,
        pg_options=racksum.torch.Options(aggregator=address, job="inherited", block=64),
    )
    group = dist.new_group([1, 0])
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3
    assert {own._options.block for own in _open} == {64}
    assert {own.session.options.timeout for own in _open} == {17.0}
    scaled = torch.ones(2, 1).expand(2, 3)
    with pytest.raises(racksum.BadArgument, match="share memory; pass x"):
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.eq(1).all(), "the refused call changed its tensor"
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 1}, "unknown option rank of a process group"),
        ({"world": 4}, "unknown option world"),
        ({"aggregators": "x"}, "unknown option aggregators"),
        ({"wire": "int4"}, "wire must be one of"),
        ({"block": 100}, "block must be a power of two"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, match):
    with pytest.raises(racksum.BadArgument, match=match):
        racksum.torch.Options(**options)
