"""Trains with DDP and racksum's hook: two more lines than with Gloo alone.

pip install './python[torch]'
racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --standalone --nproc-per-node 2 ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum.torch

STEPS, BATCH = 100, 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
        )
    )
    session = racksum.torch.connect()
    model.register_comm_hook(racksum.torch.HookState(session), racksum.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Each rank draws its own samples. The model learns the length of a vector.
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(BATCH, 16, generator=draw)
        loss = nn.functional.mse_loss(model(x), x.norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        sent = session.stats()["tx_bytes"]
        print(f"rank 0 sent {sent / STEPS / 1e3:.0f} kB a step")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
