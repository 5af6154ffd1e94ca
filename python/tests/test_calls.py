"""Calls that a rank refuses, that differ between ranks, or that share memory; see docs/c10d.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import racksum
import racksum.torch
from conftest import Cluster
from racksum.call import PartOf
from ranks import Ranks, backend_options, group_on_backend, in_group

WORLD = 2

Group = dist.ProcessGroup
OP = dist.ReduceOp


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def job(shared_aggregator: Any) -> tuple[str, str]:
    return shared_aggregator.address, Cluster.new_job()


def overlapping() -> Tensor:
    """Returns a tensor in which several elements share one place."""
    return torch.ones(4, 1).expand(4, 3)


def reduce_scatter_wrongly(x: Tensor, group: Group) -> None:
    dist.reduce_scatter_tensor(torch.ones(5), x, group=group)


def several_reduced(*tensors: Tensor, group: Group) -> Any:
    """Calls one all_reduce with several tensors. `torch.distributed` has no function for this."""
    return group.allreduce(list(tensors), c10d.AllreduceOptions())


#: Calls that a rank refuses. The other ranks make the calls of the same names in `MADE`.
REFUSED: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(overlapping(), group=group),
    "all_reduce_of_int16": lambda group: dist.all_reduce(
        torch.ones(12, dtype=torch.int16), group=group
    ),
    "all_reduce_of_integers_with_a_factor": lambda group: dist.all_reduce(
        torch.ones(12, dtype=torch.int32), dist._make_nccl_premul_sum(2), group=group
    ),
    "all_reduce_of_sparse_booleans": lambda group: dist.all_reduce(
        torch.ones(12).to(torch.bool).to_sparse(), group=group
    ),
    "all_reduce_of_a_sparse_tensor_too_large": lambda group: dist.all_reduce(
        torch.sparse_coo_tensor(size=(2**40, 2**20), check_invariants=True), group=group
    ),
    "reduce": lambda group: dist.reduce(overlapping(), group_dst=0, group=group),
    "broadcast": lambda group: dist.broadcast(overlapping(), group_src=0, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(12)], torch.ones(12), group=group),
    "reduce_scatter": lambda group: reduce_scatter_wrongly(torch.ones(12), group),
    "all_gather_to_overlapping": lambda group: dist.all_gather(
        [torch.ones(4, 3), overlapping()], torch.ones(4, 3), group=group
    ),
    "reduce_scatter_to_overlapping": lambda group: dist.reduce_scatter_tensor(
        overlapping(), torch.ones(8, 3), group=group
    ),
    "reduce_scatter_of_several_to_overlapping": lambda group: dist.reduce_scatter(
        overlapping(), [torch.ones(4, 3), torch.ones(4, 3)], group=group
    ),
    "coalesced": lambda group: dist.all_reduce_coalesced(
        [torch.ones(12), overlapping(), torch.ones(12)], group=group
    ),
    "several": lambda group: several_reduced(torch.ones(12), overlapping(), group=group),
}

#: Calls with valid tensors, which match the refused calls.
MADE: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(4, 3), group=group),
    "all_reduce_of_int16": lambda group: dist.all_reduce(torch.ones(12), group=group),
    "all_reduce_of_integers_with_a_factor": lambda group: dist.all_reduce(
        torch.ones(12, dtype=torch.int32), group=group
    ),
    "all_reduce_of_sparse_booleans": lambda group: dist.all_reduce(
        torch.ones(12).to_sparse(), group=group
    ),
    "all_reduce_of_a_sparse_tensor_too_large": lambda group: dist.all_reduce(
        torch.ones(12).to_sparse(), group=group
    ),
    "reduce": lambda group: dist.reduce(torch.ones(4, 3), group_dst=0, group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(4, 3), group_src=0, group=group),
    "all_gather": lambda group: dist.all_gather(
        [torch.ones(12), torch.ones(12)], torch.ones(12), group=group
    ),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(
        torch.ones(6), torch.ones(12), group=group
    ),
    "all_gather_to_overlapping": lambda group: dist.all_gather(
        [torch.ones(4, 3), torch.ones(4, 3)], torch.ones(4, 3), group=group
    ),
    "reduce_scatter_to_overlapping": lambda group: dist.reduce_scatter_tensor(
        torch.ones(4, 3), torch.ones(8, 3), group=group
    ),
    "reduce_scatter_of_several_to_overlapping": lambda group: dist.reduce_scatter(
        torch.ones(4, 3), [torch.ones(4, 3), torch.ones(4, 3)], group=group
    ),
    "coalesced": lambda group: dist.all_reduce_coalesced(
        [torch.ones(12), torch.ones(4, 3), torch.ones(12)], group=group
    ),
    "several": lambda group: several_reduced(
        torch.ones(4, 3), torch.ones(4, 3), group=group
    ).wait(),
}


def refused_at_first(name: str, group: Group) -> None:
    if group.rank() == 0:
        with pytest.raises(racksum.BadArgument):
            REFUSED[name](group)
    else:
        with pytest.raises(racksum.Mismatch, match="rank 0 has a call that it rejected"):
            MADE[name](group)


def refused_at_all(name: str, group: Group) -> None:
    with pytest.raises(racksum.BadArgument):
        REFUSED[name](group)


@pytest.mark.parametrize("where", [refused_at_first, refused_at_all])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rank_refuses_pairs_with_no_other_call(
    ranks: Ranks, job: tuple[str, str], name: str, where: Callable[..., None]
) -> None:
    ranks.run(refuse, where, name, *job)


def refuse(where: Callable[..., None], name: str, address: str, job: str) -> None:
    in_group(lambda group: where(name, group), address, job)


def test_what_is_refused_before_a_rank_has_joined_pairs_with_no_other(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(refuse, refused_at_first, "all_reduce", cluster.address, cluster.new_job())


def test_groups_may_be_used_first_in_any_order(ranks: Ranks, cluster: Cluster) -> None:
    ranks.run(use_first_in_turn, cluster.address, cluster.new_job())


def use_first_in_turn(address: str, job: str) -> None:
    groups = [group_on_backend(address, f"{job}-{of}") for of in "ab"]
    tensors = [torch.ones(3) for _ in groups]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    works = [dist.all_reduce(tensors[at], group=groups[at], async_op=True) for at in order]
    # This refused call takes its turn after the earlier call, for which the rank has yet to join.
    with pytest.raises(racksum.BadArgument):
        REFUSED["all_reduce"](groups[0])
    dist.barrier(groups[1])
    for work in works:
        work.wait()
    assert [x.tolist() for x in tensors] == [[WORLD] * 3] * 2
    for group in groups:
        MADE["all_gather"](group)


def test_what_a_lost_rank_alone_has_is_an_error_and_not_zeros(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(go_on_without_a_rank, cluster.address, cluster.new_job())


def go_on_without_a_rank(address: str, job: str) -> None:
    options = backend_options(address, job, on_rank_loss="continue")
    group = dist.new_group(backend="racksum", pg_options=options)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [WORLD] * 3
    if dist.get_rank() == 0:
        dist.all_reduce(x, group=group)
        assert x.tolist() == [WORLD] * 3, "the sum is not that of rank 0 alone"
        for call in (
            lambda: dist.broadcast(x, group_src=1, group=group),
            lambda: dist.all_gather([torch.ones(3), torch.ones(3)], x, group=group),
            lambda: dist.all_gather_into_tensor(torch.ones(6), x, group=group),
        ):
            with pytest.raises(racksum.PeerLost, match="lost rank 1: no other rank has") as lost:
                call()
            assert lost.value.ranks == (1,)
        own = torch.ones(3)
        dist.broadcast(own, group_src=0, group=group)
        assert own.tolist() == [1.0] * 3
    dist.destroy_process_group(group)


def test_threads_may_call_a_group_at_once(ranks: Ranks, cluster: Cluster) -> None:
    ranks.run(call_from_threads, cluster.address, cluster.new_job())


def call_from_threads(address: str, job: str) -> None:
    group = group_on_backend(address, job)

    def call(_: int) -> list[float]:
        x = torch.ones(100)
        # All threads make the same call, so any of their calls may pair.
        for _ in range(100):
            dist.all_reduce(x, OP.AVG, group=group)
        return x.unique().tolist()

    with ThreadPoolExecutor(4) as threads:
        for ends in threads.map(call, range(4)):
            assert ends == [1.0]


@pytest.mark.parametrize("joins_first", [True, False])
def test_what_a_rank_has_called_ends_before_its_group_is_destroyed(
    ranks: Ranks, cluster: Cluster, joins_first: bool
) -> None:
    ranks.run(destroy_after_calls, cluster.address, cluster.new_job(), joins_first)


def destroy_after_calls(address: str, job: str, joins_first: bool) -> None:
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    if joins_first:
        dist.barrier(group)
    tensors = [torch.ones(500_000) for _ in range(10)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
    if dist.get_rank() == 0:
        for work in works:
            work.wait()
    dist.destroy_process_group(group)
    for x in tensors:
        assert x.eq(dist.get_world_size()).all()


@pytest.mark.parametrize("caller", [0, 1])
def test_a_group_may_be_destroyed_before_its_ranks_have_joined(
    ranks: Ranks, cluster: Cluster, caller: int
) -> None:
    ranks.run(destroy_before_joining, cluster.address, cluster.new_job(), caller)


def destroy_before_joining(address: str, job: str, caller: int) -> None:
    """Checks that the call of one rank ends with an error that names the other rank."""
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    other = 1 - caller
    if dist.get_rank() == caller:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        backend = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        assert not backend._membership.has_joined
        with pytest.raises(racksum.PeerLost, match=f"rank {other} left .* before joining") as error:
            work.wait()
        assert error.value.ranks == (other,)
    elif dist.get_rank() == other:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "differs",
    [
        {"part_of": [PartOf("broadcast", 0, 3), PartOf("all_reduce", 0, 3)]},
        {"part_of": [PartOf("broadcast", 0, 3), PartOf("broadcast", 1, 3)]},
        {"part_of": [PartOf("all_reduce", 0, 3), PartOf("all_reduce", 0, 4)]},
        {"wire": ["f32", "no such type"]},
        {"block": [256, 33]},
        {"tag": ["one", "other"]},
        {"lane": [0, 1]},
    ],
)
def test_calls_that_differ_in_anything_are_a_mismatch_and_never_a_sum(
    place: Cluster, differs: dict[str, list[Any]]
) -> None:
    def work(session: racksum.Session) -> list[float]:
        named = {name: values[session.rank] for name, values in differs.items()}
        with pytest.raises((racksum.Mismatch, racksum.BadArgument)) as error:
            session.allreduce(torch.ones(8), **named)
        if session.rank == 0:
            assert error.type is racksum.Mismatch
        return list(session.allreduce(torch.ones(8) + session.rank))

    assert place.run(2, work) == [[3.0] * 8] * 2


#: Collectives in flight, and a function that returns their result.
InFlight = tuple[list[Any], Callable[[], Tensor]]


def all_reduced(group: Group, *tensors: Tensor) -> list[Any]:
    return [dist.all_reduce(x, group=group, async_op=True) for x in tensors]


def twice(group: Group) -> InFlight:
    t = torch.ones(5000)
    return all_reduced(group, t, t, t), lambda: t / 8


def views(group: Group) -> InFlight:
    t = torch.ones(9000)
    expected = torch.tensor([2.0, 4.0, 8.0]).repeat_interleave(3000)
    return all_reduced(group, t, t[3000:], t[6000:]), lambda: t / expected


def columns(group: Group) -> InFlight:
    t = torch.ones(60, 50).t()
    expected = torch.tensor([8.0, 4.0]).repeat(25).view(50, 1)
    return all_reduced(group, t, t[::2], t), lambda: t / expected


def several_collectives(group: Group) -> InFlight:
    t, parts = torch.ones(3000) + group.rank(), torch.zeros(2, 3000)
    scattered, options = torch.zeros(1500), {"group": group, "async_op": True}
    works = [
        dist.all_reduce(t, **options),  # 3
        dist.broadcast(t, group_src=1, **options),
        dist.all_gather_into_tensor(parts.view(-1), t, **options),  # 3 and 3
        dist.all_reduce(t, OP.PRODUCT, **options),  # 9, by Gloo
        dist.reduce_scatter_tensor(scattered, t, **options),  # 18
        dist.all_reduce(t, OP.AVG, **options),  # 9
        dist.all_reduce(torch.ones(3), **options),
        dist.all_reduce(parts, **options),  # 6 and 6
    ]
    return works, lambda: torch.cat([t / 9, parts.view(-1) / 6, scattered / 18])


def sparse(group: Group) -> InFlight:
    t = torch.sparse_coo_tensor([[0, 7]], torch.ones(2, 64), (9, 64), check_invariants=True)
    return all_reduced(group, t, t), lambda: t.to_dense()[[0, 7]] / 4


def together(group: Group) -> InFlight:
    t, u = torch.ones(3000), torch.ones(3000)
    works = [
        *all_reduced(group, t),  # 2
        several_reduced(t, u, group=group),  # 6 and 6
        *all_reduced(group, u),  # 12
    ]
    return works, lambda: torch.cat([t / 6, u / 12])


@pytest.mark.parametrize("chain", [twice, views, columns, several_collectives, sparse, together])
def test_collectives_on_the_same_memory_take_turns(
    ranks: Ranks, job: tuple[str, str], chain: Callable[[Group], InFlight]
) -> None:
    for late in range(WORLD):
        for x in ranks.run(chained, chain, late, *job):
            torch.testing.assert_close(x, torch.ones_like(x))


_rounds = count()


def chained(chain: Callable[[Group], InFlight], late: int, address: str, job: str) -> Tensor:
    """Returns the result of a chain that one rank calls as a whole before the other begins."""
    group, key = group_on_backend(address, job), f"called-{next(_rounds)}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == late:
        store.wait([key])
    works, result = chain(group)
    # The calls returned without waiting for the other rank.
    store.set(key, "1")
    for work in works:
        work.wait()
    return result()


def of_one_tensor_twice(group: Group | None) -> list[Tensor]:
    t, u = torch.arange(6.0), torch.arange(6.0)
    dist.all_reduce_coalesced([t, t], group=group)
    dist.all_reduce_coalesced([u[:4], u[2:]], group=group)
    return [t, u]


#: Tensors with the layouts that `memory_format` and views produce.
SHAPED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "channels_last": lambda: (
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "columns": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    "complex": lambda: torch.arange(12.0).to(torch.complex64).view(3, 4).t(),
}


def reduced(group: Group | None, shaped: str) -> list[Tensor]:
    made = []
    for call in (
        lambda x: dist.all_reduce(x, group=group),
        lambda x: dist.all_reduce_coalesced([x], group=group),
        lambda x: dist.broadcast(x, group_src=1, group=group),
        lambda x: dist.reduce(x, group_dst=1, group=group),
    ):
        x = SHAPED[shaped]() + dist.get_rank()
        before = x.stride()
        call(x)
        assert x.stride() == before
        made.append(x)
    # Gloo's `reduce` leaves intermediate results at other ranks, so return only the root's.
    return made[: 3 + dist.get_rank()]


def both(call: Callable[..., Any], address: str, job: str, *arguments: Any) -> tuple[Any, Any]:
    """Returns the results of a call on the backend and with Gloo."""
    return call(group_on_backend(address, job), *arguments), call(None, *arguments)


def test_tensors_that_share_memory_are_reduced_together_as_with_gloo(
    ranks: Ranks, job: tuple[str, str]
) -> None:
    for ours, gloos in ranks.run(both, of_one_tensor_twice, *job):
        torch.testing.assert_close(ours, gloos)


def of_columns(group: Group) -> None:
    """Checks tensors with gaps. Gloo would write into the gaps, and reduce their contents."""
    session = group._get_backend(torch.device("cpu")).session
    before = session.stats()["copied_bytes"]
    whole = torch.ones(4, 6)
    x = whole[:, ::2]
    dist.all_reduce(x, group=group)
    assert torch.equal(whole, torch.tensor([2.0, 1.0]).repeat(3).expand(4, 6))
    assert session.stats()["copied_bytes"] == before + 2 * x.nbytes


def test_a_tensor_with_gaps_is_reduced_through_a_copy_that_is_counted(
    ranks: Ranks, job: tuple[str, str]
) -> None:
    ranks.run(in_group, of_columns, *job)


#: Non-contiguous tensors with a row for each rank.
ROWS: dict[str, Callable[[], Tensor]] = {
    "columns": lambda: torch.full((WORLD, 8), -1.0)[:, ::2],
    "transposed": lambda: torch.full((4, WORLD), -1.0).t(),
}


def into_rows(shaped: str, address: str, job: str) -> None:
    group = group_on_backend(address, job)
    dist.barrier(group)
    session = group._get_backend(torch.device("cpu")).session
    before = session.stats()["copied_bytes"]
    x, own = ROWS[shaped](), torch.arange(4.0) + group.rank()
    dist.all_gather_into_tensor(x, own, group=group)
    assert torch.equal(x, torch.stack([torch.arange(4.0) + rank for rank in range(WORLD)]))
    assert session.stats()["copied_bytes"] == before + 2 * x.nbytes
    if shaped == "columns":
        assert torch.equal(x._base[:, 1::2], torch.full((WORLD, 4), -1.0))
    row = torch.full((8,), -1.0)[::2]
    dist.reduce_scatter_tensor(row, x, group=group)
    assert torch.equal(row, WORLD * (torch.arange(4.0) + group.rank()))


@pytest.mark.parametrize("shaped", ROWS)
def test_tensors_that_are_not_contiguous_are_gathered_into_and_scattered(
    ranks: Ranks, job: tuple[str, str], shaped: str
) -> None:
    ranks.run(into_rows, shaped, *job)


@pytest.mark.parametrize("shaped", ["transposed", "channels_last", "complex"])
def test_dense_tensors_that_are_not_contiguous_are_reduced_as_with_gloo(
    ranks: Ranks, job: tuple[str, str], shaped: str
) -> None:
    for ours, gloos in ranks.run(both, reduced, *job, shaped):
        torch.testing.assert_close(ours, gloos)


def numbers(how_many: int = 4) -> Tensor:
    return torch.arange(float(how_many))


def versions(group: Group | None, name: str) -> list[int]:
    """Returns how often autograd counts a write to each tensor of a collective."""
    tensors, before = [], []

    def given(*made: Tensor) -> tuple[Tensor, ...]:
        tensors.extend(made)
        before.extend(x._version for x in made)
        return made

    CALLS[name](group, given)
    return [x._version - was for x, was in zip(tensors, before, strict=True)]


def by(op: Any, make: Callable[[], Tensor] = numbers) -> Callable[..., Any]:
    return lambda group, given: dist.all_reduce(*given(make()), op, group=group)


def lists(how_many: int) -> list[Tensor]:
    return [numbers() for _ in range(how_many)]


def to_root(group: Group | None, given: Any, call: Callable[..., Any]) -> Any:
    x, *parts = given(*lists(3))
    return call(x, parts if dist.get_rank() == 0 else None, group=group)


def gathered(group: Group | None, given: Any) -> None:
    x, *parts = given(*lists(3))
    dist.all_gather(parts, x, group=group)


def scattered(op: Any) -> Callable[..., Any]:
    def call(group: Group | None, given: Any) -> None:
        x, *parts = given(*lists(3))
        dist.reduce_scatter(x, parts, op, group=group)

    return call


def reduced_together(op: Any) -> Callable[..., Any]:
    def call(group: Group | None, given: Any) -> None:
        opts = c10d.AllreduceOptions()
        opts.reduceOp = op
        tensors = list(given(*lists(3)))
        (group or dist.group.WORLD).allreduce(tensors, opts).wait()

    return call


def broadcast_together(group: Group | None, given: Any) -> None:
    opts = c10d.BroadcastOptions()
    opts.rootRank, opts.rootTensor = 0, 1
    (group or dist.group.WORLD).broadcast(list(given(*lists(3))), opts).wait()


def gathered_together(group: Group | None, given: Any) -> None:
    first, second, *parts = given(*lists(2 + 4 * WORLD))
    outputs = [parts[: 2 * WORLD], parts[2 * WORLD :]]
    opts = c10d.AllgatherOptions()
    (group or dist.group.WORLD).allgather(outputs, [first, second], opts).wait()


def exchanged(group: Group | None, given: Any) -> None:
    tensors = given(*lists(4))
    dist.all_to_all(list(tensors[:2]), list(tensors[2:]), group=group)


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": by(OP.SUM),
    "all_reduce_avg": by(OP.AVG),
    "all_reduce_max": by(OP.MAX),
    "all_reduce_product": by(OP.PRODUCT),
    "all_reduce_of_integers": by(OP.SUM, lambda: numbers().to(torch.int64)),
    "all_reduce_of_bytes": by(OP.SUM, lambda: numbers().to(torch.uint8)),
    "all_reduce_of_booleans": by(OP.MAX, lambda: numbers().to(torch.bool)),
    "all_reduce_of_complex": by(OP.SUM, lambda: numbers().to(torch.complex64)),
    "all_reduce_transposed": by(OP.SUM, lambda: numbers(12).view(3, 4).t()),
    "all_reduce_sparse": by(OP.SUM, lambda: numbers().to_sparse()),
    "all_reduce_of_several": reduced_together(OP.SUM),
    "all_reduce_of_several_avg": reduced_together(OP.AVG),
    "all_reduce_async": lambda group, given: dist.all_reduce(
        *given(numbers()), group=group, async_op=True
    ).wait(),
    "all_reduce_coalesced": lambda group, given: dist.all_reduce_coalesced(
        list(given(numbers(), numbers(5))), group=group
    ),
    "reduce": lambda group, given: dist.reduce(*given(numbers()), group_dst=0, group=group),
    "reduce_avg": lambda group, given: dist.reduce(
        *given(numbers()), group_dst=0, op=OP.AVG, group=group
    ),
    "broadcast": lambda group, given: dist.broadcast(*given(numbers()), group_src=0, group=group),
    "broadcast_of_an_odd_size": lambda group, given: dist.broadcast(
        *given(numbers(3).to(torch.uint8)), group_src=0, group=group
    ),
    "broadcast_transposed": lambda group, given: dist.broadcast(
        *given(numbers(12).view(3, 4).t()), group_src=0, group=group
    ),
    "broadcast_of_several": broadcast_together,
    "all_gather": gathered,
    "all_gather_of_several": gathered_together,
    "all_gather_into_tensor": lambda group, given: dist.all_gather_into_tensor(
        *given(numbers(8), numbers()), group=group
    ),
    "reduce_scatter": scattered(OP.SUM),
    "reduce_scatter_avg": scattered(OP.AVG),
    "reduce_scatter_tensor": lambda group, given: dist.reduce_scatter_tensor(
        *given(numbers(), numbers(8)), group=group
    ),
    "gather": lambda group, given: to_root(
        group, given, lambda x, parts, group: dist.gather(x, parts, group_dst=0, group=group)
    ),
    "scatter": lambda group, given: to_root(
        group, given, lambda x, parts, group: dist.scatter(x, parts, group_src=0, group=group)
    ),
    "all_to_all": exchanged,
    "all_to_all_single": lambda group, given: dist.all_to_all_single(
        *given(numbers(), numbers()), group=group
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_autograd_counts_writes_as_it_does_with_gloo(
    ranks: Ranks, job: tuple[str, str], name: str
) -> None:
    for ours, gloos in ranks.run(both, versions, *job, name):
        assert ours == gloos


def backward_through_a_broadcast(group: Group) -> None:
    """Broadcasts a tensor that was saved for backward, as tensor parallelism does."""
    weight = torch.ones(4, requires_grad=True)
    x = torch.ones(4)
    product = weight * x
    dist.broadcast(x, group_src=0, group=group)
    product.sum().backward()


def test_what_is_broadcast_may_have_been_saved_for_backward(
    ranks: Ranks, job: tuple[str, str]
) -> None:
    ranks.run(in_group, backward_through_a_broadcast, *job)
