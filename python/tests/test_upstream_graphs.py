"""DDP steps that use only part of a model, or a part more than once, as in PyTorch's own tests.

docs/c10d.md lists the behaviours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import Ranks
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
    """A model that computes some of its layers again in backward."""

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


#: The plan of a forward pass, whether checkpoints are reentrant, whether the layers share a weight,
#: and options of DDP. In a plan, "-" stands for the first layer without a checkpoint, and a digit
#: for a checkpointed layer. The plan "turns" checkpoints the layers in turn, one in each pass.
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


@scenario
def several_forwards_before_a_backward(wrap: Wrap) -> list[Any]:
    found = []
    for options in ({}, {"static_graph": True}):
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)
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


@pytest.mark.parametrize("through", ["hook", "backend"])
@pytest.mark.parametrize("behaviour", SCENARIOS, ids=lambda behaviour: behaviour.__name__)
def test_ddp_does_as_with_gloo(ranks, cluster, behaviour, through):
    comes_to_the_same(ranks, cluster, behaviour, through)
