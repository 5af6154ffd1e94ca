"""Trains a large embedding: a step touches few rows, and only those are sent.

pip install './python[torch]'
racksum aggregator &
export RACKSUM_AGGREGATOR=127.0.0.1:7177
torchrun --standalone --nproc-per-node 2 embedding.py            # dense gradients
torchrun --standalone --nproc-per-node 2 embedding.py --sparse   # sparse ones
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum.torch

ROWS, WIDTH, STEPS, BATCH = 20_000, 64, 30, 64


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    embedding = nn.Embedding(ROWS, WIDTH, sparse="--sparse" in sys.argv)
    model = DistributedDataParallel(nn.Sequential(embedding, nn.Linear(WIDTH, 1)))
    session = racksum.torch.connect()
    # One block for each row, so that only touched rows are sent.
    state = racksum.torch.HookState(session, block=WIDTH)
    model.register_comm_hook(state, racksum.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        # Some rows are drawn far more often than others, like the words of a text.
        rows = (ROWS ** torch.rand(BATCH, generator=draw)).long().clamp(max=ROWS - 1)
        loss = nn.functional.mse_loss(model(rows).squeeze(1), (rows % 2).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        sent, dense = session.stats()["tx_bytes"] / STEPS, ROWS * WIDTH * 4
        print(f"rank 0 sent {sent / 1e3:.0f} kB a step; a dense gradient is {dense / 1e3:.0f} kB")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
