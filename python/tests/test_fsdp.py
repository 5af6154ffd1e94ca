"""FSDP on the backend, and FSDP2 with replicas whose gradients racksum averages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import racksum
import racksum.torch
from ranks import TIMEOUT, Ranks, session_of_group

WORLD = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


def trained(shards: DeviceMesh, session: racksum.Session | None) -> list[torch.Tensor]:
    """Returns the weights after some steps of a model that is sharded over these ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 50), nn.GELU(), nn.Linear(50, 7))
    for part in model:
        fully_shard(part, mesh=shards)
    fully_shard(model, mesh=shards)
    if session is not None:
        racksum.torch.set_all_reduce_hook(model, session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(16, 30, generator=data)
        nn.functional.mse_loss(model(x), x[:, :7]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def on_gloo() -> list[torch.Tensor]:
    return trained(init_device_mesh("cpu", (WORLD,)), None)


def by_fsdp1(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(30, 50), nn.GELU(), nn.Linear(50, 7))
    model = FullyShardedDataParallel(net, process_group=group, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(16, 30, generator=data)
        nn.functional.mse_loss(model(x), x[:, :7]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in net.parameters()]


def fsdp1_on_the_backend(address: str, job: str) -> list[torch.Tensor]:
    options = racksum.torch.Options(aggregator=address, job=job, timeout=TIMEOUT)
    group = dist.new_group(backend="racksum", pg_options=options)
    weights = by_fsdp1(group)
    dist.destroy_process_group(group)
    return weights


def test_fsdp1_trains_on_the_backend(ranks, cluster):
    gloo = ranks.run(by_fsdp1, None)
    ours = ranks.run(fsdp1_on_the_backend, cluster.address, cluster.new_job())
    torch.testing.assert_close(ours, gloo)


def hooks_with_fsdp1(address: str, job: str) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with session_of_group(address, job) as session:
        with pytest.raises(racksum.BadArgument, match="shard with fully_shard, or give FSDP"):
            racksum.torch.set_all_reduce_hook(model, session)
        state = racksum.torch.HookState(session)
        model.register_comm_hook(state, racksum.torch.allreduce_hook)
        with pytest.raises(racksum.BadArgument, match=r"use racksum\.torch\.set_all_reduce_hook"):
            model(torch.ones(2, 4)).sum().backward()


def test_hooks_say_that_fsdp1_has_no_use_for_them(ranks, cluster):
    ranks.run(hooks_with_fsdp1, cluster.address, cluster.new_job())


def on_the_backend(address: str, job: str) -> list[torch.Tensor]:
    options = racksum.torch.Options(aggregator=address, job=job, timeout=TIMEOUT)
    group = dist.new_group(backend="racksum", pg_options=options)
    weights = trained(DeviceMesh.from_group(group, "cpu"), None)
    dist.destroy_process_group(group)
    return weights


def in_replicas(address: str, job: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replicas = mesh["replicas"].get_group()
    with racksum.torch.connect(address, group=replicas, job=job, timeout=TIMEOUT) as session:
        return trained(mesh["shards"], session)


@pytest.mark.parametrize("ours", [on_the_backend, in_replicas])
def test_training_is_as_with_gloo(ranks, cluster, ours):
    gloo = ranks.run(on_gloo)
    weights = ranks.run(ours, cluster.address, cluster.new_job())
    for rank in weights:
        for of_rank, of_gloo in zip(rank, gloo[0], strict=True):
            torch.testing.assert_close(of_rank, of_gloo)


def hook_of_what_is_whole(address: str, job: str) -> None:
    refused = pytest.raises(racksum.BadArgument, match="call fully_shard on it first")
    with session_of_group(address, job) as session, refused:
        racksum.torch.set_all_reduce_hook(nn.Linear(2, 2), session)


def hook_of_what_cannot_be() -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (WORLD,)))
    for wrong in ({"wire": "bogus"}, {"block": 33}):
        with pytest.raises(racksum.BadArgument, match=next(iter(wrong))):
            racksum.torch.set_all_reduce_hook(model, None, **wrong)
    with pytest.raises(racksum.BadArgument, match=r"session must be a .* not NoneType"):
        racksum.torch.set_all_reduce_hook(model, None)


def test_a_wire_or_a_block_that_cannot_be_is_refused_at_once(ranks):
    ranks.run(hook_of_what_cannot_be)


def test_a_model_that_is_not_sharded_is_refused(ranks, cluster):
    ranks.run(hook_of_what_is_whole, cluster.address, cluster.new_job())
