"""Profiles have DDP's buckets and the times of their layers, and leave the model unchanged."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import racksum
import racksum.torch
from racksum.torch import Profile
from racksum.torch.steps import _alone

MODULE: Any = sys.modules["racksum.torch.profile"]
#: A bucket size with which each parameter is a bucket.
EACH = 1e-6


class Clock:
    """A clock that only layers of the test advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def settle(self) -> None:
        pass

    def seconds(self, one: float, other: float) -> float:
        return other - one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(MODULE, "Clock", lambda device: clock)
    return clock


class Took(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, forward: float, backward: float) -> Any:
        ctx.clock, ctx.backward = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.now += ctx.backward
        return gradient, None, None, None


class Takes(nn.Module):
    """A layer that takes seconds of the clock in each pass, with or without parameters."""

    def __init__(self, clock: Clock, forward: float, backward: float, own: bool = True) -> None:
        super().__init__()
        self.clock, self.times = clock, (forward, backward)
        if own:
            self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight if hasattr(self, "weight") else x
        return Took.apply(x, self.clock, *self.times)


def seconds(made: Profile) -> list[tuple[float, float]]:
    return [(x.forward_us / 1e6, x.backward_us / 1e6) for x in made.tensors]


class Differentiable(nn.Sequential):
    """A model that computes gradients of its inputs too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


def test_layers_without_parameters_count_for_the_layer_before_them(clock):
    model = Differentiable(
        Takes(clock, 1, 2, own=False),
        Takes(clock, 3, 5),
        Takes(clock, 7, 11, own=False),
        Takes(clock, 13, 17),
        Takes(clock, 19, 23, own=False),
    )
    made = racksum.torch.profile(
        model,
        torch.ones(4),
        loss=lambda y: Took.apply(y, clock, 29, 31).sum(),
        bucket_mb=EACH,
    )
    assert [tensor.name for tensor in made.tensors] == ["1.weight", "3.weight"]
    assert seconds(made) == [(1 + 3 + 7, 2 + 5 + 11), (13 + 19 + 29, 17 + 23 + 31)]


def test_a_bucket_has_the_times_of_all_its_layers(clock):
    model = nn.Sequential(*[Takes(clock, 10**i, 2 * 10**i) for i in range(5)])
    made = racksum.torch.profile(
        model, torch.ones(4), bucket_mb=32 / 2**20, first_bucket_mb=16 / 2**20
    )
    assert [tensor.elements for tensor in made.tensors] == [8, 8, 4]
    assert [tensor.name for tensor in made.tensors] == [
        "0.weight .. 1.weight",
        "2.weight .. 3.weight",
        "4.weight",
    ]
    assert seconds(made) == [(11, 22), (1100, 2200), (10000, 20000)]


def test_a_layer_in_two_buckets_counts_for_the_one_that_its_forward_waits_for(clock):
    class Biased(Takes):
        def __init__(self, *times: Any) -> None:
            super().__init__(*times)
            self.bias = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.bias

    model = nn.Sequential(Biased(clock, 1, 2), Biased(clock, 4, 8))
    made = racksum.torch.profile(model, torch.ones(4), bucket_mb=EACH)
    # The gradient of a bias is complete before the layer's own time passes.
    assert [x.name for x in made.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert seconds(made) == [(0, 2), (1, 0), (0, 8), (4, 0)]


def test_the_optimizer_is_timed_bucket_by_bucket(clock):
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            parameters = self.param_groups[0]["params"]
            clock.now += sum(x.numel() for x in parameters if x.grad is not None)
            self.steps = getattr(self, "steps", 0) + 1
            clock.now += 100 if self.steps <= 2 else 0

    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 5, bias=False))
    made = racksum.torch.profile(
        model, torch.ones(1, 2), bucket_mb=EACH, optimizer=Slow(model.parameters(), lr=0.1)
    )
    assert [tensor.update_us for tensor in made.tensors] == [6e6, 15e6], "the first step counts"
    assert "updates by Slow" in made.comment


def test_times_are_medians_of_warm_passes(clock):
    model = Takes(clock, 0, 0)
    # Two passes warm up.
    passes = iter([(900, 900), (800, 800), (5, 50), (700, 10), (1, 90)])
    model.register_forward_pre_hook(lambda *_: setattr(model, "times", next(passes)))
    made = racksum.torch.profile(model, torch.ones(4), repeats=3)
    assert seconds(made) == [(5, 50)]
    assert next(passes, None) is None


def test_a_tied_layer_counts_for_the_bucket_that_the_pass_has_reached(clock):
    model = nn.Sequential(Takes(clock, 1, 2), Takes(clock, 4, 8), Takes(clock, 16, 32))
    model[2].weight = model[0].weight
    made = racksum.torch.profile(model, torch.ones(4), bucket_mb=EACH)
    assert [(tensor.name, tensor.elements) for tensor in made.tensors] == [
        ("0.weight", 4),
        ("1.weight", 4),
    ]
    assert seconds(made) == [(1, 2), (4 + 16, 8 + 32)]


def test_a_layer_that_is_called_again_counts_from_its_first_call(clock):
    layer = Takes(clock, 4, 8)
    made = racksum.torch.profile(
        nn.Sequential(Takes(clock, 1, 2), layer, layer), torch.ones(4), bucket_mb=EACH
    )
    assert seconds(made) == [(1, 2), (4 + 4, 8 + 8)]


def test_a_bucket_that_is_complete_early_waits_for_those_before_it(clock):
    class Changing(nn.Sequential):
        """A model that calls two layers in another order after its first pass."""

        orders = iter([(0, 1, 2, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for place in next(self.orders, (0, 2, 1, 3)):
                x = self[place](x)
            return x

    model = Changing(*[Takes(clock, 10**i, 2 * 10**i) for i in range(4)])
    made = racksum.torch.profile(model, torch.ones(4), bucket_mb=EACH)
    # DDP starts the all-reduces in the order of the first pass.
    assert seconds(made) == [(1, 2), (0, 0), (110, 220), (1000, 2000)]


def test_parameters_of_modules_that_call_layers_or_are_never_called_count(clock):
    class Lender(Takes):
        """A layer that uses the parameters of a module without calling it."""

        def __init__(self, *times: Any) -> None:
            super().__init__(*times)
            self.out = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.out.weight

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.ones(4))
            self.first, self.second = Takes(clock, 1, 2), Lender(clock, 4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + self.place)

    made = racksum.torch.profile(Around(), torch.ones(4), bucket_mb=EACH)
    assert [tensor.name for tensor in made.tensors] == [
        "first.weight",
        "place",
        "second.weight",
        "second.out.weight",
    ]
    assert seconds(made) == [(1, 2), (0, 0), (0, 8), (4, 0)]


def test_activations_that_backward_recomputes_count_for_backward(clock):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Takes(clock, 1, 2), Takes(clock, 4, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    with set_checkpoint_early_stop(False):
        made = racksum.torch.profile(Recomputed(), torch.ones(4), bucket_mb=EACH)
    assert seconds(made) == [(1, 1 + 2), (4, 4 + 8)]


def test_a_gradient_that_arrives_in_parts_is_complete_with_the_last(clock):
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Takes(clock, 1, 2), Takes(clock, 4, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            for place in (0, 1, 0):
                x = checkpoint(self.layers[place], x, use_reentrant=True)
            return x

    made = racksum.torch.profile(Again(), torch.ones(4), bucket_mb=EACH)
    assert [tensor.name for tensor in made.tensors] == ["layers.0.weight", "layers.1.weight"]
    assert seconds(made) == [(1, 1 + 2), (4 + 1, 1 + 2 + 4 + 8)]


def test_layers_that_sleep_take_that_time():
    class Sleeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return super().forward(x)

    made = racksum.torch.profile(
        nn.Sequential(nn.Linear(4, 4), Sleeps(4, 4, bias=False), nn.Linear(4, 4)),
        torch.ones(1, 4),
        bucket_mb=EACH,
        repeats=1,
    )
    of = {tensor.name: tensor for tensor in made.tensors}
    assert of["1.weight"].forward_us >= 50_000
    assert all(x.backward_us > 0 and x.update_us > 0 for x in made.tensors)
    assert made.times == "measured"


class Mixed(nn.Module):
    """A model with gradients of two types, whose layers are not called as they are declared."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(300, 10)
        self.first = nn.Linear(40, 700)
        self.middle = nn.Linear(700, 300).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).bfloat16()).float())


class Words(nn.Module):
    def __init__(self, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64, sparse=sparse)
        self.place = nn.Parameter(torch.zeros(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3)
        self.out = nn.Linear(64, 500, bias=False)
        if tied:
            self.out.weight = self.words.weight
        for parameter in self.body.layers[1].parameters():
            parameter.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.words(x) + self.place))


def convolutional() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in ((3, 64), (64, 256), (256, 128), (128, 64))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 36, 100))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mixed": (Mixed, lambda: torch.ones(2, 40)),
    "words": (Words, lambda: torch.ones(2, 16, dtype=torch.long)),
    "tied": (lambda: Words(tied=True), lambda: torch.ones(2, 16, dtype=torch.long)),
    "sparse": (lambda: Words(sparse=True), lambda: torch.ones(2, 16, dtype=torch.long)),
    "convolutional": (convolutional, lambda: torch.ones(2, 3, 6, 6)),
}


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=_alone(torch.device("cpu")), **options)


def buckets_of(model: DistributedDataParallel, x: torch.Tensor) -> list[tuple[list[str], int, int]]:
    """Returns what DDP reduces in its third step, in the order of the forward pass."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    seen: list[tuple[list[str], int, int]] = []

    def hook(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        own = [names[parameter] for parameter in bucket.parameters()]
        seen.append((own[::-1], gradients.numel(), gradients.element_size()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        model(x).sum().backward()
    return seen[::-1]


@pytest.mark.parametrize("megabytes", [None, 0.25, 0.05, EACH])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_ddp(name, static, megabytes):
    make, inputs = MODELS[name]
    expected = buckets_of(wrapped(make(), bucket_cap_mb=megabytes, static_graph=static), inputs())
    made = racksum.torch.profile(make(), inputs(), bucket_mb=megabytes, repeats=1)
    assert [(x.name, x.elements, x.element_bytes) for x in made.tensors] == [
        (" .. ".join(dict.fromkeys((own[0], own[-1]))), elements, size)
        for own, elements, size in expected
    ]
    trainable = [x.numel() for x in make().parameters() if x.requires_grad]
    assert sum(x.elements for x in made.tensors) == sum(trainable)


def test_a_wrapped_model_keeps_its_options_unless_others_are_passed():
    x = torch.ones(2, 3, 6, 6)

    def elements(model: nn.Module, **options: Any) -> list[int]:
        made = racksum.torch.profile(model, x, repeats=1, **options)
        return [tensor.elements for tensor in made.tensors]

    plain = convolutional()
    model = wrapped(plain, bucket_cap_mb=0.5)
    assert elements(model) == elements(plain, bucket_mb=0.5)
    assert elements(model, bucket_mb=0.1) == elements(plain, bucket_mb=0.1)
    assert elements(wrapped(plain)) == elements(plain)
    assert elements(plain) == elements(plain, bucket_mb=25, first_bucket_mb=1)
    caps = wrapped(convolutional(), bucket_cap_mb_list=[0.1, 0.7])
    expected = [
        count for _, count, _ in buckets_of(wrapped(plain, bucket_cap_mb_list=[0.1, 0.7]), x)
    ]
    assert elements(caps) == expected
    unused = wrapped(plain, find_unused_parameters=True)
    with pytest.raises(racksum.BadArgument, match=r"pass model\.module"):
        racksum.torch.profile(unused, x)


def test_parameters_that_ddp_ignores_are_not_reduced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    made = racksum.torch.profile(model, torch.ones(1, 4), repeats=1)
    assert made.tensors[0].elements == 4 + 8 + 2


def test_parameters_without_elements_are_no_buckets():
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.empty = nn.Parameter(torch.ones(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.empty.sum()

    made = racksum.torch.profile(Empty(), torch.ones(1, 4), bucket_mb=EACH, repeats=1)
    assert sorted(tensor.name for tensor in made.tensors) == ["bias", "weight"]


def test_a_profile_changes_nothing_and_needs_no_group():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(6, 4, requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: gradient.clone() for name, gradient in gradients.items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, random, of_input = str(optimizer.state_dict()), torch.get_rng_state(), x.grad
    of_input_before = of_input.clone()
    racksum.torch.profile(model, x, optimizer=optimizer, repeats=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert torch.equal(parameter.grad, values[name])
    assert str(optimizer.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is of_input
    assert torch.equal(of_input, of_input_before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(x._post_accumulate_grad_hooks for x in model.parameters())
    assert not dist.is_initialized()


def test_a_model_that_writes_to_its_inputs_leaves_those_of_the_user():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    x = torch.tensor([[-1.0, 1.0]])
    racksum.torch.profile(model, x, repeats=1)
    assert x.tolist() == [[-1.0, 1.0]]


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        y = self.out(x) * scale
        return SimpleNamespace(loss=y.mean()) if scale == 2 else {"loss": y.mean(), "y": y}


@pytest.mark.parametrize(
    "inputs",
    [
        torch.ones(1, 4),
        (torch.ones(1, 4), 2.0),
        [torch.ones(1, 4)],
        {"x": torch.ones(1, 4), "scale": 2.0},
    ],
)
def test_inputs_are_positions_or_keywords(inputs):
    with torch.no_grad():
        made = racksum.torch.profile(Several(), inputs, repeats=1)
    assert [tensor.elements for tensor in made.tensors] == [10]


def test_a_time_that_is_no_number_is_refused(clock):
    with pytest.raises(racksum.BadArgument, match="forward_us of tensor 'weight' is nan"):
        racksum.torch.profile(Takes(clock, float("nan"), 1), torch.ones(4))


@pytest.mark.gpu
def test_times_of_a_gpu_are_of_what_it_does_and_not_of_giving_it_work():
    width = 4096
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).cuda()
    x = torch.ones(width, width, device="cuda")
    made = racksum.torch.profile(model, x, bucket_mb=EACH, repeats=3)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(x).sum().backward()
    torch.cuda.synchronize()
    whole = sum(tensor.forward_us + tensor.backward_us for tensor in made.tensors) / 1e6
    assert whole == pytest.approx(time.perf_counter() - start, rel=0.5)
    assert made.device == torch.cuda.get_device_name()
    assert len(made.tensors) == 4
    # Each layer but the first has two products in backward, and one in forward.
    for tensor in made.tensors[1:]:
        assert 1.2 < tensor.backward_us / tensor.forward_us < 3
