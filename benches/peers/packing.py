#!/usr/bin/env python3
"""Time how a GPU finds the blocks of a tensor that are not zero, and packs them.

    python packing.py --density 0.01

find     the blocks are found: one reading of the tensor
pack     and then packed, as for their way to the host
copy     the tensor is copied to another on the GPU: what its memory can do

In each round all three take their turns. A round counts with the mean of its iterations, and what
is printed is of the median round: the time, the bytes that were read and written in it, and how
that compares with the copy: packing must come to half of it. What is packed is first compared with
what was there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from racksum.torch.staging import find, pack, unpack

ELEMENT = 4
#: Iterations in a turn.
ITERATIONS = 20
WARM_UP = 2
#: How much of the memory's speed, which is that of the copy, packing must have.
LEAST = 0.5


class Packing:
    """A tensor of which some blocks, at random, are not zero."""

    def __init__(self, elements: int, block: int, density: float, seed: int) -> None:
        draw = torch.Generator("cuda").manual_seed(seed)
        blocks = torch.rand(elements // block, block, generator=draw, device="cuda") + 1
        blocks[torch.rand(len(blocks), generator=draw, device="cuda") >= density] = 0
        self.block = block
        self.x = blocks.view(-1)
        self.other = torch.empty_like(self.x)

    def find(self) -> torch.Tensor:
        return find(self.x, self.block)

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        return pack(self.x, self.block, self.find())

    def copy(self) -> None:
        self.other.copy_(self.x)

    def is_correct(self) -> bool:
        unpack(self.other.fill_(1), self.block, *self.pack())
        return torch.equal(self.other, self.x)

    def moved(self) -> dict[str, int]:
        """Bytes that each reads and writes."""
        whole, packed = self.x.nbytes, self.pack()[1].nbytes
        return {"find": whole, "pack": whole + 2 * packed, "copy": 2 * whole}


def seconds(work: Callable[[], object]) -> float:
    """What one iteration takes, on the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ITERATIONS):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / ITERATIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=400_000_000, help="size of the tensor")
    parser.add_argument("--block", type=int, default=256, help="elements of a block")
    parser.add_argument("--density", type=float, default=0.01, help="share of non-zero blocks")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument("--seed", type=int, default=1, help="seed of the data")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return leave("there is no GPU that CUDA could use", status=2)
    packing = Packing(args.bytes // ELEMENT, args.block, args.density, args.seed)
    if not packing.is_correct():
        return leave("what was packed is not what was there", status=1)
    ways = {"find": packing.find, "pack": packing.pack, "copy": packing.copy}
    rounds = [
        {way: seconds(work) for way, work in ways.items()} for _ in range(WARM_UP + args.rounds)
    ]
    took = {way: statistics.median(turn[way] for turn in rounds[WARM_UP:]) for way in ways}
    speed = {way: moved / took[way] for way, moved in packing.moved().items()}
    answer = {
        "peer": "packing",
        "device": torch.cuda.get_device_name(),
        **vars(args),
        "times_us": {way: [turn[way] * 1e6 for turn in rounds[WARM_UP:]] for way in ways},
        "gb_per_s": {way: round(speed[way] / 1e9, 1) for way in ways},
        "share_of_copy": {way: round(speed[way] / speed["copy"], 3) for way in ways},
    }
    print(json.dumps(answer), flush=True)
    if speed["pack"] < LEAST * speed["copy"]:
        share = speed["pack"] / speed["copy"]
        return leave(f"packing moves {share:.2f} of what a copy does, below {LEAST}", status=1)
    return 0


def leave(reason: str, status: int) -> int:
    print(json.dumps({"peer": "packing", "error": reason}), flush=True)
    print(f"packing.py: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
