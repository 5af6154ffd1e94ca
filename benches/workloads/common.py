"""Shared code of the workloads: flags, the group of ranks, and the printed lines."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import racksum
import racksum.torch
from racksum.torch.compress import BlockRandomK, BlockThreshold, BlockTopKRatio

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]

COMPRESSORS = {
    "top-k": BlockTopKRatio,
    "random-k": BlockRandomK,
    "threshold": BlockThreshold,
}


def flags(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all workloads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "racksum"], default="racksum")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--wire", help="type of gradients on the network: bf16, f16, int8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=int, metavar="N", help="print the loss every N steps")
    whole = parser.add_argument_group("for models that DDP wraps")
    whole.add_argument("--checkpoint", type=Path, help="resume from this file, if it exists")
    whole.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints")
    whole.add_argument("--compressor", choices=COMPRESSORS, help="how to choose blocks to send")
    whole.add_argument("--keep", type=float, default=0.1, help="share of blocks, or threshold")
    whole.add_argument("--block", type=int, default=256, help="elements of a block")
    whole.add_argument("--no-feedback", action="store_true", help="discard residuals")
    whole.add_argument("--study", action="store_true", help="print a study of the model, and stop")
    return parser


def step(model: nn.Module, optimizer: Optimizer, loss: Loss, batch: Batch) -> None:
    """Runs an ordinary training step."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


class Run:
    """A training run of the ranks that torchrun started."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # DDP needs a process group for everything but the gradients.
        store, self.rank, self.world = next(rendezvous("env://"))
        # torchrun 2.15 gives restarted ranks the old store, with the addresses of their earlier
        # life.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self.arguments = arguments
        torch.set_num_threads(1)
        torch.manual_seed(arguments.seed)
        self.session: racksum.Session | None = None
        self.ring_bytes: int | None = None

    def wrap(
        self, model: nn.Module, *, sparse: bool = False, **options: Any
    ) -> DistributedDataParallel:
        """Wraps a model in DDP, as a script that uses racksum does."""
        wrapped = DistributedDataParallel(model, **options)
        if self.arguments.backend == "racksum":
            self.session = racksum.torch.connect()
            wrapped.register_comm_hook(self._state(), racksum.torch.allreduce_hook)
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # Gloo has no counters, so compute the bytes that its ring sends for dense gradients.
        self.ring_bytes = None if sparse else 2 * (self.world - 1) * gradient_bytes // self.world
        return wrapped

    def _state(self) -> racksum.torch.HookState:
        """Returns the state of the hook that the flags select."""
        arguments = self.arguments
        compressor = None
        if arguments.compressor is not None:
            make = COMPRESSORS[arguments.compressor]
            compressor = make(arguments.keep, block=arguments.block)
        return racksum.torch.HookState(
            self.session,
            wire=arguments.wire,
            block=arguments.block,
            compressor=compressor,
            error_feedback=not arguments.no_feedback,
        )

    def shard(self, model: nn.Module, parts: Iterable[nn.Module], replicas: int) -> None:
        """Shards a model over the ranks of each replica."""
        shape = replicas, self.world // replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        over = mesh
        if self.arguments.backend == "racksum":
            self.session = racksum.torch.connect(group=mesh["replicas"].get_group())
            over = mesh["shards"]
        for part in parts:
            fully_shard(part, mesh=over)
        fully_shard(model, mesh=over)
        if self.session is not None:
            racksum.torch.set_all_reduce_hook(model, self.session, wire=self.arguments.wire)
        shard_bytes = sum(p.to_local().nbytes for p in model.parameters())
        self.ring_bytes = 2 * (replicas - 1) * shard_bytes // replicas

    def train(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        batch: Callable[[torch.Generator], Batch],
        held_out: Batch,
    ) -> None:
        """Trains, and prints the results.

        :param loss: Returns the mean loss of the model on a batch.
        :param batch: Draws a batch of this rank: a tensor or a tuple of tensors, with one row for
            each sample.
        :param held_out: Samples that no rank trains on.
        """
        arguments = self.arguments
        if arguments.study:
            self._study(model, optimizer, loss, batch)
            return
        keeps = {"model": model, "optimizer": optimizer}
        first, took, before, samples = self._load(keeps), 0.0, 0, 0
        for i in range(first, arguments.steps):
            data = batch(torch.Generator().manual_seed(hash((arguments.seed, self.rank, i))))
            start = time.perf_counter()
            step(model, optimizer, loss, data)
            if i == first:
                # Do not count the time and bytes of the first step, which includes set-up.
                before = self._sent()
            else:
                took += time.perf_counter() - start
                samples += len(data[0]) if isinstance(data, tuple) else len(data)
            done = i + 1
            if arguments.curve and done % arguments.curve == 0:
                self._print_json(step=done, loss=self._mean(loss, model, held_out))
            if arguments.save_every and done % arguments.save_every == 0:
                self._save(keeps, done)
        steps = max(arguments.steps - first - 1, 1)
        sent = self.ring_bytes if self.session is None else (self._sent() - before) // steps
        self._print_json(
            backend=arguments.backend,
            ranks=self.world,
            steps_per_s=round(steps / took, 2) if took else None,
            samples_per_s=round(samples * self.world / took) if took else None,
            sent_bytes_per_step=sent,
            final_loss=self._mean(loss, model, held_out),
            weights=_digest(model),
        )
        self.end()

    def end(self) -> NoReturn:
        """Leaves the job and the group, and exits with status 0.

        A mesh keeps threads of Gloo alive, which may abort Python while it finalizes: see "How a
        script ends" in docs/pytorch.md.
        """
        if self.session is not None:
            self.session.close()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _study(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        batch: Callable[[torch.Generator], Batch],
    ) -> None:
        """Prints a study of the model, and exits."""
        draw = torch.Generator().manual_seed(self.rank)
        batches = (batch(draw) for _ in itertools.count())
        found = racksum.torch.study(model, batches, loss, optimizer=optimizer)
        if self.rank == 0:
            print(found)
        self.end()

    def _load(self, keeps: dict[str, Any]) -> int:
        """Restores the checkpoint if it exists, and returns its step, or 0."""
        path = self.arguments.checkpoint
        if path is None or not path.exists():
            return 0
        saved = torch.load(path, weights_only=True)
        for name, kept in keeps.items():
            kept.load_state_dict(saved[name])
        return saved["step"]

    def _save(self, keeps: dict[str, Any], step: int) -> None:
        """Replaces the checkpoint atomically, at rank 0 only: all ranks have the same state."""
        if self.rank == 0:
            path = self.arguments.checkpoint
            partial = path.with_suffix(".partial")
            saved = {name: kept.state_dict() for name, kept in keeps.items()}
            torch.save({"step": step, **saved}, partial)
            partial.replace(path)

    def _sent(self) -> int:
        """Returns the bytes that this rank's session has sent so far."""
        return self.session.stats()["tx_bytes"] if self.session is not None else 0

    def _mean(self, loss: Loss, model: nn.Module, held_out: Batch) -> float:
        with torch.no_grad():
            mean = loss(model, held_out).detach().clone()
        dist.all_reduce(mean)
        return round(mean.item() / self.world, 6)

    def _print_json(self, **fields: Any) -> None:
        if self.rank == 0:
            print(json.dumps(fields), flush=True)


def _digest(model: nn.Module) -> str:
    """Returns a hash of all bits of the weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
