"""DDP with the hook: the same training as without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum
import racksum.torch
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


def train(
    address: str | None,
    job: str,
    steps: int = 5,
    uneven: bool = False,
    accumulate: bool = False,
    state: dict[str, Any] | None = None,
    **ddp: Any,
) -> list[torch.Tensor]:
    """Trains a few steps, with the hook if there is an aggregator, and returns the weights."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.05, **ddp)
    session = None
    if address is not None:
        session = session_of_group(address, job)
        hook_state = racksum.torch.State(session, **(state or {}))
        model.register_comm_hook(hook_state, racksum.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randint(500, (16, 8), generator=data)
        y = torch.randint(10, (16,), generator=data)
        extra = not (uneven and step % 2)
        skip = accumulate and step % 2 == 0
        with model.no_sync() if skip else nullcontext():
            nn.functional.cross_entropy(model(x, extra), y).backward()
        if not skip:
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    if session is not None:
        session.close()
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "uneven": True},
        {"accumulate": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_training_with_the_hook_is_training_with_gloo(ranks, cluster, options):
    gloo = ranks.run(train_with, None, "", options)
    hooked = ranks.run(train_with, cluster.address, cluster.new_job(), options)
    for of_gloo, ours, other in zip(gloo[0], hooked[0], hooked[1], strict=True):
        assert torch.equal(ours, other), "the ranks have parted"
        torch.testing.assert_close(ours, of_gloo)


def train_with(address: str | None, job: str, options: dict[str, Any]) -> list[torch.Tensor]:
    return train(address, job, **options)


def test_the_same_training_twice_gives_the_same_bits(ranks, cluster):
    once, again = (ranks.run(train, cluster.address, cluster.new_job()) for _ in range(2))
    for one, other in zip(once[0], again[0], strict=True):
        assert torch.equal(one, other)


def test_a_narrow_wire_is_near(ranks, cluster):
    exact = ranks.run(train, cluster.address, cluster.new_job())
    near = ranks.run(train_with, cluster.address, cluster.new_job(), {"state": {"wire": "bf16"}})
    differs = False
    for one, other in zip(exact[0], near[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
        differs |= not torch.equal(one, other)
    assert differs


def lose_a_rank(address: str, job: str) -> str:
    """Trains until rank 1 leaves; returns what rank 0 is told by backward."""
    model = DistributedDataParallel(Net())
    session = session_of_group(address, job)
    model.register_comm_hook(racksum.torch.State(session), racksum.torch.allreduce_hook)
    for step in range(3):
        loss = model(torch.zeros(4, 8, dtype=torch.long)).sum()
        if step == 2 and dist.get_rank() == 1:
            session.close()
            return "left"
        try:
            loss.backward()
        except racksum.PeerLost as lost:
            return f"lost {lost.ranks}"
    return "nothing"


def test_a_lost_rank_is_an_error_of_backward_with_its_type(ranks, cluster):
    told = ranks.run(lose_a_rank, cluster.address, cluster.new_job())
    assert told == ["lost (1,)", "left"]
