#!/usr/bin/env python3
"""Time steps of training: one process is one rank, told by torchrun's variables who it is.

    python training.py words --backend gloo --steps 5

The script is one of python/examples, or `layers`, which is beside this file: a dense model of
42 MB. It is set up as its users have it, and takes steps when it is told `go`; README.md has the
contract.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python" / "examples")]

import common  # noqa: E402 - of the examples.

#: Steps before the first that is timed: DDP makes its buckets anew after one.
WARM_UP = 3


class Timed(common.Run):
    """A run that takes steps when it is told to."""

    def train(self, model, optimizer, step, held_out, samples) -> None:
        draw = torch.Generator().manual_seed(self.rank)
        for _ in range(WARM_UP):
            step(draw)
        dist.barrier()
        print(json.dumps({"ready": True, "rank": self.rank, "world": self.world}), flush=True)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            dist.barrier()
            start = time.monotonic_ns()
            for _ in range(self.arguments.steps):
                step(draw)
            end = time.monotonic_ns()
            answer = {"us": (end - start) / 1e3, "start_ns": start, "end_ns": end}
            print(json.dumps(answer), flush=True)
        if self.session is not None:
            self.session.close()
        dist.destroy_process_group()


def main() -> None:
    script = sys.argv.pop(1)
    common.Run = Timed
    importlib.import_module(script).main()


if __name__ == "__main__":
    main()
