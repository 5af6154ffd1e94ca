"""DDP with the hook, and on the backend: the same training as on Gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import racksum
import racksum.torch
import ranks as ranks_of
from ranks import Ranks, session_of_group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


class Net(nn.Module):
    """An embedding, of which a step touches few rows, and a part that not every step uses."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 32, sparse=sparse)
        self.hidden = nn.Linear(32, 64)
        self.extra = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.words(x).mean(1)))
        return self.out(self.extra(hidden) if extra else hidden)


def wrapped(
    through: str, address: str, job: str, state: dict[str, Any], **options: Any
) -> AbstractContextManager[DistributedDataParallel]:
    """A model whose gradients go through this."""
    torch.manual_seed(1)
    net = Net(options.pop("sparse", False)).to(torch.get_default_device())
    return ranks_of.wrapped(net, through, address, job, state, **options)


def train(
    through: str,
    address: str,
    job: str,
    *,
    steps: int = 5,
    uneven: bool = False,
    accumulate: bool = False,
    state: dict[str, Any] | None = None,
    **ddp: Any,
) -> list[torch.Tensor]:
    """Trains a few steps, and returns the weights."""
    with wrapped(through, address, job, state or {}, bucket_cap_mb=0.05, **ddp) as model:
        return _train(model, steps, uneven, accumulate)


def _train(
    model: DistributedDataParallel, steps: int, uneven: bool, accumulate: bool
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = next(model.parameters()).device
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randint(500, (16, 8), generator=data, device="cpu").to(device)
        y = torch.randint(10, (16,), generator=data, device="cpu").to(device)
        extra = not (uneven and step % 2)
        skip = accumulate and step % 2 == 0
        with model.no_sync() if skip else nullcontext():
            nn.functional.cross_entropy(model(x, extra), y).backward()
        if not skip:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


THROUGH = ["hook", "backend"]


def keywords(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "uneven": True},
        {"accumulate": True},
        {"sparse": True},
        {"sparse": True, "gradient_as_bucket_view": True},
    ],
    ids=keywords,
)
def test_training_is_as_with_gloo(ranks, cluster, through, options):
    gloo = ranks.run(train, "gloo", "", "", **options)
    ours = ranks.run(train, through, cluster.address, cluster.new_job(), **options)
    for of_gloo, of_one, of_other in zip(gloo[0], ours[0], ours[1], strict=True):
        assert torch.equal(of_one, of_other), "the ranks have parted"
        torch.testing.assert_close(of_one, of_gloo)


@pytest.mark.parametrize("through", THROUGH)
def test_the_same_training_twice_gives_the_same_bits(ranks, cluster, through):
    once, again = (ranks.run(train, through, cluster.address, cluster.new_job()) for _ in range(2))
    for one, other in zip(once[0], again[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("through", THROUGH)
def test_a_narrow_wire_is_near(ranks, cluster, through):
    exact = ranks.run(train, through, cluster.address, cluster.new_job())
    near = ranks.run(train, through, cluster.address, cluster.new_job(), state={"wire": "bf16"})
    differs = False
    for one, other in zip(exact[0], near[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
        differs |= not torch.equal(one, other)
    assert differs


def lose_a_rank(through: str, address: str, job: str, static: bool) -> str:
    """Trains until rank 1 leaves; returns what rank 0 is told by backward."""
    with wrapped(through, address, job, {}, static_graph=static) as model:
        for step in range(3):
            loss = model(torch.zeros(4, 8, dtype=torch.long)).sum()
            if step == 2 and dist.get_rank() == 1:
                return "left"
            try:
                loss.backward()
            except racksum.PeerLost as lost:
                return f"lost {lost.ranks}"
    return "nothing"


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("static", [False, True])
def test_a_lost_rank_is_an_error_of_backward_with_its_type(ranks, cluster, through, static):
    told = ranks.run(lose_a_rank, through, cluster.address, cluster.new_job(), static)
    assert told == ["lost (1,)", "left"]


def fall_back(addresses: str, job: str) -> list[torch.Tensor]:
    """Trains; before the third step the aggregator is told to be killed. Returns the weights."""
    state = {"fallback": "process_group"}
    with wrapped("hook", addresses, job, state, bucket_cap_mb=0.05) as model:
        _train(model, 2, uneven=False, accumulate=False)
        os.kill(int(job.rpartition("-")[2]), signal.SIGKILL)
        return _train(model, 3, uneven=False, accumulate=False)


def test_the_process_group_averages_when_the_aggregator_is_gone(ranks, aggregator):
    job = f"fallback-{aggregator.process.pid}"
    weights = ranks.run(fall_back, aggregator.address, job)
    gloo = ranks.run(train_twice)
    for one, other, of_gloo in zip(*weights, gloo[0], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, of_gloo)


def train_twice() -> list[torch.Tensor]:
    with wrapped("gloo", "", "", {}, bucket_cap_mb=0.05) as model:
        _train(model, 2, uneven=False, accumulate=False)
        return _train(model, 3, uneven=False, accumulate=False)


def train_on_uneven_data(through: str, address: str, job: str) -> list[torch.Tensor]:
    """Ranks have batches in different numbers, and those that are done join the others."""
    with wrapped(through, address, job, {}) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(3 + 2 * dist.get_rank()):
                x = torch.full((4, 8), step + dist.get_rank(), dtype=torch.long)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("through", THROUGH)
def test_ranks_whose_data_ends_join_the_others(ranks, cluster, through):
    weights = ranks.run(train_on_uneven_data, through, cluster.address, cluster.new_job())
    assert len(weights[0]) == len(weights[1])


def train_in_lanes(address: str, job: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    with session_of_group(address, job, lanes=3) as session:
        state = racksum.torch.State(session, prioritize=True)
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        return _train(model, 5, uneven=False, accumulate=False)


def test_buckets_in_lanes_are_averaged_all_the_same(ranks, aggregator):
    weights = ranks.run(train_in_lanes, aggregator.address, "lanes")
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    for one, plain in zip(weights[0], ranks.run(train, "gloo", "", "")[0], strict=True):
        torch.testing.assert_close(one, plain)
