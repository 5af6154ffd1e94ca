#!/usr/bin/env python3
"""Time all-reduces through the sidecar of a host: one process is one rank.

    racksum worker --socket /tmp/racksum.sock &
    python sidecar.py --way shared --sidecar /tmp/racksum.sock --rank 0 --world 2 ... &
    python sidecar.py --way shared --sidecar /tmp/racksum.sock --rank 1 --world 2 ...

shared   of a tensor that lies in memory that the sidecar has too: `session.empty`
own      of a tensor of the process's own, which is copied there and back
hook     of a bucket, which is a tensor of the process's own, by the hook of DDP
memcpy   nothing is reduced: the tensor is copied to another and back

All other options are those of gloo.py beside this file, whose data, checks and lines are the same;
Gloo is what the ranks meet with before each iteration.
"""

from __future__ import annotations

import argparse
import sys

import gloo
import torch

import racksum
import racksum.torch


class Bucket:
    """What the hook asks a bucket of gradients for."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = gradients

    def buffer(self) -> torch.Tensor:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Beside(gloo.Dense):
    """An in-place all-reduce of a dense tensor through the sidecar, or as close to it as a way is."""

    way: str
    session: racksum.Session

    def __init__(self, case: gloo.Case, rank: int, world: int) -> None:
        super().__init__(case, rank, world)
        if self.way == "shared":
            self.tensor = self.session.empty_like(self.original)
        self._other = torch.zeros_like(self.original)
        self._state = racksum.torch.HookState(self.session)

    def all_reduce(self) -> None:
        if self.way == "memcpy":
            self._other.copy_(self.tensor)
            self.tensor.copy_(self._other)
        elif self.way == "hook":
            racksum.torch.allreduce_hook(self._state, Bucket(self.tensor)).wait()
        else:
            self.session.allreduce(self.tensor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--way", choices=("shared", "own", "hook", "memcpy"), required=True)
    parser.add_argument("--sidecar", metavar="PATH", required=True)
    own, rest = parser.parse_known_args()
    ranks, _ = gloo.argument_parser().parse_known_args(rest)
    job = f"{own.way} of {ranks.master}"
    at = f"unix:{own.sidecar}"
    Beside.way = own.way
    Beside.session = racksum.connect(at, job=job, rank=ranks.rank, world=ranks.world)
    gloo.Dense = Beside
    sys.argv[1:] = rest
    with Beside.session:
        return gloo.main()


if __name__ == "__main__":
    sys.exit(main())
