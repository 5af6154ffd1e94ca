#!/usr/bin/env python3
"""Times all-reduces through the sidecar of a host. One process is one rank.

    racksum worker --socket /tmp/racksum.sock &
    python sidecar.py --way shared --sidecar /tmp/racksum.sock --rank 0 --world 2 ... &
    python sidecar.py --way shared --sidecar /tmp/racksum.sock --rank 1 --world 2 ...

shared   reduces a tensor in memory that is shared with the sidecar: `session.empty`
own      reduces a tensor in the process's own memory, which is copied to shared memory and back
hook     reduces a bucket in the process's own memory, with the hook for DDP
memcpy   reduces nothing: copies the tensor to another tensor and back

The other options, the data, the checks and the printed lines are those of gloo.py. The ranks meet
at a barrier of Gloo before each iteration.
"""

from __future__ import annotations

import argparse
import sys

import gloo
import torch

import racksum
import racksum.torch


class Bucket:
    """Stands in for DDP's bucket of gradients, with the methods that the hook calls."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = gradients

    def buffer(self) -> torch.Tensor:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class ThroughSidecar(gloo.Dense):
    """An in-place all-reduce of a dense tensor through the sidecar, as ``--way`` selects."""

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
    ThroughSidecar.way = own.way
    ThroughSidecar.session = racksum.connect(at, job=job, rank=ranks.rank, world=ranks.world)
    gloo.Dense = ThroughSidecar
    sys.argv[1:] = rest
    with ThroughSidecar.session:
        return gloo.main()


if __name__ == "__main__":
    sys.exit(main())
