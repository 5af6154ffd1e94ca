"""Trains on the racksum backend: all of torch.distributed goes through it, DDP included.

pip install './python[torch]'
racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --standalone --nproc-per-node 2 backend.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum.torch

STEPS, BATCH = 50, 32


def main() -> None:
    dist.init_process_group("racksum", pg_options=racksum.torch.Options(wire="bf16"))
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    parts = [torch.empty(1) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    if rank == 0:
        print(f"the ranks add up to {x[0].item():g}, and they are {[int(p) for p in parts]}")

    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(BATCH, 16, generator=draw)
        loss = nn.functional.mse_loss(model(x), x.norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
