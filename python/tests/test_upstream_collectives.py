"""Collectives on the backend behave as PyTorch's own tests expect of Gloo.

docs/c10d.md lists the behaviours. `test_backend.py` covers some of them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import racksum
from ranks import Checks, Ranks, in_group

WORLD = 3

CHECKS = Checks()
check = CHECKS.add


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def own(value: float = 0.0, **options: Any) -> Tensor:
    """Returns a tensor that depends on this rank."""
    return torch.tensor([dist.get_rank() + value + 0.0], **options)


#: Functions that start a collective, and return its work, its result and the expected element.
STRESS: dict[str, Callable[[dist.ProcessGroup, int], tuple[dist.Work, Tensor, float]]] = {}


def stress(start: Callable[..., Any]) -> Any:
    STRESS[start.__name__] = start
    return start


@stress
def all_reduce(group: dist.ProcessGroup, i: int) -> Any:
    x = own(i)
    return dist.all_reduce(x, group=group, async_op=True), x, 3 * i + 3


@stress
def broadcast(group: dist.ProcessGroup, i: int) -> Any:
    x = own(i)
    return dist.broadcast(x, i % WORLD, group=group, async_op=True), x, i + i % WORLD


@stress
def reduce(group: dist.ProcessGroup, i: int) -> Any:
    x, root = own(i), i % WORLD
    reduced = 3 * i + 3 if root == dist.get_rank() else i + dist.get_rank()
    return dist.reduce(x, root, group=group, async_op=True), x, reduced


@stress
def all_gather(group: dist.ProcessGroup, i: int) -> Any:
    parts = [torch.empty(1) for _ in range(WORLD)]
    return dist.all_gather(parts, own(i), group=group, async_op=True), parts[2], i + 2


@stress
def all_reduce_coalesced(group: dist.ProcessGroup, i: int) -> Any:
    xs = [own(i), own(2 * i)]
    options = dist.AllreduceCoalescedOptions()
    return group.allreduce_coalesced(xs, options), xs[1], 6 * i + 3


@stress
def gather(group: dist.ProcessGroup, i: int) -> Any:
    root = i % WORLD
    parts = [torch.empty(1) for _ in range(WORLD)] if root == dist.get_rank() else None
    work = dist.gather(own(i), parts, root, group=group, async_op=True)
    return work, parts[2] if parts else torch.tensor(i + 2), i + 2


@stress
def scatter(group: dist.ProcessGroup, i: int) -> Any:
    root, x = i % WORLD, torch.empty(1)
    parts = [torch.tensor([float(i + n)]) for n in range(WORLD)]
    given = parts if root == dist.get_rank() else None
    return dist.scatter(x, given, root, group=group, async_op=True), x, i + dist.get_rank()


def many_at_once(group: dist.ProcessGroup, name: str, futures: bool) -> None:
    started = [STRESS[name](group, i) for i in range(300)]
    waits = [work.get_future() if futures else work for work, _, _ in started]
    for i, (wait, (_, x, expected)) in enumerate(zip(waits, started, strict=True)):
        wait.wait()
        assert x.item() == expected, f"{name} {i}"


@pytest.mark.parametrize("futures", [False, True], ids=["works", "futures"])
@pytest.mark.parametrize("name", STRESS)
def test_hundreds_of_collectives_in_flight(ranks, shared_aggregator, name, futures):
    work = partial(many_at_once, name=name, futures=futures)
    ranks.run(in_group, work, shared_aggregator.address, "collectives")


@check
def an_empty_tensor_comes_out_of_the_future(group: dist.ProcessGroup) -> None:
    x = torch.empty(0)
    [found] = dist.broadcast(x, 0, group=group, async_op=True).get_future().wait()
    assert found.numel() == 0


@check
def futures_are_chained(group: dist.ProcessGroup) -> None:
    future = dist.all_reduce(own(), group=group, async_op=True).get_future()
    doubled = future.then(lambda future: future.value()[0] * 2).then(lambda x: x.value() + 1)
    assert doubled.wait().item() == 2 * 3 + 1


@check
def a_work_is_waited_for_within_a_limit(group: dist.ProcessGroup) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("rank 0 has waited")
    x = own()
    work = dist.all_reduce(x, group=group, async_op=True)
    if dist.get_rank() == 0:
        # Gloo raises a RuntimeError, from which WaitTimeout derives.
        with pytest.raises(racksum.WaitTimeout) as late:
            work.wait(timedelta(milliseconds=10))
        assert isinstance(late.value, racksum.WaitTimeout)
        assert isinstance(late.value, TimeoutError)
        # This collective must stay in flight, because later ones on its memory wait for it.
        assert len(group._get_backend(torch.device("cpu"))._in_flight) == 1
        store.set("rank 0 has waited", "")
    work.wait(timedelta(seconds=20))
    assert x.item() == 3


@check
def what_is_gloos_goes_on_after_a_wait_with_a_limit(group: dist.ProcessGroup) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("rank 0 has waited for Gloo")
    x = own(1)
    work = dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=group, async_op=True)
    if dist.get_rank() == 0:
        with pytest.raises(racksum.WaitTimeout):
            work.wait(timedelta(milliseconds=10))
        store.set("rank 0 has waited for Gloo", "")
    # This collective must begin after the first has ended, or it would read a partial result.
    dist.all_reduce(x, group=group)
    assert x.item() == 3 * 6


@check
def several_tensors_are_reduced_by_every_operator(group: dist.ProcessGroup) -> None:
    for op, expected in [("SUM", (3, 6)), ("PRODUCT", (0, 6)), ("MIN", (0, 1)), ("MAX", (2, 3))]:
        xs = [own(), own(1.0, dtype=torch.float64)]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        group.allreduce_coalesced(xs, options).wait()
        found = (xs[0].item(), xs[1].item())
        assert found == (expected[0], 6 if op == "SUM" else expected[1]), op


@check
def several_tensors_are_reduced_without_waiting(group: dist.ProcessGroup) -> None:
    pairs = [[own(i), own(i + 1)] for i in range(2)]
    futures = [dist.all_reduce_coalesced(xs, group=group, async_op=True) for xs in pairs]
    torch.futures.wait_all(futures)
    assert [[x.item() for x in xs] for xs in pairs] == [[3, 6], [6, 9]]
    complex_ones = [own(1j), own(2j)]
    dist.all_reduce_coalesced(complex_ones, group=group)
    assert [x.item() for x in complex_ones] == [3 + 3j, 3 + 6j]


@check
def sparse_tensors_of_several_sparse_and_dense_dimensions(group: dist.ProcessGroup) -> None:
    def of_rank(rank: int, sparse: int, dense: int) -> Tensor:
        indices = torch.zeros(sparse, rank + 1, dtype=torch.long)
        indices[0] = torch.arange(rank + 1)
        shape = (WORLD,) * sparse + (2,) * dense
        values = torch.ones(rank + 1, *(2,) * dense)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)

    for sparse, dense in [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)]:
        x = of_rank(dist.get_rank(), sparse, dense)
        dist.all_reduce(x, group=group)
        expected = sum(of_rank(rank, sparse, dense).to_dense() for rank in range(WORLD))
        torch.testing.assert_close(x.to_dense(), expected)


@check
def tensors_of_several_sizes_and_types_are_broadcast_together(group: dist.ProcessGroup) -> None:
    for root in range(WORLD):
        target = [
            torch.arange(12).to(dtype) + i
            for i, dtype in enumerate([torch.float32, torch.float64, torch.float16] * 3)
        ]
        is_root = root == dist.get_rank()
        xs = [x.clone() if is_root else torch.zeros_like(x) for x in target]
        dist._broadcast_coalesced(group, xs, 64, root)
        assert all(torch.equal(x, expected) for x, expected in zip(xs, target, strict=True))


@check
def each_rank_gets_a_part_of_another_size(group: dist.ProcessGroup) -> None:
    parts = [torch.arange(float(n)) for n in range(WORLD)]
    mine = torch.empty(dist.get_rank())
    dist.reduce_scatter(mine, parts, group=group)
    assert mine.tolist() == [WORLD * i for i in range(dist.get_rank())]


@check
def several_tensors_are_scattered_and_gathered_at_once(group: dist.ProcessGroup) -> None:
    shapes = [(5, 5), (10, 10), (3,)]
    wholes = [torch.arange(float(torch.Size(s).numel() * WORLD)).view(-1, *s[1:]) for s in shapes]
    mine = [torch.empty(shape) for shape in shapes]
    group.reduce_scatter_tensor_coalesced(mine, wholes).wait()
    for x, whole in zip(mine, wholes, strict=True):
        torch.testing.assert_close(x, whole.chunk(WORLD)[dist.get_rank()] * WORLD)
    gathered = [torch.empty_like(whole) for whole in wholes]
    group.allgather_into_tensor_coalesced(gathered, mine).wait()
    for x, whole in zip(gathered, wholes, strict=True):
        torch.testing.assert_close(x, whole * WORLD)


@check
def columns_are_gathered(group: dist.ProcessGroup) -> None:
    def column(x: Tensor) -> Tensor:
        return x.expand(2, 2).contiguous()[:, 0]

    parts = [column(torch.tensor([-1.0])) for _ in range(WORLD)]
    dist.all_gather(parts, column(own()), group=group)
    assert [part.tolist() for part in parts] == [[rank] * 2 for rank in range(WORLD)]


@check
def lists_of_tensors_are_gathered(group: dist.ProcessGroup) -> None:
    for given in (2, 0):
        parts = [[torch.empty(1) for _ in range(given)] for _ in range(WORLD)]
        if given:
            xs = [own(10 * i) for i in range(given)]
            future = dist.all_gather_coalesced(parts, xs, group=group, async_op=True)
            future.wait()
    assert parts == [[], [], []]
    parts = [[torch.empty(1), torch.empty(3)] for _ in range(WORLD)]
    dist.all_gather_coalesced(parts, [own(), own(5).expand(3).contiguous()], group=group)
    found = [[x.tolist() for x in of_rank] for of_rank in parts]
    assert found == [[[rank], [rank + 5] * 3] for rank in range(WORLD)]
    pairs = [[torch.empty(1, dtype=torch.complex64)] for _ in range(WORLD)]
    dist.all_gather_coalesced(pairs, [own(1j)], group=group)
    assert [x.item() for [x] in pairs] == [rank + 1j for rank in range(WORLD)]


@check
def tensors_of_inference_mode_and_parameters_are_written(group: dist.ProcessGroup) -> None:
    for mode in (torch.inference_mode(), nullcontext()):
        with mode:
            parts = [torch.empty(1, requires_grad=True) for _ in range(WORLD)]
            root = own().requires_grad_()
            work = dist.all_gather(parts, own(), group=group, async_op=True)
        work.get_future().wait()
        assert [part.item() for part in parts] == [0, 1, 2]
        dist.broadcast(root, 1, group=group)
        assert root.item() == 1


@check
def booleans_and_complex_numbers_are_broadcast_and_gathered(group: dist.ProcessGroup) -> None:
    bits = torch.tensor([True, False, False, True])
    x = bits.clone() if dist.get_rank() == 0 else torch.zeros(4, dtype=torch.bool)
    dist.broadcast(x, 0, group=group)
    assert torch.equal(x, bits)
    parts = [torch.empty(1, dtype=torch.complex64) for _ in range(WORLD)]
    dist.all_gather(parts, own(1j), group=group)
    assert [part.item() for part in parts] == [rank + 1j for rank in range(WORLD)]
    # Gather the numbers as pairs of real numbers.
    pairs = [torch.empty(2) for _ in range(WORLD)]
    dist.all_gather(pairs, own(1j), group=group)
    assert [part.tolist() for part in pairs] == [[rank, 1] for rank in range(WORLD)]


@check
def a_tensor_that_nobody_else_holds_is_kept(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    gc.collect()
    torch.zeros(100_000)
    [x] = work.get_future().wait()
    assert x.eq(WORLD).all()


@check
def what_has_ended_is_kept_no_longer(group: dist.ProcessGroup) -> None:
    x = torch.ones(100_000)
    kept = weakref.ref(x)
    dist.all_reduce(x, group=group, async_op=True)
    del x
    for _ in range(100):
        dist.all_reduce(own(), group=group)
    gc.collect()
    assert kept() is None


@check
def a_barrier_waits_for_what_was_started_before(group: dist.ProcessGroup) -> None:
    xs = [torch.full((100, 100), float(i)) for i in range(16)]
    for x in xs:
        dist.all_reduce(x, group=group, async_op=True)
    product = own(1)
    dist.all_reduce(product, dist.ReduceOp.PRODUCT, group=group, async_op=True)
    parts = [torch.empty(1) for _ in range(WORLD)]
    dist.all_gather(parts, own(), group=group, async_op=True)
    dist.barrier(group)
    assert product.item() == 6
    assert all(x.eq(3 * i).all() for i, x in enumerate(xs))
    assert [part.item() for part in parts] == [0, 1, 2]


@check
def a_barrier_lets_nobody_through_before_all_are_there(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        time.sleep(0.5)
        there = time.time()
    work = dist.barrier(group, async_op=True)
    work.wait()
    times = [None] * WORLD
    dist.all_gather_object(times, time.time(), group=group)
    assert dist.get_rank() != 0 or min(times) >= there


@check
def a_barrier_has_a_limit_of_its_own(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(racksum.WaitTimeout):
            dist.barrier(group, timeout=timedelta(milliseconds=1))
    dist.barrier()
    if dist.get_rank() != 0:
        dist.barrier(group)


@check
def collectives_are_counted_alike(group: dist.ProcessGroup) -> None:
    before = group._get_sequence_number_for_group()
    for _ in range(5):
        dist.all_reduce(own(), group=group)
    assert group._get_sequence_number_for_group() == before + 5
    counts: list[Any] = [None] * WORLD
    dist.all_gather_object(counts, before)
    assert len(set(counts)) == 1


@check
def the_backend_says_its_name(group: dist.ProcessGroup) -> None:
    assert dist.is_backend_available("racksum")
    assert dist.get_backend(group) == dist.Backend.RACKSUM == "racksum"
    assert group._get_backend(torch.device("cpu")).getBackendName() == "racksum"
    assert str(dist.BackendConfig("cpu:racksum,cuda:nccl")) == "cpu:racksum,cuda:nccl"


@check
def gloo_sends_and_receives(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    others = [other for other in range(WORLD) if other != rank]
    into = {other: torch.empty(1) for other in others}
    works = [dist.isend(own(10 * other), other, group, tag=other) for other in others]
    works += [dist.irecv(into[other], other, group, tag=rank) for other in others]
    for work in works:
        work.wait()
    assert {other: x.item() for other, x in into.items()} == {
        other: other + 10 * rank for other in others
    }


@check
def gloo_receives_from_anybody_and_torch_cannot_say_whom(group: dist.ProcessGroup) -> None:
    if dist.get_rank() != 0:
        dist.send(own(), 0, group)
        return
    x, y = torch.empty(1), torch.empty(1)
    dist.irecv(x, group=group).wait()
    with pytest.raises(RuntimeError, match="sourceRank"):
        dist.recv(y, group=group)
    assert x.item() + y.item() == 1 + 2


@check
def the_future_of_what_is_sent_or_received_answers(group: dist.ProcessGroup) -> None:
    """A barrier does not wait for a receive, whose tensor may be sent after the barrier."""
    right, left, x = (dist.get_rank() + 1) % WORLD, (dist.get_rank() - 1) % WORLD, torch.empty(1)
    receiving = dist.irecv(x, left, group)
    came = receiving.get_future()
    assert not came.done()
    dist.barrier(group)
    sending = dist.isend(own(), right, group)
    [got] = came.wait()
    assert got.item() == x.item() == left
    sending.get_future().wait()
    receiving.wait()
    sending.wait()


@check
def gloo_sends_and_receives_in_batches(group: dist.ProcessGroup) -> None:
    right, left, x = (dist.get_rank() + 1) % WORLD, (dist.get_rank() - 1) % WORLD, torch.empty(1)
    batch = [
        dist.P2POp(dist.isend, own(), right, group, tag=4),
        dist.P2POp(dist.irecv, x, left, group, tag=4),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert x.item() == left


@check
def gloo_exchanges_parts_of_several_sizes(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.complex64):
        sent = torch.full((1 + 2 + 3,), rank, dtype=dtype)
        got = torch.empty(WORLD * (rank + 1), dtype=dtype)
        dist.all_to_all_single(got, sent, [rank + 1] * WORLD, [1, 2, 3], group=group)
        assert got.tolist() == [of for of in range(WORLD) for _ in range(rank + 1)]
        parts = [torch.empty(2, dtype=dtype) for _ in range(WORLD)]
        dist.all_to_all(parts, list(sent.split(2)), group=group)
        assert [part[0].item() for part in parts] == [0, 1, 2]


@check
def gloo_gathers_columns_and_scatters_objects(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    parts = [torch.empty(2) for _ in range(WORLD)] if rank == 1 else None
    dist.gather(own().expand(2, 2).contiguous()[:, 0], parts, 1, group=group)
    assert parts is None or [part.tolist() for part in parts] == [[0, 0], [1, 1], [2, 2]]
    objects: list[Any] | None = [None] * WORLD if rank == 0 else None
    dist.gather_object({"rank": rank}, objects, 0, group=group)
    assert objects is None or [thing["rank"] for thing in objects] == [0, 1, 2]
    z = torch.empty(1, dtype=torch.complex64)
    of_ranks = [torch.tensor([i * 1j]) for i in range(WORLD)] if rank == 1 else None
    dist.scatter(z, of_ranks, 1, group=group)
    assert z.item() == rank * 1j
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "bb", "ccc"] if rank == 2 else None, 2, group=group)
    assert len(mine[0]) == rank + 1


@check
def gloo_watches_a_barrier_and_names_who_is_not_there(group: dist.ProcessGroup) -> None:
    dist.monitored_barrier(group, timedelta(seconds=20))
    if dist.get_rank() != 2:
        # Only rank 0's error names rank 2. Rank 1 just gets no answer.
        match = "Rank 2|Rank 0" if dist.get_rank() == 0 else None
        with pytest.raises(RuntimeError, match=match):
            dist.monitored_barrier(group, timedelta(milliseconds=500))
    dist.barrier()


@pytest.mark.parametrize("behaviour", CHECKS, ids=lambda check: check.__name__)
def test_a_behaviour_of_gloo(ranks, shared_aggregator, behaviour):
    ranks.run(in_group, behaviour, shared_aggregator.address, "collectives")
