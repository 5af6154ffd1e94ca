"""What PyTorch's own tests ask of DDP on CPUs, asked of the hook and of the backend.

Each scenario gives with either what it gives with Gloo; docs/c10d.md lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks import Ranks, backend_options, wrapped

#: Wraps a model, with options of DDP.
Wrap = Callable[..., DistributedDataParallel]
Scenario = Callable[[Wrap], list[Any]]

SCENARIOS: list[Scenario] = []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def scenario(behaviour: Scenario) -> Scenario:
    """Something that is to come to the same as with Gloo."""
    SCENARIOS.append(behaviour)
    return behaviour


def come_to(behaviour: Scenario, through: str, address: str, job: str) -> list[Any]:
    """What a scenario comes to at this rank."""
    numbers = itertools.count()
    torch.manual_seed(1)
    with ExitStack() as stack:

        def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
            own = f"{job}-{next(numbers)}"
            return stack.enter_context(wrapped(net, through, address, own, {}, **options))

        return behaviour(wrap)


@pytest.mark.parametrize("through", ["hook", "backend"])
@pytest.mark.parametrize("behaviour", SCENARIOS, ids=lambda behaviour: behaviour.__name__)
def test_ddp_does_as_with_gloo(ranks, cluster, behaviour, through):
    gloo = ranks.run(come_to, behaviour, "gloo", "", "")
    ours = ranks.run(come_to, behaviour, through, cluster.address, cluster.new_job())
    torch.testing.assert_close(ours, gloo)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def weights(model: nn.Module) -> list[Any]:
    return [x.detach().clone() for x in model.state_dict().values()]


def batch(*shape: int) -> Tensor:
    """Of this rank's own."""
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
    """A layer for each task, of which a step uses some."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.tasks = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for i in used:
            x = self.tasks[i](x)
        return x


@scenario
def a_parameter_that_no_rank_uses_has_no_gradient(wrap: Wrap) -> list[Any]:
    found = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = wrap(Tasks(), find_unused_parameters=True, **options)
        model(batch(8, 4), [dist.get_rank()]).sum().backward()
        found += gradients(model)
        assert [p.grad is None for p in model.module.tasks[2].parameters()] == [True, True]
        assert model.module.tasks[1 - dist.get_rank()].weight.grad is not None
    return found


@scenario
def a_rank_that_uses_all_parameters_and_one_that_does_not(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks(2), find_unused_parameters=True)
    model(batch(8, 4), [0, 1] if dist.get_rank() == 0 else [1]).sum().backward()
    return gradients(model)


@scenario
def outputs_that_are_ignored(wrap: Wrap) -> list[Any]:
    found = []
    for options in ({}, {"find_unused_parameters": True}):
        used = [0, 1, 2] if not options else [0, 1]
        model = wrap(Tasks(), **options)
        for i in range(8):
            output = model(batch(8, 4), used)
            if i >= 4:
                output.square().mean().backward()
        found += gradients(model)
    return found


@scenario
def an_unused_parameter_of_two_names(wrap: Wrap) -> list[Any]:
    class Net(Tasks):
        def __init__(self) -> None:
            super().__init__(2)
            self.bias = self.tasks[0].bias

    found = []
    for static in (False, True):
        model = wrap(Net(), find_unused_parameters=True, static_graph=static)
        for _ in range(6):
            (model(batch(8, 4), [1]).sum() / 10).backward()
        found += gradients(model)
    return found


@scenario
def control_flow_that_changes_from_step_to_step(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    for i in range(6):
        step(model, batch(8, 4), [i % 3, (i + 1) % 3] if i % 2 else [i % 3])
    for i in range(6):
        step(model, batch(8, 4), [(i + dist.get_rank()) % 3])
    return weights(model)


@scenario
def unused_parameters_are_not_reduced_if_so_asked(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for _ in range(2):
        step(model, batch(8, 4), [0, 2])
    return weights(model)


@scenario
def a_layer_whose_gradient_is_undefined(wrap: Wrap) -> list[Any]:
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    class Net(Tasks):
        def forward(self, x: Tensor) -> Tensor:
            return self.tasks[2](x) + Undefined.apply(self.tasks[0](x))

    model = wrap(Net(), find_unused_parameters=True)
    for _ in range(3):
        model(batch(8, 4)).sum().backward()
    return gradients(model)


class Checkpointed(nn.Module):
    """Layers of which some are computed again in backward."""

    def __init__(self, plan: str, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        if shared:
            self.layers[0].weight = self.layers[1].weight
        self.plan = plan
        self.reentrant = reentrant
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.plan if self.plan != "turns" else "01"[self.count % 2]:
            if layer == "-":
                x = self.layers[0](x)
            else:
                x = checkpoint(self.layers[int(layer)], x, use_reentrant=self.reentrant)
        return x


#: The layers that are checkpointed ("-" is the first, which is not), whether the checkpoint is
#: reentrant, whether layers share a weight, and options of DDP.
CHECKPOINTS: list[tuple[str, bool, bool, dict[str, bool]]] = [
    ("-1", False, False, {}),
    ("-1", True, False, {}),
    ("-1", True, False, {"static_graph": True}),
    ("-1", False, False, {"find_unused_parameters": True}),
    ("-1", True, False, {"find_unused_parameters": True, "static_graph": True}),
    ("-11", False, False, {}),
    ("-11", True, False, {"static_graph": True}),
    ("-11", False, False, {"static_graph": True}),
    ("-11", True, True, {"static_graph": True}),
    ("turns", False, False, {"find_unused_parameters": True}),
    ("turns", False, True, {"find_unused_parameters": True}),
    ("01", False, True, {}),
]


@scenario
def checkpoints_of_activations(wrap: Wrap) -> list[Any]:
    found = []
    for plan, reentrant, shared, options in CHECKPOINTS:
        for view in (False, True):
            net = Checkpointed(plan, reentrant, shared)
            model = wrap(net, gradient_as_bucket_view=view, **options)
            for _ in range(3):
                model.zero_grad()
                model(batch(8, 10).requires_grad_()).square().mean().backward()
                found += gradients(model)
    return found


class Typed(nn.Module):
    """Layers of every type that gradients have."""

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
def several_forwards_before_a_backward(wrap: Wrap) -> list[Any]:
    found = []
    for options in ({}, {"static_graph": True}):
        model = wrap(nn.Linear(4, 4), **options)
        for _ in range(3):
            outputs = [model(batch(8, 4)) for _ in range(3)]
            sum(output.mean() for output in outputs).backward()
        found += gradients(model)
    return found


@scenario
def a_graph_that_is_called_static_and_may_be(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks())
    model._set_static_graph()
    for _ in range(3):
        step(model, batch(8, 4), [0, 2])
    return weights(model)


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
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    return weights(model)


@scenario
def buffers_are_those_of_the_first_rank_if_so_asked(wrap: Wrap) -> list[Any]:
    found = []
    for broadcast in (True, False):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = wrap(net, broadcast_buffers=broadcast)
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


@scenario
def a_parameter_without_a_gradient_is_an_error_of_the_next_step(wrap: Wrap) -> list[Any]:
    model = wrap(Tasks())
    step(model, batch(8, 4), [0])
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(batch(8, 4), [0, 1, 2])
    again = wrap(Tasks())
    step(again, batch(8, 4), [0, 1, 2])
    return weights(again)


@scenario
def a_static_graph_that_changes_is_an_error(wrap: Wrap) -> list[Any]:
    for used in ([0], [0, 1, 2]):
        model = wrap(Tasks(), static_graph=True)
        with pytest.raises(RuntimeError, match="training graph has changed"):  # noqa: PT012
            for nth in range(3):
                of_step = used if nth == 0 else [0, 1, 2] if used == [0] else [0]
                model(batch(8, 4), of_step).sum().backward()
    again = wrap(Tasks())
    step(again, batch(8, 4), [0, 1, 2])
    return weights(again)


@scenario
def a_reentrant_checkpoint_that_ddp_does_not_expect_is_an_error(wrap: Wrap) -> list[Any]:
    unused = {"find_unused_parameters": True}
    for plan, options in (("-1", unused), ("-11", {}), ("-11", unused)):
        model = wrap(Checkpointed(plan, True), **options)
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            model(batch(8, 10)).sum().backward()
    again = wrap(Checkpointed("-1", False))
    step(again, batch(8, 10))
    return weights(again)


@scenario
def an_error_of_the_model_in_backward(wrap: Wrap) -> list[Any]:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            raise ArithmeticError("no gradient today")

    class Net(Tasks):
        def forward(self, x: Tensor) -> Tensor:
            return self.tasks[2](Fails.apply(super().forward(x, [0, 1])))

    model = wrap(Net(), bucket_cap_mb=0.0001)
    with pytest.raises(ArithmeticError, match="no gradient today"):
        model(batch(8, 4)).sum().backward()
    again = wrap(Tasks())
    step(again, batch(8, 4), [0, 1, 2])
    return weights(again)


def models_that_differ(address: str, job: str) -> list[str]:
    """What each rank is told."""
    rank, told = dist.get_rank(), []
    nets = [nn.Linear(4, 4 + rank), nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)])]
    for i, net in enumerate(nets):
        pg_options = backend_options(address, f"{job}-{i}")
        group = dist.new_group(backend="racksum", pg_options=pg_options)
        with pytest.raises(RuntimeError) as raised:
            DistributedDataParallel(net, process_group=group)
        told.append(str(raised.value))
        dist.destroy_process_group(group)
    return told


def test_ranks_whose_models_differ_are_told(ranks, cluster):
    first, second = ranks.run(models_that_differ, cluster.address, cluster.new_job())
    assert "lost rank 1: it left the job" in first[0]
    assert "appears not to match sizes" in second[0]
    assert "inconsistent" in first[1]
    assert "inconsistent" in second[1]
