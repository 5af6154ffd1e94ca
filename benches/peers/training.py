#!/usr/bin/env python3
"""Time steps of training: one process is one rank, told by torchrun's variables who it is.

    python training.py words --backend gloo --steps 5

The script is one of ../workloads, or one beside this file: `layers`, a dense model of 42 MB, or
`gpt`, one of 496 MB on a GPU. It is set up as its users have it, and takes steps when it is told
`go`; README.md has the contract.
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

import common  # noqa: E402 - of the workloads.

import racksum.torch  # noqa: E402

#: Steps before the first that is timed: DDP makes its buckets anew after one.
WARM_UP = 3
#: Gbit/s of a rank's link: what a study says of it is told with the first line.
LINK = float(os.environ["LINK_GBIT_PER_S"]) if "LINK_GBIT_PER_S" in os.environ else None


class Timed(common.Run):
    """A run that takes steps when it is told to."""

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
            drawn = [next(batches) for _ in range(arguments.steps)]
            dist.barrier()
            start = time.monotonic_ns()
            for one in drawn:
                common.step(model, optimizer, loss, one)
            settle(model)
            end = time.monotonic_ns()
            answer = {"us": (end - start) / 1e3, "start_ns": start, "end_ns": end}
            print(json.dumps(answer), flush=True)
        self.end()

    def predicted(self, model, optimizer, loss, batches) -> float | None:
        """Seconds that a step is to take, if it is known of what link the ranks have."""
        if LINK is None:
            return None
        found = racksum.torch.study(model, batches, loss, optimizer=optimizer)
        if self.session is not None:
            return found.step_time(LINK, self.arguments.wire or "f32", self.arguments.block)
        # What Gloo does with sparse tensors is no ring.
        sparse = any(bucket.sparse for bucket in found.buckets)
        return None if sparse else found.ring_time(LINK)


def settle(model) -> None:
    """Waits until a GPU has done what the host had it do."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    script = sys.argv.pop(1)
    common.Run = Timed
    importlib.import_module(script).main()


if __name__ == "__main__":
    main()
