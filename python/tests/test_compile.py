"""`torch.compile` around DDP: in each mode, training gives the same result as without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from racksum.eager import eager
from racksum.torch.backend import RacksumBackend
from racksum.torch.compress import BlockTopKRatio
from ranks import Ranks, group_on_backend, session_of_group, wrapped

#: The values of `torch._dynamo.config.optimize_ddp`, and whether compiled autograd runs backward.
#: Compiled autograd traces the hooks of the Python reducer, which otherwise run uncompiled.
MODES = [
    ("ddp_optimizer", False),
    ("ddp_optimizer", True),
    ("no_optimization", False),
    ("no_optimization", True),
    ("python_reducer", False),
    ("python_reducer", True),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def gloo(ranks: Ranks) -> list[list[torch.Tensor]]:
    """The weights after uncompiled training."""
    return ranks.run(train, "gloo", "", "", "no_optimization", False)


class Net(nn.Module):
    """A model with layers in several buckets, and statistics that each step broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 600),
            nn.BatchNorm1d(600),
            nn.ReLU(),
            nn.Linear(600, 600),
            nn.Linear(600, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(
    through: str, address: str, job: str, mode: str, autograd: bool, **state: Any
) -> list[torch.Tensor]:
    """Trains a model on a few batches of several sizes. The model is compiled except with Gloo."""
    config = torch._dynamo.config
    torch._dynamo.reset()
    torch.manual_seed(1)
    net = Net()
    data = torch.Generator().manual_seed(dist.get_rank())
    with (
        config.patch(optimize_ddp=mode, compiled_autograd=autograd),
        wrapped(net, through, address, job, state, bucket_cap_mb=1) as model,
    ):
        compiled = model if through == "gloo" else torch.compile(model, backend="aot_eager")
        # Batches of different sizes make Dynamo treat the size as a symbol.
        for rows in (8, 8, 6, 10):
            compiled(torch.randn(rows, 16, generator=data)).square().mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
    return [x.detach().clone() for x in net.parameters()]


@pytest.mark.parametrize("through", ["hook", "backend"])
@pytest.mark.parametrize(("mode", "autograd"), MODES)
def test_compiled_training_is_as_with_gloo(ranks, cluster, gloo, through, mode, autograd):
    ours = ranks.run(train, through, cluster.address, cluster.new_job(), mode, autograd)
    torch.testing.assert_close(ours, gloo)


def test_the_python_reducers_gradients_are_compressed(ranks, cluster, gloo):
    mode, state = ("python_reducer", False), {"compressor": BlockTopKRatio(1.0)}
    ours = ranks.run(train, "hook", cluster.address, cluster.new_job(), *mode, **state)
    torch.testing.assert_close(ours, gloo)


def step_that_reduces(address: str, job: str) -> int:
    """Returns how often Dynamo compiled the code between C++ and racksum."""
    torch._dynamo.reset()
    group = group_on_backend(address, job)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    came_to = torch.compile(step, backend="aot_eager")(torch.ones(3))
    assert came_to.tolist() == [5.0] * 3
    wrapper = RacksumBackend.allreduce.__code__
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(wrapper))


def test_what_cpp_calls_is_not_compiled(ranks, cluster):
    assert ranks.run(step_that_reduces, cluster.address, cluster.new_job()) == [0, 0]


def test_dynamo_stands_between_only_where_a_thread_compiles():
    callers = []

    @eager
    def note_caller() -> None:
        callers.append(Path(sys._getframe(1).f_code.co_filename).name)

    def step(x: torch.Tensor) -> torch.Tensor:
        note_caller()
        return x + 1

    step(torch.ones(1))
    torch.compile(step, backend="eager")(torch.ones(1))
    assert callers == ["eager.py", "eval_frame.py"]


def reduce_in_a_compiled_step(address: str, job: str) -> list[Any]:
    """Runs a compiled step that calls the session itself, with tensors of several sizes."""
    torch._dynamo.reset()
    with session_of_group(address, job) as session:

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            session.allreduce(y)
            return y + 1

        compiled = torch.compile(step, backend="aot_eager")
        return [compiled(torch.ones(n)).tolist() for n in (3, 5, 7)]


def test_a_session_is_called_in_a_compiled_step(ranks, cluster):
    came_to = ranks.run(reduce_in_a_compiled_step, cluster.address, cluster.new_job())
    assert came_to == [[[5.0] * n for n in (3, 5, 7)]] * 2
