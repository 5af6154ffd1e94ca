"""DDP with the hook and on the backend: training gives the same result as with Gloo."""

from __future__ import annotations

import os
import pickle
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
from racksum.torch.compress import BlockTopK, Rounded
from racksum.torch.hook import _lane
from ranks import Ranks, session_of_group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


class Net(nn.Module):
    """A model with a layer that only some steps use, and an embedding. A batch uses few rows."""

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
    """Wraps a model whose gradients go through the hook, the backend or Gloo."""
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
    """Trains for a few steps, and returns the weights."""
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
        assert torch.equal(of_one, of_other), "the weights of the ranks differ"
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


TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Typed(nn.Module):
    """A model with parameters of every type, so that there is a bucket of each."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(300, dtype=dtype) for dtype in TYPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x.to(scale.dtype) * scale
        return x.float().square().mean()


def train_typed(through: str, address: str, job: str, **state: Any) -> list[torch.Tensor]:
    model = Typed()
    with ranks_of.wrapped(model, through, address, job, state) as wrapped:
        for step in range(4):
            wrapped(torch.full((300,), 1.0 + step + dist.get_rank())).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1.0)
                    parameter.grad = None
    return [parameter.detach().double() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("through", "state"),
    [
        ("hook", {"wire": "bf16"}),
        ("hook", {"wire": "f16"}),
        ("hook", {"wire": "f32"}),
        ("hook", {"wire": "int8"}),
        ("hook", {"compressor": Rounded("bf16")}),
        ("backend", {"wire": "bf16"}),
        ("backend", {"wire": "fixed32"}),
    ],
    ids=str,
)
def test_a_narrow_wire_serves_parameters_of_every_type(ranks, cluster, through, state):
    exact = ranks.run(train_typed, "gloo", "", "")
    near = ranks.run(train_typed, through, cluster.address, cluster.new_job(), **state)
    torch.testing.assert_close(near, exact, rtol=0.03, atol=0.03)
    assert all(torch.equal(*of_ranks) for of_ranks in zip(*near, strict=True))


def lose_a_rank(through: str, address: str, job: str, static: bool) -> str:
    """Trains until rank 1 leaves. At rank 0, returns the error that backward raises."""
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
    results = ranks.run(lose_a_rank, through, cluster.address, cluster.new_job(), static)
    assert results == ["lost (1,)", "left"]


def fall_back(addresses: str, job: str) -> list[torch.Tensor]:
    """Trains, kills the aggregator before the third step, and returns the weights."""
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


def train_on_uneven_data(
    through: str, address: str, job: str, *, fallback: str = "raise"
) -> list[torch.Tensor]:
    """Trains ranks with different numbers of batches. Ranks without data join the others.

    With a fallback, the aggregator is killed once rank 0 has no data left.
    """
    state = {"fallback": fallback} if through == "hook" else {}
    with wrapped(through, address, job, state, bucket_cap_mb=0.01) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(3 + 2 * dist.get_rank()):
                if step == 3 and fallback != "raise":
                    os.kill(int(job.rpartition("-")[2]), signal.SIGKILL)
                x = torch.full((4, 8), step + dist.get_rank(), dtype=torch.long)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("through", THROUGH)
def test_ranks_whose_data_ends_join_the_others(ranks, cluster, through):
    weights = ranks.run(train_on_uneven_data, through, cluster.address, cluster.new_job())
    assert len(weights[0]) == len(weights[1])


def test_ranks_that_have_joined_others_fall_back_with_them(ranks, aggregator):
    job = f"fallback-{aggregator.process.pid}"
    with_hook = ranks.run(
        train_on_uneven_data, "hook", aggregator.address, job, fallback="process_group"
    )
    gloo = ranks.run(train_on_uneven_data, "gloo", "", "")
    for one, other, of_gloo in zip(*with_hook, gloo[1], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, of_gloo)


class Constant(nn.Module):
    """A model whose gradients depend on the rank and not on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(4000) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer * x * (i + 1)).sum() for i, layer in enumerate(self.layers))


def fall_back_from_a_compressor(address: str, job: str) -> tuple[list[torch.Tensor], int]:
    """Returns the weights, which are sums of gradients, and the number of non-zero residuals."""
    model = DistributedDataParallel(Constant(), bucket_cap_mb=0.01)
    x = torch.linspace(1, 2, 4000) + dist.get_rank()
    with session_of_group(address, job) as session:
        state = racksum.torch.HookState(
            session, compressor=BlockTopK(2, block=32), fallback="process_group"
        )
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        for step in range(7):
            if step == 5:
                left_out = sum(r.count_nonzero().item() for r in state.memory.residuals.values())
                os.kill(int(job.rpartition("-")[2]), signal.SIGKILL)
            model.zero_grad()
            model(x).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad)
    return [parameter.detach() for parameter in model.parameters()], left_out


def test_what_compressors_left_out_is_averaged_by_the_process_group(ranks, aggregator):
    job = f"fallback-{aggregator.process.pid}"
    for weights, left_out in ranks.run(fall_back_from_a_compressor, aggregator.address, job):
        assert left_out > 10_000
        for i, layer in enumerate(weights):
            torch.testing.assert_close(layer, 7 * (i + 1) * (torch.linspace(1, 2, 4000) + 0.5))


class Breaks:
    """A compressor that fails at rank 1 after a number of buckets."""

    def __init__(self, after: int) -> None:
        self.left = after

    def compress(self, x: torch.Tensor, name: str) -> Any:
        if dist.get_rank() == 1 and self.left == 0:
            raise racksum.BadArgument("it breaks")
        self.left -= 1
        return [x], None

    def decompress(self, tensors: list[torch.Tensor], ctx: Any) -> torch.Tensor:
        return tensors[0]


def fail_alone(address: str, job: str, after: int) -> str:
    """Trains until rank 1 alone fails. Returns the error at this rank."""
    model = DistributedDataParallel(Constant(), bucket_cap_mb=0.01)
    own = dist.new_group(backend="gloo")
    with session_of_group(address, job, timeout=3.0) as session:
        state = racksum.torch.HookState(
            session, compressor=Breaks(after), fallback="process_group", process_group=own
        )
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        try:
            for _ in range(4):
                model(torch.ones(4000)).backward()
        except racksum.Error as error:
            # Rank 1 must not end while rank 0 waits.
            dist.barrier()
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("after", "error"),
    [(0, "Mismatch: op "), (1, "Error: cannot find out whether all ranks averaged bucket 0: ")],
    ids=["the op fails", "the op ends"],
)
def test_a_rank_that_fails_alone_is_not_waited_for_by_the_group(ranks, cluster, after, error):
    of_others, own = ranks.run(fail_alone, cluster.address, cluster.new_job(), after)
    assert of_others.startswith(error)
    assert own == "BadArgument: it breaks"


class Crossed(nn.Module):
    """A model with layers of the same shape, which it uses in a given order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


def crossed(order: list[int], state: racksum.torch.HookState) -> DistributedDataParallel:
    """Returns the model, with each layer in a bucket of its own."""
    model = DistributedDataParallel(Crossed(order), bucket_cap_mb=0.01)
    model.register_comm_hook(state, racksum.torch.allreduce_hook)
    return model


def steps_of(model: DistributedDataParallel, seed: int, count: int) -> None:
    data = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(count):
        model.zero_grad()
        model(torch.randn(4, 64, generator=data)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)


def resume(address: str, job: str, order: list[int]) -> bool:
    """Returns whether training gives the same result with and without a break."""
    with session_of_group(address, job) as session:
        state = racksum.torch.HookState(session, compressor=BlockTopK(8, block=32))
        model = crossed(order, state)
        steps_of(model, 0, 5)
        weights, pickled = pickle.dumps(model.module.state_dict()), pickle.dumps(state)
        # After a break, some steps are sent uncompressed. Send the same steps uncompressed here.
        state.start_iter = 7
        steps_of(model, 10, 5)

        state = pickle.loads(pickled)
        state.session = session
        resumed = crossed(order, state)
        resumed.module.load_state_dict(pickle.loads(weights))
        steps_of(resumed, 10, 5)

        state = pickle.loads(pickled)
        state.session = session
        other = crossed(order[::-1], state)
        steps_of(other, 10, 2)
        with pytest.raises(racksum.BadArgument, match="which belong to other parameters"):
            steps_of(other, 10, 1)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_training_that_is_resumed_comes_to_the_same(ranks, cluster, order):
    assert ranks.run(resume, cluster.address, cluster.new_job(), order) == [True, True]


class FakeBucket:
    def __init__(self, index: int, count: int) -> None:
        self.index, self.is_last = (lambda: index), (lambda: index == count - 1)


@pytest.mark.parametrize(
    ("lanes", "buckets", "expected"),
    [(1, 3, [0, 0, 0]), (3, 2, [2, 0]), (3, 3, [2, 1, 0]), (3, 5, [2, 1, 0, 0, 0])],
)
def test_the_last_bucket_is_in_lane_0(cluster, lanes, buckets, expected):
    with cluster.connect(lanes=lanes) as session:
        state = racksum.torch.HookState(session, prioritize=True)
        assert [_lane(state, FakeBucket(i, buckets)) for i in range(buckets)] == expected


def train_in_lanes(address: str, job: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    with session_of_group(address, job, lanes=3) as session:
        state = racksum.torch.HookState(session, prioritize=True)
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        return _train(model, 5, uneven=False, accumulate=False)


def test_buckets_in_lanes_are_averaged_all_the_same(ranks, aggregator):
    weights = ranks.run(train_in_lanes, aggregator.address, "lanes")
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    for one, plain in zip(weights[0], ranks.run(train, "gloo", "", "")[0], strict=True):
        torch.testing.assert_close(one, plain)
