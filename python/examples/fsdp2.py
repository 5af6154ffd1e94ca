"""Trains with FSDP2: each replica shards the model, and racksum averages the shards' gradients.

pip install './python[torch]'
racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --standalone --nproc-per-node 4 fsdp2.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import racksum.torch

STEPS, BATCH, REPLICAS = 50, 32, 2


def main() -> None:
    dist.init_process_group("gloo")
    shape = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
    for part in model:
        fully_shard(part, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    # The ranks with the same shard form a job.
    session = racksum.torch.connect(group=mesh["replicas"].get_group())
    racksum.torch.set_all_reduce_hook(model, session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(BATCH, 16, generator=draw)
        loss = nn.functional.mse_loss(model(x), x.norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # The mesh keeps threads of Gloo alive, which may abort Python while it finalizes.
    sys.stdout.flush()
    os._exit(0)
