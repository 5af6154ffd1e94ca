"""Calls that Gloo refuses in PyTorch's own tests, and calls that only the backend refuses.

docs/c10d.md lists them. Each raises an error of one sentence at every rank, and the group remains
usable.
"""

from __future__ import annotations

import os
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
from ranks import Ranks, backend_options, in_group

WORLD = 2

Group = dist.ProcessGroup

OPTIONS = {
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
    "allreduce": c10d.AllreduceOptions,
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    "allgather": c10d.AllgatherOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "scatter": c10d.ScatterOptions,
    "gather": c10d.GatherOptions,
}

ONE, TWO, INT = torch.ones(1), torch.ones(2), torch.ones(1, dtype=torch.int32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def reduce_by(name: str) -> Callable[[Group, Tensor], Any]:
    return lambda group, x: dist.all_reduce(x, getattr(dist.ReduceOp, name), group=group)


def on(collective: str, *tensors: Any, **options: Any) -> Callable[[Group], Any]:
    """Returns a call of the group's own method, which torch does not check first."""

    def call(group: Group) -> None:
        opts = OPTIONS[collective]()
        for name, value in options.items():
            setattr(opts, name, value)
        getattr(group, collective)(*tensors, opts).wait()

    return call


def entry(shape: tuple[int, ...], sparse_dim: int) -> Tensor:
    """Returns a sparse tensor with one entry."""
    indices = torch.zeros(sparse_dim, 1, dtype=torch.long)
    values = torch.ones(1, *shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def by_rank(group: Group, *xs: Tensor) -> None:
    dist.all_reduce(xs[dist.get_rank()], group=group)


BAD, MISMATCH = racksum.BadArgument, racksum.Mismatch

#: By name: a refused call, the type of the error, and a part of its text.
REFUSALS: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "broadcast_from_no_rank": (on("broadcast", [ONE], rootRank=-1), BAD, "0 to 1, not -1"),
    "broadcast_from_beyond": (on("broadcast", [ONE], rootRank=2), BAD, "0 to 1, not 2"),
    "broadcast_of_tensors_that_differ": (
        on("broadcast", [ONE, TWO]),
        BAD,
        r"must have the same shape, dtype and layout, not \(1,\) x torch\.float32, .*; \(2,\) x",
    ),
    "broadcast_of_a_tensor_beyond": (
        on("broadcast", [ONE], rootTensor=1),
        BAD,
        "0 to 0, not 1",
    ),
    "reduce_of_a_tensor_beyond": (on("reduce", [ONE], rootTensor=-1), BAD, "0 to 0, not -1"),
    "broadcast_of_an_expanded_tensor": (
        lambda group: dist.broadcast(torch.ones(3, 1).expand(3, 2), 0, group=group),
        BAD,
        "share memory; pass x",
    ),
    "reduce_to_no_rank": (on("reduce", [ONE], rootRank=-1), BAD, "0 to 1, not -1"),
    "reduce_to_beyond": (on("reduce", [ONE], rootRank=2), BAD, "0 to 1, not 2"),
    "reduce_of_two_tensors": (on("reduce", [ONE, ONE]), BAD, "pass one tensor at a time, not 2"),
    "all_reduce_of_no_tensor": (on("allreduce", []), RuntimeError, "non-empty list of Tensors"),
    "all_reduce_of_tensors_that_differ": (
        on("allreduce", [ONE, ONE.double()]),
        BAD,
        r"must have the same shape, dtype and layout, not .*float32, .*float64",
    ),
    "several_tensors_of_which_there_is_none": (
        on("allreduce_coalesced", []),
        RuntimeError,
        "non-empty list of Tensors",
    ),
    "several_tensors_of_which_one_is_sparse": (
        on("allreduce_coalesced", [ONE.clone(), entry((4,), 1)]),
        RuntimeError,
        "Could not run .*allreduce_coalesced_",
    ),
    "all_reduce_of_an_expanded_tensor": (
        lambda group: dist.all_reduce(torch.ones(3, 1).expand(3, 2), group=group),
        BAD,
        r"pass x\.contiguous\(\)",
    ),
    "the_average_of_bytes": (
        lambda group: reduce_by("AVG")(group, INT.to(torch.uint8)),
        BAD,
        r"AVG is not defined for torch\.uint8",
    ),
    "sums_of_int16": (
        lambda group: reduce_by("SUM")(group, INT.to(torch.int16)),
        BAD,
        r"SUM is not defined for torch\.int16",
    ),
    "sums_of_integers_with_a_factor": (
        lambda group: dist.all_reduce(INT.clone(), dist._make_nccl_premul_sum(2), group=group),
        BAD,
        r"torch\.int32 cannot hold its products with the factor 2\.0; convert",
    ),
    "sums_of_booleans_with_a_factor": (
        lambda group: dist.all_reduce(
            INT.to(torch.bool), dist._make_nccl_premul_sum(0.5), group=group
        ),
        BAD,
        r"torch\.bool cannot hold its products",
    ),
    "the_maximum_of_complex_numbers": (
        lambda group: reduce_by("MAX")(group, ONE.to(torch.complex64)),
        ValueError,
        "does not support .*MAX on complex tensors",
    ),
    "sparse_by_an_operator": (
        lambda group: reduce_by("MIN")(group, entry((4,), 1)),
        BAD,
        "sparse tensors cannot be reduced by MIN; sum or average them",
    ),
    "sparse_booleans": (
        lambda group: dist.all_reduce(entry((4,), 1).to(torch.bool), group=group),
        BAD,
        r"sparse tensors of torch\.bool cannot be reduced; pass x\.to\(torch\.uint8\)",
    ),
    "sparse_of_too_many_places": (
        lambda group: dist.all_reduce(entry((2**40, 2**20), 2), group=group),
        BAD,
        r"\(1099511627776, 1048576\) has 1152921504606846976 places .* limit of 68719476736",
    ),
    "sparse_and_dense": (
        lambda group: by_rank(group, torch.ones(4, 8), entry((4, 8), 1)),
        MISMATCH,
        "the ranks disagree",
    ),
    "sparse_of_several_shapes": (
        lambda group: by_rank(group, entry((8, 4), 2), entry((4, 8), 2)),
        MISMATCH,
        "the ranks disagree",
    ),
    "sparse_of_several_sparse_dimensions": (
        lambda group: by_rank(group, entry((4, 8), 1), entry((4, 8), 2)),
        MISMATCH,
        "the ranks disagree",
    ),
    "dense_of_several_shapes": (
        lambda group: by_rank(group, torch.ones(4, 8), torch.ones(8, 4)),
        MISMATCH,
        r"rank \d has .*; rank \d has ",
    ),
    "dense_of_several_types": (
        lambda group: by_rank(group, ONE.clone(), ONE.double()),
        MISMATCH,
        "f32.*f64|f64.*f32",
    ),
    "all_gather_into_too_few": (
        on("allgather", [[ONE.clone()]], [ONE]),
        BAD,
        "each of the 2 ranks, not 1",
    ),
    "all_gather_into_too_many": (
        on("allgather", [[ONE.clone()] * 3], [ONE]),
        BAD,
        "each of the 2 ranks, not 3",
    ),
    "all_gather_into_another_type": (
        on("allgather", [[ONE, INT]], [ONE]),
        BAD,
        r"1 x torch\.float32, not of 1 x torch\.int32",
    ),
    "all_gather_into_another_size": (
        on("allgather", [[ONE, TWO]], [ONE]),
        BAD,
        r"1 x torch\.float32, not of 2 x torch\.float32",
    ),
    "all_gather_of_several_sizes": (
        lambda group: dist.all_gather_into_tensor(
            torch.empty(2 * (1 + dist.get_rank())),
            torch.ones(1 + dist.get_rank()),
            group=group,
        ),
        MISMATCH,
        "the ranks disagree",
    ),
    "all_gather_into_a_tensor_of_another_size": (
        lambda group: dist.all_gather_into_tensor(torch.empty(5), TWO, group=group),
        BAD,
        r"4 x torch\.float32, not of 5 x torch\.float32",
    ),
    "all_gather_of_lists_that_differ": (
        lambda group: dist.all_gather_coalesced([[ONE.clone()]] * 3, [ONE], group=group),
        BAD,
        "each of the 2 ranks, not 3",
    ),
    "tensors_of_several_types_in_a_list": (
        lambda group: dist.all_gather([ONE, INT], ONE, group=group),
        ValueError,
        "tensors with different dtypes",
    ),
    "reduce_scatter_of_too_many": (
        on("reduce_scatter", [ONE.clone()], [[ONE] * 3]),
        BAD,
        "each of the 2 ranks, not 3",
    ),
    "reduce_scatter_into_another_size": (
        on("reduce_scatter", [TWO.clone()], [[ONE, ONE]]),
        BAD,
        r"1 x torch\.float32, not of 2 x torch\.float32",
    ),
    "reduce_scatter_of_a_tensor_of_another_size": (
        lambda group: dist.reduce_scatter_tensor(ONE.clone(), torch.ones(5), group=group),
        BAD,
        r"2 x torch\.float32, not of 5 x torch\.float32",
    ),
    "scatter_from_no_rank": (
        on("scatter", [ONE], [], rootRank=2),
        RuntimeError,
        "ProcessGroupGloo.*invalid root rank",
    ),
    "gather_to_no_rank": (
        on("gather", [], [ONE], rootRank=2),
        RuntimeError,
        "ProcessGroupGloo.*invalid root rank",
    ),
    "send_to_oneself": (
        lambda group: dist.send(ONE, dist.get_rank(), group=group),
        ValueError,
        "Invalid destination rank",
    ),
}


def refused(group: Group, name: str) -> None:
    call, error, sentence = REFUSALS[name]
    with pytest.raises(error, match=sentence) as raised:
        call(group)
    if error in (BAD, MISMATCH):
        assert isinstance(raised.value, ValueError)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_and_the_group_goes_on(ranks, shared_aggregator, name):
    ranks.run(in_group, partial(refused, name=name), shared_aggregator.address, "refusals")


def a_rank_that_is_missing(address: str) -> list[Any]:
    """Returns the ranks that a barrier names as missing."""
    limit = timedelta(seconds=1)
    options = racksum.torch.Options(aggregator=address, job="missing")
    group = dist.new_group(backend="racksum", timeout=timedelta(seconds=60), pg_options=options)
    dist.distributed_c10d.set_timeout(limit, group)
    dist.barrier(group)
    with pytest.warns(UserWarning, match="this rank has joined"):
        dist.distributed_c10d.set_timeout(timedelta(seconds=50), group)
    missing: list[Any] = []
    if dist.get_rank() == 0:
        with pytest.raises(racksum.OpTimeout, match="waiting for rank 1") as late:
            dist.barrier(group)
        missing = [late.value.missing]
        with pytest.raises(racksum.Error):
            dist.barrier(group)
    dist.barrier()
    dist.destroy_process_group(group)
    return missing


def test_a_barrier_names_who_is_missing_after_the_groups_timeout(ranks, shared_aggregator):
    assert ranks.run(a_rank_that_is_missing, shared_aggregator.address) == [[(1,)], []]


def after_the_end(address: str) -> None:
    """Checks the errors of calls in a forked process, and in a group that the rank has left."""
    options = backend_options(address, "ended")
    group = dist.new_group(backend="racksum", pg_options=options)
    dist.all_reduce(ONE.clone(), group=group)
    child = os.fork()
    if child == 0:
        # The child must never run the rest of the tests.
        try:
            for call in (
                lambda: dist.all_reduce(ONE.clone(), group=group),
                lambda: dist.all_reduce(ONE.clone(), dist.ReduceOp.PRODUCT, group=group),
                lambda: dist.send(ONE, group_dst=1 - dist.get_rank(group), group=group),
                lambda: dist.monitored_barrier(group),
                lambda: dist.destroy_process_group(group),
            ):
                with pytest.raises(racksum.SessionClosed, match="was forked"):
                    call()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    x = ONE.clone()
    dist.all_reduce(x, group=group)
    assert x.item() == WORLD
    group._get_backend(torch.device("cpu")).abort()
    with pytest.raises(racksum.SessionClosed, match="was destroyed or aborted"):
        dist.all_reduce(ONE.clone(), group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)


def test_what_comes_after_the_end_is_refused(ranks, shared_aggregator):
    ranks.run(after_the_end, shared_aggregator.address)


def options_that_cannot_be(address: str) -> None:
    with pytest.raises(racksum.BadArgument, match=r"wire must be one of .* not 'f8'"):
        backend_options(address, "fixed", wire="f8")


def test_options_that_cannot_be_are_refused(ranks, shared_aggregator):
    ranks.run(options_that_cannot_be, shared_aggregator.address)
