"""Studies report the right figures, and leave the model unchanged."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import racksum
import racksum.torch
from racksum.torch import steps
from racksum.torch.study import Bucket, Study
from ranks import Ranks

ROWS, WIDTH = 1000, 64


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.words(x).mean(1))))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batches(rows: list[int]) -> Any:
    while True:
        yield torch.tensor(rows).repeat(8, 1)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_study_changes_nothing(sparse):
    torch.manual_seed(1)
    model = Net(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9)
    loss(model, next(batches([1, 2]))).backward()
    optimizer.step()
    before = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": str(optimizer.state_dict()),
        "random": torch.get_rng_state(),
    }
    gradient = model.out.weight.grad
    racksum.torch.study(model, batches([5]), loss, optimizer=optimizer, steps=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before["model"][name]), name
    assert str(optimizer.state_dict()) == before["optimizer"]
    assert torch.equal(torch.get_rng_state(), before["random"])
    assert model.out.weight.grad is gradient
    assert model.training


class Fine(torch.optim.SGD):
    """An optimizer whose state is more precise than its parameters, as in mixed precision."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", torch.zeros(1))
            kept += 0.12345
        self.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("fails", [False, True])
def test_an_optimizer_keeps_what_it_has_to_the_bit(fails):
    model = nn.Linear(WIDTH, 10).bfloat16()
    optimizer = Fine(model.parameters(), lr=0.1)
    loss(model, torch.ones(8, WIDTH, dtype=torch.bfloat16)).backward()
    optimizer.step()
    kept = [optimizer.state[parameter]["kept"] for parameter in model.parameters()]
    group = optimizer.param_groups[0]

    def batches_that_end() -> Any:
        yield from [torch.ones(8, WIDTH, dtype=torch.bfloat16)] * (2 if fails else 9)

    with pytest.raises(racksum.BadArgument) if fails else contextlib.nullcontext():
        racksum.torch.study(model, batches_that_end(), loss, optimizer=optimizer, steps=2)
    for parameter, own in zip(model.parameters(), kept, strict=True):
        assert optimizer.state[parameter]["kept"] is own
        assert own.dtype == torch.float32
        assert own.item() == pytest.approx(0.12345)
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 0.05


@pytest.mark.gpu
def test_times_of_a_gpu_are_of_what_it_does_and_not_of_giving_it_work():
    width = 4096
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).cuda()
    batch = torch.ones(width, width, device="cuda")
    state = torch.cuda.get_rng_state()
    found = racksum.torch.study(model, itertools.repeat(batch), loss, steps=3, bucket_cap_mb=64)
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss(model, batch).backward()
    torch.cuda.synchronize()
    assert found.compute == pytest.approx(time.perf_counter() - start, rel=0.5)
    ready = [bucket.ready for bucket in found.buckets]
    assert len(ready) > 1
    assert sorted(ready) == ready
    # Backward takes two thirds of a step, and a layer a quarter of backward.
    assert ready[0] < 0.8 * ready[-1] <= found.compute
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("sparse", [False, True])
def test_density_is_the_share_of_blocks_that_are_not_zero(sparse):
    model = nn.Embedding(ROWS, WIDTH, sparse=sparse)
    found = racksum.torch.study(model, batches([0, 1, 7]), loss, steps=1, world=4)
    [bucket] = found.buckets
    assert bucket.elements == ROWS * WIDTH
    assert bucket.sparse == sparse
    # The three rows of 64 elements fill six blocks of 32, or three of 64. They lie in two blocks of
    # 256, each of which has four rows.
    assert bucket.density[32] == pytest.approx(6 / (ROWS * 2))
    assert bucket.density[64] == pytest.approx(3 / ROWS)
    assert bucket.density[256] == pytest.approx(2 / (ROWS / 4))
    assert not found.compared
    assert bucket.union[64] == pytest.approx(1 - (1 - 3 / ROWS) ** 4)


def test_ranks_compare_their_blocks():
    ranks = Ranks(2)
    of_ranks = ranks.run(union_of_ranks)
    ranks.close()
    assert of_ranks == [(True, 2, pytest.approx(3 / ROWS))] * 2


def union_of_ranks() -> tuple[bool, int, float]:
    model = nn.Embedding(ROWS, WIDTH)
    rows = [0, 1] if dist.get_rank() == 0 else [1, 2]
    found = racksum.torch.study(model, batches(rows), loss, steps=1)
    return found.compared, found.world, found.buckets[0].union[64]


class Moving(nn.Module):
    """A model that replaces its buffers with new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = x
        return self.out(x - self.mean)


def test_buffers_that_forward_replaces_are_put_back():
    model = Moving()
    mean = model.mean
    racksum.torch.study(model, [torch.ones(1, 2)] * 4, loss, steps=1)
    assert model.mean is mean
    assert mean.tolist() == [0, 0]
    assert model.last is None


def one_loader_is_short() -> str:
    batches = [torch.ones(1, 2)] * (3 + dist.get_rank())
    with pytest.raises(racksum.BadArgument) as error:
        racksum.torch.study(nn.Linear(2, 2), batches, loss, steps=1)
    return str(error.value)


class Alternating(nn.Module):
    """A model that applies its layers in a different order at each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layers if dist.get_rank() == 0 else reversed(self.layers)
        return other(one(x))


def other_buckets() -> bool:
    batches = itertools.repeat(torch.ones(1, 64))
    return racksum.torch.study(Alternating(), batches, loss, steps=1, bucket_cap_mb=0.02).compared


def buffers_of_ranks() -> bool:
    """Returns whether ranks keep their own buffers. DDP alone would copy the first rank's."""
    model = Moving()
    model.mean += dist.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False)
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.mean[0].item()))
    racksum.torch.study(wrapped, [torch.ones(1, 2)] * 4, loss, steps=1)
    return seen[0] == dist.get_rank()


def test_ranks_make_their_steps_alone():
    ranks = Ranks(2)
    try:
        assert ranks.run(one_loader_is_short) == [
            f"{start}the loader has fewer than 4 batches: 1 to time, 2 to warm up, and one whose "
            "gradients are examined; pass a longer loader, or fewer steps"
            for start in ("", "the study failed at rank 0: ")
        ]
        assert ranks.run(other_buckets) == [False, False]
        assert ranks.run(buffers_of_ranks) == [True, True]
    finally:
        ranks.close()


def bucket(megabytes: float, ready: float, density: float = 1.0, union: float = 1.0) -> Bucket:
    blocks = (32, 64, 128, 256, 512, 1024)
    return Bucket(
        elements=int(megabytes * 250_000),
        sparse=False,
        ready=ready,
        scan=0.0,
        density=dict.fromkeys(blocks, density),
        union=dict.fromkeys(blocks, union),
    )


def study_of(*buckets: Bucket, compute: float = 0.1, after: float = 0.0) -> Study:
    return Study(world=4, compute=compute, after=after, compared=True, buckets=list(buckets))


def test_time_on_the_link_is_added_to_what_it_does_not_overlap():
    headers = 1 + 68 / 1432
    dense = study_of(bucket(100, ready=0.1))
    assert dense.step_time(1) == pytest.approx(0.1 + 0.8 * headers)
    assert dense.ring_time(1) == pytest.approx(0.1 + 1.2 * headers)
    assert dense.step_time(1, "bf16") == pytest.approx(0.1 + 0.4 * headers)
    early = study_of(bucket(5, ready=0.02), bucket(1, ready=0.1))
    assert early.step_time(1) == pytest.approx(0.1 + 0.008 * headers), "no transfer overlapped"
    late = study_of(bucket(100, ready=0.02), bucket(1, ready=0.1), after=0.01)
    assert late.step_time(1) == pytest.approx(0.02 + 0.808 * headers + 0.01)
    sparse = study_of(bucket(100, ready=0.1, density=0.01, union=0.04))
    assert sparse.step_time(1) == pytest.approx(0.1 + 0.032 * headers)
    assert sparse.sent() == pytest.approx(1e6 * headers)


def test_the_best_of_wires_and_blocks_is_found():
    found = study_of(bucket(100, ready=0.1))
    assert found.predict(1).wire == "f32"
    assert found.predict(1, ("f32", "bf16", "int8")).wire == "int8"
    fine = bucket(100, ready=0.1)
    fine.density.update({32: 0.01})
    fine.union.update({32: 0.02})
    assert study_of(fine).predict(1).block == 32


def test_a_link_on_which_f32_is_the_best_is_there_once():
    found = study_of(bucket(0.00001, ready=0.1))
    rows = str(found).splitlines()
    [head] = [i for i, row in enumerate(rows) if "Gbit/s" in row]
    assert len(rows[head + 1 :]) == len(found.links)
    assert len(json.loads(found.to_json())["predictions"]) == len(found.links)


def test_what_is_said_of_it(tmp_path):
    found = study_of(bucket(100, ready=0.05), bucket(2, ready=0.1, density=0.01, union=0.03))
    text = str(found)
    assert "4 ranks, 100.0 ms of compute a step" in text
    assert "1.00%  3.00%" in text
    known = json.loads(found.to_json())
    assert len(known["predictions"]) == 8
    assert known["ring_bytes"] == pytest.approx(153e6)
    found.plot(tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert "1 rank, 100.0 ms" in str(replace(found, world=1))


def test_a_picture_that_cannot_be_written_leaves_what_was_there(tmp_path):
    picture = tmp_path / "study.png"
    picture.write_bytes(b"an earlier one")
    sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a full disk, this limit lets only a part be written.
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, sizes[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            study_of(bucket(100, ready=0.1)).plot(picture)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, sizes)
        signal.signal(signal.SIGXFSZ, ignored)
    assert picture.read_bytes() == b"an earlier one"
    assert list(tmp_path.iterdir()) == [picture]


class Around(torch.optim.SGD):
    """An optimizer that contains another optimizer."""

    def __init__(self, parameters: Any, kept: Callable[[Any], Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.kept = kept(torch.optim.Adam(self.param_groups[0]["params"]))

    def step(self, closure: Any = None) -> None:
        raise AssertionError("the study stepped an optimizer that it must refuse")


def test_what_cannot_be_studied_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(racksum.BadArgument, match="steps must be 1 or more"):
        racksum.torch.study(model, batches([1]), loss, steps=0)
    with pytest.raises(racksum.BadArgument, match="the loader has fewer than 8 batches"):
        racksum.torch.study(model, [torch.ones(1, 2)] * 7, loss)
    with pytest.raises(racksum.BadArgument, match="no parameter of the model requires gradients"):
        racksum.torch.study(nn.ReLU(), [], loss)
    for link in (0, -1, float("nan")):
        with pytest.raises(racksum.BadArgument, match="links must be finite and above 0"):
            racksum.torch.study(model, [], loss, links=[10, link])
    with pytest.raises(racksum.BadArgument, match="run it on a batch first"):
        racksum.torch.study(nn.LazyLinear(2), [], loss)
    with pytest.raises(racksum.BadArgument, match="LBFGS needs a closure"):
        racksum.torch.study(model, [], loss, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(racksum.BadArgument, match=r"optimizer must be a .* not str"):
        racksum.torch.study(model, [], loss, optimizer="sgd")
    with pytest.raises(racksum.BadArgument, match=r"loss must be a function .* not NoneType"):
        racksum.torch.study(model, [], None)
    with pytest.raises(racksum.BadArgument, match="loss must return a tensor, not NoneType"):
        racksum.torch.study(model, batches([1]), lambda *_: None)
    for kept in (lambda it: it, lambda it: [it], lambda it: {it}, lambda it: {"adam": (it,)}):
        with pytest.raises(racksum.BadArgument, match="Around contains another optimizer"):
            racksum.torch.study(model, [], loss, optimizer=Around(model.parameters(), kept))


def test_the_search_for_blocks_is_timed_when_it_is_warm_and_by_its_median(monkeypatch):
    took = (90.0, 3.0, 1.0, 2.0, 80.0, 2.5)
    clock = itertools.chain.from_iterable((0.0, seconds) for seconds in took)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert steps._seconds_to_scan(torch.zeros(4)) == 2.5
