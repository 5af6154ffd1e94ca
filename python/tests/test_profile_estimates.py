"""Estimated profiles count FLOPs and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import racksum
import racksum.torch
from racksum.torch import Estimate

RATES = Estimate(device="A100", flops_per_s=1e12, bytes_per_s=1e30)
SLOW_MEMORY = Estimate(device="A100", flops_per_s=1e30, bytes_per_s=1e9)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_estimates_are_flops_and_bytes_over_the_rates(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        x = torch.ones(32, 8)
    options: Any = {"loss": lambda y: y[0, 0], "bucket_mb": 1e-6}
    made = racksum.torch.profile(model, x, estimate=RATES, **options)
    assert (made.times, made.device) == ("estimated", "A100")
    assert "estimated" in made.to_toml().splitlines()[0]
    first, second = 2 * 32 * 8 * 16 / 1e6, 2 * 32 * 16 * 4 / 1e6
    # The first layer computes no gradient of its input.
    assert [(x.forward_us, x.backward_us) for x in made.tensors] == [
        (pytest.approx(first, abs=1e-6), pytest.approx(first, abs=1e-6)),
        (pytest.approx(second, abs=1e-6), pytest.approx(2 * second, abs=1e-6)),
    ]
    made = racksum.torch.profile(model, x, estimate=SLOW_MEMORY, **options)
    # Plain SGD reads weights and gradients, and writes weights.
    assert [x.update_us for x in made.tensors] == [
        pytest.approx(3 * 4 * x.elements / 1e3) for x in made.tensors
    ]
    # The first layer reads 32x8 and 8x16 floats, and writes 32x16.
    assert made.tensors[0].forward_us == pytest.approx(4 * (32 * 8 + 8 * 16 + 32 * 16) / 1e3)


def test_an_estimate_needs_no_memory():
    with torch.device("meta"):
        model, x = nn.Linear(200_000, 200_000), torch.ones(1, 200_000)
    made = racksum.torch.profile(model, x, estimate=RATES)
    assert sum(tensor.elements for tensor in made.tensors) == 200_000 * 200_001


def test_rows_of_an_embedding_are_read_and_not_the_table():
    model = nn.Embedding(100_000, 4)
    made = racksum.torch.profile(
        model, torch.tensor([3]), loss=lambda y: y[0, 0], estimate=SLOW_MEMORY
    )
    assert made.tensors[0].forward_us == pytest.approx(2 * 16 / 1e3)


@torch.library.custom_op("racksum_test::cost", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8)), "aten._int_mm.default"),
        (custom, "racksum_test.cost.default"),
    ],
)
def test_an_operation_of_unknown_cost_is_not_estimated(operation, name):
    class Costly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + operation(x.detach())

    model, x = Costly(32, 32), torch.ones(32, 32)
    with pytest.raises(racksum.BadArgument, match=f"the FLOPs of operation {name} are unknown"):
        racksum.torch.profile(model, x, estimate=RATES)
    assert racksum.torch.profile(model, x, repeats=1).times == "measured"


@pytest.mark.parametrize("foreach", [False, True])
def test_memory_that_an_operation_changes_is_read_and_written(foreach):
    model = nn.Linear(8, 16)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    made = racksum.torch.profile(model, torch.ones(1, 8), optimizer=momentum, estimate=SLOW_MEMORY)
    [tensor] = made.tensors
    # Momentum: buf *= 0.9; buf += gradient. Then the weights are updated.
    assert tensor.update_us == pytest.approx((2 + 3 + 3) * 4 * tensor.elements / 1e3)


def test_a_copy_reads_its_source_only():
    class Copies(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(1000).copy_(torch.empty(1000))
            torch.empty(1000).zero_()
            torch.empty(1000)[:10].view(5, 2).t()
            return super().forward(x)

    def forward_of(model: nn.Module) -> float:
        made = racksum.torch.profile(model, torch.ones(1, 2), estimate=SLOW_MEMORY)
        return made.tensors[0].forward_us

    assert forward_of(Copies(2, 2)) - forward_of(nn.Linear(2, 2)) == pytest.approx(3 * 4)


def test_an_expanded_tensor_has_the_memory_of_its_source():
    class Expands(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(1000, 1).expand(1000, 50).sum()
            return super().forward(x)

    def forward_of(model: nn.Module) -> float:
        made = racksum.torch.profile(model, torch.ones(1, 2), estimate=SLOW_MEMORY)
        return made.tensors[0].forward_us

    assert forward_of(Expands(2, 2)) - forward_of(nn.Linear(2, 2)) == pytest.approx(4.004)


def test_an_operation_takes_the_longer_of_its_two_times():
    model = nn.Linear(8, 16, bias=False)
    x = torch.ones(32, 8)
    flops, moved = 2 * 32 * 8 * 16, 4 * (32 * 8 + 8 * 16 + 32 * 16)
    for faster in (0.5, 2):
        rates = Estimate(device="A100", flops_per_s=flops * 1e3, bytes_per_s=moved * 1e3 * faster)
        made = racksum.torch.profile(model, x, loss=lambda y: y[0, 0], estimate=rates)
        assert made.tensors[0].forward_us == pytest.approx(1e3 * max(1, 1 / faster))
