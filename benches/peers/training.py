#!/usr/bin/env python3
"""Times training steps. One process is one rank; torchrun's variables set its number.

    python training.py words --backend gloo --steps 5

The script is one of ../workloads, or one beside this file: `layers`, a dense model of 42 MB, or
`gpt`, a model of 496 MB on a GPU. It sets up as usual, and runs steps when it reads `go`. README.md
states the contract.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "workloads")]

import common  # noqa: E402 - from the workloads.

import racksum.torch  # noqa: E402

#: Steps before the first timed step. DDP rebuilds its buckets after the first step.
WARM_UP = 3
#: Gbit/s of a rank's link. If set, the first printed line contains the time that a study predicts.
LINK = float(os.environ["LINK_GBIT_PER_S"]) if "LINK_GBIT_PER_S" in os.environ else None


class Timed(common.Run):
    """A run that takes its steps on command."""

    def train(self, model, optimizer, loss, batch, held_out) -> None:
        draw = torch.Generator().manual_seed(self.rank)
        batches = (batch(draw) for _ in itertools.count())
        arguments = self.arguments
        predicted = self.predicted(model, optimizer, loss, batches)
        for _ in range(WARM_UP):
            common.step(model, optimizer, loss, next(batches))
        settle(model)
        dist.barrier()
        ready = {"ready": True, "rank": self.rank, "world": self.world}
        if predicted is not None:
            ready["predicted_us"] = predicted * arguments.steps * 1e6
        print(json.dumps(ready), flush=True)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            step_batches = [next(batches) for _ in range(arguments.steps)]
            dist.barrier()
            start = time.monotonic_ns()
            for one in step_batches:
                common.step(model, optimizer, loss, one)
            settle(model)
            end = time.monotonic_ns()
            answer = {"us": (end - start) / 1e3, "start_ns": start, "end_ns": end}
            print(json.dumps(answer), flush=True)
        self.end()

    def predicted(self, model, optimizer, loss, batches) -> float | None:
        """Returns the predicted duration of a step in seconds, or None without a known link."""
        if LINK is None:
            return None
        found = racksum.torch.study(model, batches, loss, optimizer=optimizer)
        if self.session is not None:
            return found.step_time(LINK, self.arguments.wire or "f32", self.arguments.block)
        # For Gloo, a study predicts only rings, and Gloo does not reduce sparse tensors in a ring.
        sparse = any(bucket.sparse for bucket in found.buckets)
        return None if sparse else found.ring_time(LINK)


def settle(model) -> None:
    """Waits until the GPU of the model, if there is one, has no work left."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    script = sys.argv.pop(1)
    common.Run = Timed
    importlib.import_module(script).main()


if __name__ == "__main__":
    main()
