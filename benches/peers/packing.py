#!/usr/bin/env python3
"""Measures how fast a GPU finds and packs the non-zero blocks of a tensor.

    python packing.py --density 0.01

find     finds the blocks, in one pass over the tensor
pack     finds and packs the blocks, as for the copy to the host
copy     copies the tensor to another tensor on the GPU, at the speed of its memory

Before the rounds, the packed blocks are unpacked and compared with the tensor. Each round runs all
three in turn, and the time of a round is the mean of its iterations. The output has the times of
all rounds, the bytes read and written per second at the median time, and the ratio of this speed
to the copy's. Packing must reach half of the copy's speed.
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
#: Iterations of each measurement in a round.
ITERATIONS = 20
WARM_UP = 2
#: The share of the copy's speed that packing must reach.
LEAST = 0.5


class Packing:
    """A tensor in which each block is non-zero with the probability ``density``."""

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
        """Returns how many bytes each of find, pack and copy reads and writes."""
        whole, packed = self.x.nbytes, self.pack()[1].nbytes
        return {"find": whole, "pack": whole + 2 * packed, "copy": 2 * whole}


def seconds(work: Callable[[], object]) -> float:
    """Returns the mean duration of an iteration in seconds, by the clock of the GPU."""
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
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the data")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return leave("CUDA finds no GPU", status=2)
    packing = Packing(args.bytes // ELEMENT, args.block, args.density, args.seed)
    if not packing.is_correct():
        return leave("the unpacked tensor differs from the original", status=1)
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
        return leave(f"packing reaches {share:.2f} of a copy's speed, less than {LEAST}", status=1)
    return 0


def leave(reason: str, status: int) -> int:
    print(json.dumps({"peer": "packing", "error": reason}), flush=True)
    print(f"packing.py: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
