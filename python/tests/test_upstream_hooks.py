"""Hooks, the reducer and model averaging behave as PyTorch's own tests expect.

docs/c10d.md lists the behaviours.
"""

# DDP compares the annotations of hooks with types, so this module does not postpone annotations.
import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import racksum
import racksum.torch
from racksum.torch.compress import BlockTopK
from ranks import Checks, Ranks, backend_options, in_group, session_of_group

WORLD = 2

CHECKS = Checks()
check = CHECKS.add


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("behaviour", CHECKS, ids=lambda check: check.__name__)
def test_on_the_backend(ranks, shared_aggregator, behaviour):
    ranks.run(in_group, behaviour, shared_aggregator.address, "hooks")


@check
def a_future_may_be_waited_for_in_backward(group):
    def averaged(gradient: Tensor) -> Tensor:
        work = dist.all_reduce(gradient.clone(), group=group, async_op=True)
        return work.get_future().wait()[0]

    x = torch.ones(3, requires_grad=True)
    x.register_hook(averaged)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * WORLD] * 3


@check
def what_comes_after_a_future_may_wait_for_another(group):
    def again(future: Future[list[Tensor]]) -> Tensor:
        work = dist.all_reduce(future.wait()[0], group=group, async_op=True)
        return work.get_future().wait()[0]

    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work.get_future().then(again).wait().tolist() == [float(WORLD**2)] * 2


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(model: nn.Module, steps: int = 6) -> list[Tensor]:
    """Returns the weights after some steps on this rank's own data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 8, generator=data)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def ones_and_ones(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(torch.ones_like(bucket.buffer()))
    return future.then(lambda future: future.value() + 1)


def summed_and_halved(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda future: future.value()[0] / WORLD)


@check
def the_result_of_a_hook_is_the_gradient(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(None, ones_and_ones)
    model(torch.ones(1, 8)).sum().backward()
    assert all(p.grad.eq(2).all() for p in model.parameters())


def same_as_without(group: dist.ProcessGroup, state: Any, hook: Any, far: float = 1e-6) -> None:
    """Checks that training gives the same result with and without a hook."""
    without = trained(DistributedDataParallel(net(), process_group=group))
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(state, hook)
    for one, other in zip(trained(model), without, strict=True):
        torch.testing.assert_close(one, other, rtol=far, atol=far)


@check
def a_hook_that_reduces_through_the_backend(group: dist.ProcessGroup) -> None:
    same_as_without(group, group, summed_and_halved)


@check
def the_hooks_that_torch_brings(group: dist.ProcessGroup) -> None:
    same_as_without(group, group, default_hooks.allreduce_hook)
    same_as_without(group, group, default_hooks.fp16_compress_hook, 0.01)
    same_as_without(group, group, default_hooks.bf16_compress_hook, 0.05)
    same_as_without(
        group, group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 0.01
    )


def with_builtin_hook(group: dist.ProcessGroup | None, hook: str) -> list[Tensor]:
    """Returns the weights after training with a hook that torch implements in C++."""
    model = DistributedDataParallel(net(), process_group=group)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    return trained(model)


@check
def the_hook_in_c_that_reduces(group: dist.ProcessGroup) -> None:
    torch.testing.assert_close(
        with_builtin_hook(group, "ALLREDUCE"), with_builtin_hook(None, "ALLREDUCE")
    )


@check
def the_hook_in_c_that_casts_is_an_error_of_backward(group: dist.ProcessGroup) -> None:
    assert with_builtin_hook(None, "FP16_COMPRESS")
    with pytest.raises(RuntimeError, match="allreduce should return TensorList"):
        with_builtin_hook(group, "FP16_COMPRESS")


@check
def power_sgd(group: dist.ProcessGroup) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=8, start_powerSGD_iter=2)
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained(model)
    pickled = pickle.loads(pickle.dumps(state))
    assert pickled.iter == state.iter
    with pytest.raises(ValueError, match="start_powerSGD_iter"):
        powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=1)


@check
def local_sgd(group: dist.ProcessGroup) -> None:
    state = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=100)
    same_as_without(group, state, post_localSGD_hook.post_localSGD_hook)
    model = net()
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=0, process_group=group)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(1, 8)) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
    averager.average_parameters(model.parameters())
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(parts, mine, group=group)
    torch.testing.assert_close(parts[0], parts[1])


@check
def a_hook_that_cannot_be_is_refused_by_torch(group: dist.ProcessGroup) -> None:
    def of_an_int(state: object, bucket: int) -> Future[Tensor]: ...

    def an_int(state: object, bucket: dist.GradBucket) -> int: ...

    model = DistributedDataParallel(net(), process_group=group)
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        model.register_comm_hook(None, of_an_int)
    with pytest.raises(ValueError, match=r"annotation should be torch\.futures\.Future"):
        model.register_comm_hook(None, an_int)
    session = racksum.torch.HookState(None)
    model.register_comm_hook(session, racksum.torch.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(session, racksum.torch.allreduce_hook)


@check
def a_hook_that_returns_no_future_or_fails_is_an_error_of_backward(
    group: dist.ProcessGroup,
) -> None:
    def returns_one(state: object, bucket: dist.GradBucket):
        return 1

    def fails(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        raise ArithmeticError("no sum today")

    failed: Future[Tensor] = Future()
    failed.set_exception(ArithmeticError("no sum either"))  # type: ignore[arg-type]
    for hook, sentence in [
        (returns_one, r"must return a torch\.futures\.Future"),
        (fails, "no sum today"),
        (lambda state, bucket: failed, "no sum either"),
    ]:
        model = DistributedDataParallel(net(), process_group=group)
        model.register_comm_hook(None, hook)
        with pytest.raises((RuntimeError, ArithmeticError), match=sentence):
            model(torch.ones(1, 8)).sum().backward()


@check
def a_state_that_has_no_session_is_an_error_of_backward(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(racksum.torch.HookState(None), racksum.torch.allreduce_hook)
    with pytest.raises(racksum.BadArgument, match="the state has no session"):
        model(torch.ones(1, 8)).sum().backward()


@check
def a_session_in_place_of_a_state_is_an_error_of_backward(group: dist.ProcessGroup) -> None:
    backend = group._get_backend(torch.device("cpu"))
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(backend.session, racksum.torch.allreduce_hook)
    with pytest.raises(racksum.BadArgument, match=r"racksum\.torch\.HookState\(session\), not a"):
        model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(racksum.BadArgument, match=r"session must be a .* not ProcessGroup"):
        racksum.torch.HookState(group)
    with pytest.raises(racksum.BadArgument, match=r"session must be a .* not HookState"):
        racksum.torch.allreduce_sparse(racksum.torch.HookState(backend.session), torch.ones(1))


def reducer(group: dist.ProcessGroup, model: nn.Module, **options: Any) -> dist.Reducer:
    """Returns a reducer with a bucket for each run of parameters of one type."""
    parameters = list(model.parameters())
    by_type = itertools.groupby(range(len(parameters)), key=lambda i: parameters[i].dtype)
    buckets = [list(indices) for _, indices in by_type]
    sizes = [dist._DEFAULT_FIRST_BUCKET_BYTES] * len(buckets)
    return dist.Reducer(parameters, buckets, sizes, group, **options)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor, third: bool = True) -> Tensor:
        x = self.second(self.first(x).float())
        return self.third(x) if third else x


@check
def a_reducer_on_its_own(group: dist.ProcessGroup) -> None:
    torch.manual_seed(1)
    model = Mixed()
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError):
        dist.Reducer(
            parameters, [[*range(len(parameters))]], [dist._DEFAULT_FIRST_BUCKET_BYTES], group
        )
    expected = copy.deepcopy(model)
    by = reducer(group, model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters())
    for third in (False, True, True):
        optimizer.zero_grad()
        for each in (model, expected):
            each.zero_grad()
        by.prepare_for_forward()
        x = torch.full((2, 4), dist.get_rank() + 1.0, dtype=torch.float64)
        output = model(x, third)
        by.prepare_for_backward(output)
        output.sum().backward()
        both = torch.cat([torch.full((2, 4), rank + 1.0) for rank in range(WORLD)]).double()
        (expected(both, third).sum() / WORLD).backward()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert third or model.third.weight.grad is None
        optimizer.step()
        expected.load_state_dict(model.state_dict())


@check
def gradients_are_divided_by_the_ranks_that_have_data(group: dist.ProcessGroup) -> None:
    for by_all in (True, False):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
        steps = 1 + dist.get_rank()
        with model.join(divide_by_initial_world_size=by_all):
            for _ in range(steps):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
        # In its last step the second rank is alone.
        if dist.get_rank() == 1:
            assert model.module.weight.grad.item() == (0.5 if by_all else 1.0)


@check
def ddp_on_a_mesh(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = DistributedDataParallel(net(), device_mesh=mesh)
    plain = DistributedDataParallel(net(), process_group=group)
    for one, other in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(one, other)


def another_group(address: str, job: str) -> None:
    """Continues DDP in a group that was made later."""
    groups = [
        dist.new_group(backend="racksum", pg_options=backend_options(address, f"{job}-{i}"))
        for i in range(2)
    ]
    model = DistributedDataParallel(net(), process_group=groups[0])
    trained(model, steps=2)
    model._update_process_group(groups[1])
    dist.destroy_process_group(groups[0])
    after = trained(model, steps=2)
    plain = DistributedDataParallel(net(), process_group=groups[1])
    trained(plain, steps=2)
    for one, other in zip(after, trained(plain, steps=2), strict=True):
        assert torch.equal(one, other)
    dist.destroy_process_group(groups[1])


def test_ddp_goes_on_in_another_group(ranks, cluster):
    ranks.run(another_group, cluster.address, cluster.new_job())


def smaller_buckets(address: str, job: str) -> None:
    """Checks the error that is raised if a bucket's size differs from its residual's."""
    with session_of_group(address, job) as session:
        state = racksum.torch.HookState(session, compressor=BlockTopK(1))
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        trained(model, steps=4)
        other = DistributedDataParallel(nn.Linear(8, 4))
        other.register_comm_hook(state, racksum.torch.allreduce_hook)
        with pytest.raises(racksum.BadArgument, match=r"has 36 elements, but its residual has \d+"):
            trained(other)
        trained(model, steps=1)


def test_a_bucket_that_changes_its_size_is_refused_and_the_session_goes_on(ranks, cluster):
    ranks.run(smaller_buckets, cluster.address, cluster.new_job())


def wrapped_by_torch(address: str, job: str) -> None:
    """Wraps the hook in torch's wrapper, which casts gradients before racksum sums them."""
    with session_of_group(address, job) as session:
        model = DistributedDataParallel(net())
        hook = default_hooks.bf16_compress_wrapper(racksum.torch.allreduce_hook)
        model.register_comm_hook(racksum.torch.HookState(session), hook)
        plain = DistributedDataParallel(net())
        for one, other in zip(trained(model), trained(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_the_hook_in_a_hook_that_torch_brings(ranks, cluster):
    ranks.run(wrapped_by_torch, cluster.address, cluster.new_job())
