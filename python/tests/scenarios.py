"""DDP scenarios, which must give the same results with Gloo, the hook and the backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conftest import Cluster
from ranks import Ranks, wrapped

#: A function that wraps a model in DDP with the given options.
Wrap = Callable[..., DistributedDataParallel]
Scenario = Callable[[Wrap], list[Any]]


def comes_to_the_same(ranks: Ranks, cluster: Cluster, behaviour: Scenario, through: str) -> None:
    """Checks that a scenario gives the same result as with Gloo."""
    gloo = ranks.run(come_to, behaviour, "gloo", "", "")
    ours = ranks.run(come_to, behaviour, through, cluster.address, cluster.new_job())
    torch.testing.assert_close(ours, gloo)


def come_to(behaviour: Scenario, through: str, address: str, job: str) -> list[Any]:
    """Returns the result of a scenario at this rank."""
    numbers = itertools.count()
    torch.manual_seed(1)
    with ExitStack() as stack:

        def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
            own = f"{job}-{next(numbers)}"
            return stack.enter_context(wrapped(net, through, address, own, {}, **options))

        return behaviour(wrap)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def weights(model: nn.Module) -> list[Any]:
    return [x.detach().clone() for x in model.state_dict().values()]


def batch(*shape: int) -> Tensor:
    """Returns a batch of this rank's own data."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=data)


def step(model: nn.Module, *inputs: Any, lr: float = 0.1) -> None:
    model(*inputs).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)
                parameter.grad = None


class Tasks(nn.Module):
    """A model with a layer for each task. A step uses some of the layers."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.tasks = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for i in used:
            x = self.tasks[i](x)
        return x
