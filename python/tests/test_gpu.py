"""Training and collectives with tensors that are staged on the host, compared with Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import racksum
import test_backend
import test_ddp
from conftest import Aggregator
from racksum.torch.compress import BlockTopKRatio
from racksum.torch.staging import Staging
from ranks import Ranks
from test_ddp import THROUGH, keywords


class Devices(Ranks):
    """Ranks with tensors on a device. Host tensors take the path of GPU tensors."""

    def __init__(self, world: int, device: str) -> None:
        super().__init__(world)
        self.device = device
        super().run(be_of, device)

    def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Like the base method, but copies the results to the host."""
        return super().run(on_host, work, *arguments, **named)


def be_of(device: str) -> None:
    torch.set_default_device(device)
    Staging.takes = staticmethod(lambda of: of.type == device)


def on_host(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, torch.Tensor.cpu, work(*arguments, **named)
    )


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def two(request: pytest.FixtureRequest) -> Iterator[Devices]:
    ranks = Devices(2, request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=DEVICES)
def three(request: pytest.FixtureRequest, shared_aggregator: Aggregator) -> Iterator[Devices]:
    ranks = Devices(test_backend.WORLD, request.param)
    ranks.run(make_group, shared_aggregator.address, request.param)
    yield ranks
    ranks.close()


def make_group(address: str, device: str) -> None:
    options = racksum.torch.Options(aggregator=address, job=f"of {device}")
    test_backend._groups["racksum"] = dist.new_group(backend="racksum", pg_options=options)
    test_backend._groups["gloo"] = None


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
    ],
    ids=keywords,
)
def test_training_is_as_with_gloo(two, cluster, through, options):
    gloo = two.run(test_ddp.train, "gloo", "", "", **options)
    ours = two.run(test_ddp.train, through, cluster.address, cluster.new_job(), **options)
    for of_gloo, of_one, of_other in zip(gloo[0], ours[0], ours[1], strict=True):
        assert torch.equal(of_one, of_other), "the weights of the ranks differ"
        torch.testing.assert_close(of_one, of_gloo)


def test_a_narrow_wire_is_near(two, cluster):
    exact = two.run(test_ddp.train, "hook", cluster.address, cluster.new_job())
    state = {"wire": "bf16"}
    near = two.run(test_ddp.train, "hook", cluster.address, cluster.new_job(), state=state)
    for one, other in zip(exact[0], near[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
    assert not torch.equal(exact[0][0], near[0][0])


def test_what_a_compressor_keeps(two, cluster):
    def trained(share: float) -> list[torch.Tensor]:
        state = {"compressor": BlockTopKRatio(share, 32), "block": 32}
        job = cluster.new_job()
        weights = two.run(test_ddp.train, "hook", cluster.address, job, state=state)
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other)
        return weights[0]

    whole = two.run(test_ddp.train, "gloo", "", "")[0]
    for weight, of_gloo in zip(trained(1.0), whole, strict=True):
        torch.testing.assert_close(weight, of_gloo)
    assert not torch.allclose(trained(0.1)[0], whole[0])


@pytest.mark.parametrize("through", THROUGH)
def test_a_lost_rank_is_an_error_of_backward_with_its_type(two, cluster, through):
    results = two.run(test_ddp.lose_a_rank, through, cluster.address, cluster.new_job(), False)
    assert results == ["lost (1,)", "left"]


def test_the_process_group_averages_when_the_aggregator_is_gone(two, aggregator):
    job = f"fallback-{aggregator.process.pid}"
    weights = two.run(test_ddp.fall_back, aggregator.address, job)
    gloo = two.run(test_ddp.train_twice)
    for one, other, of_gloo in zip(*weights, gloo[0], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, of_gloo)


@pytest.mark.parametrize("op", ["SUM", "MAX", "PRODUCT"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_allreduce(three, op, dtype):
    three.run(test_backend.check_allreduce, op, dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_collectives(three, dtype):
    three.run(test_backend.check_collectives, dtype)


@pytest.mark.parametrize(
    "check",
    [
        test_backend.check_average,
        test_backend.check_booleans_and_complex_numbers,
        test_backend.check_average_of_integers,
        test_backend.check_bits,
        test_backend.check_gathering_in_place,
        test_backend.check_exchanges,
        test_backend.check_objects,
        test_backend.check_asynchronous,
        test_backend.check_sparse,
    ],
)
def test_other_collectives(three, check):
    three.run(check)


def test_what_one_rank_sends_another_is_of_the_host(three):
    three.run(check_sending)


def check_sending() -> None:
    with pytest.raises(racksum.BadArgument, match=r"pass x\.cpu\(\)"):
        dist.send(torch.ones(3), (dist.get_rank() + 1) % 3, group=test_backend._groups["racksum"])


def test_subsets_and_a_barrier(three, shared_aggregator):
    three.run(test_backend.check_subsets, shared_aggregator.address)
