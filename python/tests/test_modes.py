"""The mode of tensors that a collective wrote to: inference mode, or autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from conftest import Cluster
from ranks import Ranks, group_on_backend, wrapped
from test_calls import CALLS, OP, WORLD, by, numbers, reduced_together

Group = dist.ProcessGroup


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def job(shared_aggregator: Any) -> tuple[str, str]:
    return shared_aggregator.address, Cluster.new_job()


def sparse() -> Tensor:
    """Returns a sparse tensor with different entries at each rank."""
    rank = dist.get_rank()
    return torch.sparse_coo_tensor([[0, rank + 1], [1, 1]], [1.0, 2.0 + rank], (5, 3))


def several_sparse(group: Group, given: Any) -> None:
    once = lambda *_: given(sparse(), sparse())  # noqa: E731
    reduced_together(OP.SUM)(group, once)


def coalesced(group: Group, given: Any) -> None:
    tensors = given(numbers(), numbers(5))
    with dist._coalescing_manager(group, async_ops=True) as works:
        for x in tensors:
            dist.all_reduce(x, group=group)
    works.wait()


def future(group: Group, given: Any) -> None:
    [x] = given(sparse())
    given.held += dist.all_reduce(x, group=group, async_op=True).get_future().wait()


def objects(group: Group, given: Any) -> None:
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, sparse(), group=group)
    handed = [sparse()]
    dist.broadcast_object_list(handed, group_src=0, group=group)
    # torch makes these tensors in the mode of the call.
    assert all(x.is_inference() == torch.is_inference_mode_enabled() for x in [*gathered, *handed])


#: Collectives to check in addition to the `CALLS` of `test_calls`.
MORE: dict[str, Callable[..., Any]] = {
    "all_reduce_sparse_avg": by(OP.AVG, sparse),
    "all_reduce_sparse_with_a_factor": by(dist._make_nccl_premul_sum(0.5), sparse),
    "all_reduce_of_several_sparse": several_sparse,
    "all_reduce_with_a_factor": by(dist._make_nccl_premul_sum(0.5)),
    "coalescing": coalesced,
    "future": future,
    "objects": objects,
}


#: Collectives in which Gloo refuses to write to tensors that were made in inference mode.
REFUSED_BY_GLOO = {"gather", "all_to_all"}


class Given:
    """Makes the tensors of a collective in one mode, and holds them for checks."""

    def __init__(self, made_in: bool) -> None:
        self.made_in = made_in
        self.held: list[Any] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        with torch.inference_mode(self.made_in):
            made = [x.clone() for x in tensors]
        self.held += made
        return made


def inner(x: Tensor) -> list[Tensor]:
    """Returns a tensor and the tensors that it consists of."""
    return [x, x._indices(), x._values()] if x.is_sparse else [x]


def modes(name: str, made_in: bool, called_in: bool, address: str, job: str) -> None:
    group, given = group_on_backend(address, job), Given(made_in)
    with torch.inference_mode(called_in):
        (CALLS | MORE)[name](group, given)
    for x in tree_leaves(given.held):
        assert [part.is_inference() for part in inner(x)] == [made_in] * len(inner(x))
        if x.is_sparse and not made_in:
            before = x._version
            assert x.coalesce().values().isfinite().all()
            x.mul_(2)
            assert x._version > before


@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_what_a_collective_writes_to_stays_in_the_mode_it_was_made_in(
    ranks: Ranks, job: tuple[str, str], name: str
) -> None:
    for made_in in (False,) if name in REFUSED_BY_GLOO else (False, True):
        for called_in in (False, True):
            ranks.run(modes, name, made_in, called_in, *job)


def train_an_embedding(through: str, address: str, job: str) -> Tensor:
    """Trains an embedding, and reads the entries of its gradients as gradient clipping does."""
    torch.manual_seed(1)
    net = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(net.parameters(), lr=0.1)
    with wrapped(net, through, address, job, {}) as model:
        for i in range(3):
            optimizer.zero_grad()
            model(torch.tensor([i, i + dist.get_rank() + 1, 2])).square().sum().backward()
            assert net.weight.grad is not None
            for part in inner(net.weight.grad):
                assert not part.is_inference()
            net.weight.grad.coalesce().values().clamp_(-1, 1)
            optimizer.step()
    return net.weight.detach().clone()


@pytest.mark.parametrize("through", ["hook", "backend"])
def test_the_entries_of_a_sparse_gradient_can_be_read(
    ranks: Ranks, cluster: Cluster, through: str
) -> None:
    ours = ranks.run(train_an_embedding, through, cluster.address, cluster.new_job())
    torch.testing.assert_close(ours[0], ours[1])
