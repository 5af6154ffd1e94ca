"""What the workloads of the benches share: flags, the group of ranks, and the printed line."""

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
    """The flags that they have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "racksum"], default="racksum")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--wire", help="how gradients travel with racksum: bf16, f16, int8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", type=int, metavar="N", help="print the loss every N steps")
    whole = parser.add_argument_group("of models that DDP wraps")
    whole.add_argument("--checkpoint", type=Path, help="go on where it is, if it is there")
    whole.add_argument("--save-every", type=int, metavar="N", help="save it every N steps")
    whole.add_argument("--compressor", choices=COMPRESSORS, help="leave blocks out")
    whole.add_argument("--keep", type=float, default=0.1, help="the share, or the threshold")
    whole.add_argument("--block", type=int, default=256, help="elements of a block")
    whole.add_argument("--no-feedback", action="store_true", help="what is left out is lost")
    whole.add_argument("--study", action="store_true", help="say what racksum would do, and stop")
    return parser


def step(model: nn.Module, optimizer: Optimizer, loss: Loss, batch: Batch) -> None:
    """A step of training, as anyone's."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


class Run:
    """A training run of some ranks, as torchrun started them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # DDP itself needs a group, for what it does besides gradients.
        store, self.rank, self.world = next(rendezvous("env://"))
        # Ranks that torchrun 2.15 starts again find the store as it was, with old addresses in it.
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
        """The model for all ranks: these are the lines that a script changes."""
        wrapped = DistributedDataParallel(model, **options)
        if self.arguments.backend == "racksum":
            self.session = racksum.torch.connect()
            wrapped.register_comm_hook(self._state(), racksum.torch.allreduce_hook)
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # Gloo counts nothing; its ring sends each byte of dense gradients this often.
        self.ring_bytes = None if sparse else 2 * (self.world - 1) * gradient_bytes // self.world
        return wrapped

    def _state(self) -> racksum.torch.HookState:
        """What the hook does besides averaging."""
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
        """Shards a model over some of the ranks, of which there are several replicas."""
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
        """Trains, and prints what came of it.

        :param loss: The mean loss of the model on a batch.
        :param batch: Draws a batch of this rank's, whose first part has a sample in each row.
        :param held_out: Samples that nobody trains on.
        """
        arguments = self.arguments
        if arguments.study:
            self._study(model, optimizer, loss, batch)
            return
        keeps = {"model": model, "optimizer": optimizer}
        first, took, before, samples = self._load(keeps), 0.0, 0, 0
        for i in range(first, arguments.steps):
            drawn = batch(torch.Generator().manual_seed(hash((arguments.seed, self.rank, i))))
            start = time.perf_counter()
            step(model, optimizer, loss, drawn)
            if i == first:
                # Of the first step the time and the bytes are of no interest.
                before = self._sent()
            else:
                took += time.perf_counter() - start
                samples += len(drawn[0]) if isinstance(drawn, tuple) else len(drawn)
            done = i + 1
            if arguments.curve and done % arguments.curve == 0:
                self._say(step=done, loss=self._mean(loss, model, held_out))
            if arguments.save_every and done % arguments.save_every == 0:
                self._save(keeps, done)
        steps = max(arguments.steps - first - 1, 1)
        sent = self.ring_bytes if self.session is None else (self._sent() - before) // steps
        self._say(
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
        """Leaves the job and the group, and ends the process with 0.

        A mesh keeps Gloo's threads, which may abort a Python that finalizes: see "How a script
        ends" in docs/pytorch.md.
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
        """Says what racksum would do for the model."""
        draw = torch.Generator().manual_seed(self.rank)
        batches = (batch(draw) for _ in itertools.count())
        found = racksum.torch.study(model, batches, loss, optimizer=optimizer)
        if self.rank == 0:
            print(found)
        self.end()

    def _load(self, keeps: dict[str, Any]) -> int:
        """Takes up what a checkpoint holds, if there is one; returns the step it is of."""
        path = self.arguments.checkpoint
        if path is None or not path.exists():
            return 0
        saved = torch.load(path, weights_only=True)
        for name, kept in keeps.items():
            kept.load_state_dict(saved[name])
        return saved["step"]

    def _save(self, keeps: dict[str, Any], step: int) -> None:
        """Leaves a checkpoint, which all ranks have alike: whole, or not at all."""
        if self.rank == 0:
            path = self.arguments.checkpoint
            partial = path.with_suffix(".partial")
            saved = {name: kept.state_dict() for name, kept in keeps.items()}
            torch.save({"step": step, **saved}, partial)
            partial.replace(path)

    def _sent(self) -> int:
        """Bytes that this rank's session has sent so far."""
        return self.session.stats()["tx_bytes"] if self.session is not None else 0

    def _mean(self, loss: Loss, model: nn.Module, held_out: Batch) -> float:
        with torch.no_grad():
            mean = loss(model, held_out).detach().clone()
        dist.all_reduce(mean)
        return round(mean.item() / self.world, 6)

    def _say(self, **what: Any) -> None:
        if self.rank == 0:
            print(json.dumps(what), flush=True)


def _digest(model: nn.Module) -> str:
    """Tells weights apart that differ in any bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
