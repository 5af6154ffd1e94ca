"""What the examples share: their flags, the group of ranks, and the line that each prints."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum
import racksum.torch

Loss = Callable[[], torch.Tensor]


def flags(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """The flags that all examples have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "racksum"], default="racksum")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--wire", help="how gradients travel with racksum: bf16, f16, int8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=int, metavar="N", help="print the loss every N steps")
    return parser


class Run:
    """A training run of some ranks, as torchrun started them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # DDP itself needs a group, for what it does besides gradients.
        dist.init_process_group("gloo")
        self.arguments = arguments
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(1)
        torch.manual_seed(arguments.seed)
        self.session = racksum.connect() if arguments.backend == "racksum" else None
        self.ring_bytes: int | None = None

    def wrap(
        self, model: nn.Module, *, sparse: bool = False, **options: Any
    ) -> DistributedDataParallel:
        """The model for all ranks: these are the lines that a script changes."""
        wrapped = DistributedDataParallel(model, **options)
        if self.session is not None:
            state = racksum.torch.State(self.session, wire=self.arguments.wire)
            wrapped.register_comm_hook(state, racksum.torch.allreduce_hook)
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # Gloo counts nothing; its ring sends each byte of dense gradients this often.
        self.ring_bytes = None if sparse else 2 * (self.world - 1) * gradient_bytes // self.world
        return wrapped

    def train(self, step: Loss, held_out: Loss, samples: int) -> None:
        """Trains, and prints what came of it.

        :param step: Makes a step on ``samples`` samples of this rank; the loss before it.
        :param held_out: The loss on samples that nobody trains on.
        """
        arguments = self.arguments
        step()
        before = self._sent()
        took = 0.0
        for i in range(1, arguments.steps):
            start = time.perf_counter()
            step()
            took += time.perf_counter() - start
            if arguments.curve and i % arguments.curve == 0:
                self._say(step=i, loss=self._mean(held_out))
        steps = max(arguments.steps - 1, 1)
        sent = self.ring_bytes if self.session is None else (self._sent() - before) // steps
        self._say(
            backend=arguments.backend,
            ranks=self.world,
            steps_per_s=round(steps / took, 2),
            samples_per_s=round(steps * samples * self.world / took),
            sent_bytes_per_step=sent,
            final_loss=self._mean(held_out),
        )
        if self.session is not None:
            self.session.close()
        dist.destroy_process_group()

    def _sent(self) -> int:
        """Bytes that this rank's session has sent so far."""
        return self.session.stats()["tx_bytes"] if self.session is not None else 0

    def _mean(self, held_out: Loss) -> float:
        with torch.no_grad():
            mean = held_out().detach().clone()
        dist.all_reduce(mean)
        return round(mean.item() / self.world, 6)

    def _say(self, **what: Any) -> None:
        if self.rank == 0:
            print(json.dumps(what), flush=True)
