"""With the hook and the backend, DDP behaves as PyTorch's own tests expect.

docs/c10d.md lists the behaviours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks, backend_options
from scenarios import Scenario, Tasks, Wrap, batch, comes_to_the_same, gradients, step, weights


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


SCENARIOS: list[Scenario] = []


def scenario(behaviour: Scenario) -> Scenario:
    """Adds a scenario that must give the same result as with Gloo."""
    SCENARIOS.append(behaviour)
    return behaviour


class Typed(nn.Module):
    """A model with a layer of every type that gradients can have."""

    def __init__(self) -> None:
        super().__init__()
        types = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in types)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


@scenario
def parameters_of_several_types(wrap: Wrap) -> list[Any]:
    model = wrap(Typed())
    for _ in range(3):
        step(model, torch.full((2, 4), dist.get_rank() + 1.0))
    return weights(model)


@scenario
def complex_parameters(wrap: Wrap) -> list[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight)

    model = wrap(Net())
    for _ in range(3):
        step(model, batch(4, 4))
    return weights(model)


@scenario
def layers_and_batches_without_elements(wrap: Wrap) -> list[Any]:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 0))
    model = wrap(net)
    model(batch(8, 4)).sum().backward()
    found = gradients(model)
    model = wrap(nn.Linear(4, 4))
    model(batch(8 * dist.get_rank(), 4)).sum().backward()
    return found + gradients(model)


@scenario
def gradients_of_gradients(wrap: Wrap) -> list[Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor(2.0))

        def forward(self) -> Tensor:
            return self.p.pow(2)

    model = wrap(Net())
    model().backward(create_graph=True)
    model.module.p.grad.requires_grad_()
    return gradients(model)


@scenario
def gradients_that_are_accumulated_without_sums(wrap: Wrap) -> list[Any]:
    found = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = wrap(Tasks(), **options)
        model(batch(8, 4), [0, 1, 2]).sum().backward()
        for nested in (False, True):
            with model.no_sync(), model.no_sync() if nested else nullcontext():
                model(batch(8, 4), [0, 1, 2]).sum().backward()
            if nested:
                model(batch(8, 4), [0, 1, 2]).sum().backward()
                found += gradients(model)
    return found


@scenario
def every_optimizer(wrap: Wrap) -> list[Any]:
    found = []
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        model = wrap(Tasks())
        by = optimizer(model.parameters(), lr=0.01)
        for _ in range(4):
            by.zero_grad()
            model(batch(8, 4), [0, 1, 2]).square().mean().backward()
            by.step()
        found += weights(model)
    return found


@scenario
def training_that_goes_on_from_saved_weights(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks())
    for _ in range(3):
        step(model, batch(8, 4), [0, 1, 2])
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    for _ in range(3):
        step(model, batch(8, 4), [0, 1, 2])
    again = wrap(Tasks())
    again.load_state_dict(saved)
    for _ in range(3):
        step(again, batch(8, 4), [0, 1, 2])
    torch.testing.assert_close(weights(again), weights(model))
    return weights(again)


class Outputs(NamedTuple):
    one: Tensor
    other: Tensor | None


@dataclass
class Fields:
    one: Tensor
    other: Tensor | None


@scenario
def outputs_in_containers_of_several_kinds(wrap: Wrap) -> list[Any]:
    class Net(Tasks):
        def __init__(self, make: Any, skips: bool) -> None:
            super().__init__()
            self.make = make
            self.skips = skips

        def forward(self, x: Tensor) -> Any:
            return self.make(self.tasks[0](x), None if self.skips else self.tasks[1](x).relu())

    found = []
    kinds = (Outputs, Fields, lambda *both: both, lambda one, other: {"one": one, "other": other})
    for make, skips in itertools.product(kinds, (False, True)):
        model = wrap(Net(make, skips), find_unused_parameters=True)
        for _ in range(3):
            output = model(batch(8, 4))
            output = vars(output) if isinstance(output, Fields) else output
            parts = output.values() if isinstance(output, dict) else output
            sum(part.sum() for part in parts if part is not None).backward()
        found += gradients(model)
    return found


@scenario
def tensors_that_are_made_in_forward_or_have_no_gradient(wrap: Wrap) -> list[Any]:
    class Net(Tasks):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
            made = torch.ones(8, 4, requires_grad=True) * x
            return self.tasks[0](made), x.detach(), {"more": [self.tasks[1](x), made]}

    found = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = wrap(Net(), **options)
        for _ in range(3):
            first, _, rest = model(batch(8, 4))
            (first.sum() + rest["more"][0].sum()).backward()
        found += gradients(model)
    return found


@scenario
def parameters_and_buffers_that_ddp_is_told_to_ignore(wrap: Wrap) -> list[Any]:
    net = Tasks()
    net.register_buffer("own", torch.tensor(float(dist.get_rank())))
    ignored = ["tasks.1.weight", "own"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    with torch.no_grad():
        net.tasks[1].weight.fill_(dist.get_rank())
    model = wrap(net)
    model(batch(8, 4), [0, 1, 2]).sum().backward()
    assert net.own.item() == net.tasks[1].weight[0, 0].item() == dist.get_rank()
    return gradients(model)


@scenario
def models_that_differ_at_first_are_those_of_the_first_rank(wrap: Wrap) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].running_mean.fill_(dist.get_rank())
    model = wrap(net, forward_sync_buffers=False)
    assert net[1].running_mean.eq(0).all()
    return weights(model)


@scenario
def buffers_are_those_of_the_first_rank_if_so_asked(wrap: Wrap) -> list[Any]:
    found = []
    for broadcast in (True, False):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = wrap(net, forward_sync_buffers=broadcast)
        for _ in range(3):
            step(model, batch(8, 4))
        model.eval()
        with torch.no_grad():
            found.append(model(batch(8, 4)))
        found += [x.clone() for x in model.buffers()]
    return found


@scenario
def buffers_that_a_hook_reduces(wrap: Wrap) -> list[Any]:
    def add(_: Any, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer)

    net = Tasks()
    net.register_buffer("sum", torch.tensor(0.0))
    model = wrap(net)
    net.sum.fill_(dist.get_rank() + 1)
    model._register_buffer_comm_hook(None, add)
    step(model, batch(8, 4), [0, 1, 2])
    assert net.sum.item() == 3
    return weights(model)


@scenario
def a_model_that_is_called_with_other_weights(wrap: Wrap) -> list[Any]:
    net = nn.Linear(4, 4)
    model = wrap(net)
    others = {f"module.{name}": torch.ones_like(p) for name, p in net.named_parameters()}
    found = torch.func.functional_call(model, others, (batch(8, 4),))
    step(model, batch(8, 4))
    return [found, *weights(model)]


@scenario
def buckets_of_several_sizes(wrap: Wrap) -> list[Any]:
    found = []
    for cap in (0.0001, [0.0001, 0.0002, 1.0]):
        by = {"bucket_cap_mb_list": cap} if isinstance(cap, list) else {"bucket_cap_mb": cap}
        model = wrap(Tasks(), **by)
        for _ in range(3):
            step(model, batch(8, 4), [0, 1, 2])
        found += weights(model)
    return found


@scenario
def data_that_ends_earlier_at_one_rank(wrap: Wrap) -> list[Any]:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with model.join():
        for _ in range(2 + dist.get_rank()):
            step(model, batch(8, 4), lr=0.0)
    with model.join(enable=False):
        step(model, batch(8, 4))
    model = wrap(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="exhausted"):
        until_data_ends(model)
    return []


def until_data_ends(model: nn.Module) -> None:
    with Join([model], throw_on_early_termination=True):
        for _ in range(2 + dist.get_rank()):
            step(model, batch(8, 4))


@pytest.mark.parametrize("through", ["hook", "backend"])
@pytest.mark.parametrize("behaviour", SCENARIOS, ids=lambda behaviour: behaviour.__name__)
def test_ddp_does_as_with_gloo(ranks, cluster, behaviour, through):
    comes_to_the_same(ranks, cluster, behaviour, through)


def models_that_differ(address: str, job: str) -> list[str]:
    """Wraps models that differ between the ranks, and returns this rank's errors."""
    rank, errors = dist.get_rank(), []
    nets = [nn.Linear(4, 4 + rank), nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)])]
    for i, net in enumerate(nets):
        pg_options = backend_options(address, f"{job}-{i}")
        group = dist.new_group(backend="racksum", pg_options=pg_options)
        with pytest.raises(RuntimeError) as raised:
            DistributedDataParallel(net, process_group=group)
        errors.append(str(raised.value))
        dist.destroy_process_group(group)
    return errors


def test_ranks_whose_models_differ_are_told(ranks, cluster):
    first, second = ranks.run(models_that_differ, cluster.address, cluster.new_job())
    assert "lost rank 1: it left the job" in first[0]
    assert "appears not to match sizes" in second[0]
    assert "inconsistent" in first[1]
    assert "inconsistent" in second[1]
