#!/usr/bin/env python3
"""Times the Gloo all-reduce of torch.distributed. One process is one rank.

    python gloo.py --rank 0 --world 2 --master 127.0.0.1:29500 --bytes 1000000 --mode dense &
    python gloo.py --rank 1 --world 2 --master 127.0.0.1:29500 --bytes 1000000 --mode dense

dense    in-place all_reduce of one tensor without zeros
sparse   all_reduce of a coalesced sparse COO tensor whose rows are the non-zero blocks
small    dense, with the defaults of a small tensor: few bytes, many iterations

Before every iteration the input is filled again and all ranks meet at a barrier; neither is timed.
The first iteration of a case is never timed: its result is compared with the exact sum.

Without --interactive a rank prints one JSON line at the end. With it, a rank prints a "ready" line
and then obeys the lines of its standard input: `go`, `set {...}` and `quit`. README.md beside this
file states the whole contract.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

PERIOD = 7
DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}
SPARSE_DTYPES = ("f32", "f64", "bf16", "i32", "i64")
"""The dtypes of Gloo's sparse all-reduce, which does not support f16 (torch 2.15)."""
EXACT_BELOW = {"f16": 2_048, "bf16": 256}
"""The checked sums are whole numbers, which these dtypes hold exactly only up to this limit."""
DEFAULT_BYTES = {"dense": 100_000_000, "sparse": 100_000_000, "small": 4_096}
DEFAULT_ITERATIONS = {"dense": 10, "sparse": 10, "small": 200}

GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15
MASK_64 = (1 << 64) - 1


class CaseError(ValueError):
    """A case cannot be measured; the text says why."""


class WrongSumError(RuntimeError):
    """An all-reduce did not return the sum."""


# The case and its data


@dataclass(frozen=True)
class Case:
    """A case to measure."""

    bytes: int
    mode: str
    dtype: str
    density: float
    overlap: str
    block: int
    warmup: int
    seed: int

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return self.bytes // DTYPES[self.dtype].itemsize

    @property
    def blocks(self) -> int:
        """The number of blocks of the tensor, including a short last one."""
        return -(-self.elements // self.block)

    def check(self, world: int) -> None:
        """Raises `CaseError` unless this case can be measured."""
        require(self.bytes > 0, "bytes must be more than 0.")
        require(self.mode in DEFAULT_BYTES, "mode must be dense, sparse or small.")
        require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}.")
        require(
            self.bytes % DTYPES[self.dtype].itemsize == 0,
            f"{self.bytes} bytes are not a whole number of {self.dtype} elements.",
        )
        require(0 <= self.density <= 1, "density must be between 0 and 1.")
        require(self.overlap in ("random", "all"), "overlap must be random or all.")
        require(self.block > 0, "block must be more than 0.")
        require(self.warmup >= 1, "warmup must be at least 1.")
        require(0 <= self.seed < 1 << 32, "seed must be from 0 to 4294967295.")
        require(
            self.mode != "sparse" or self.dtype in SPARSE_DTYPES,
            f"Gloo has no sparse all-reduce of {self.dtype}.",
        )
        require(
            PERIOD * world <= EXACT_BELOW.get(self.dtype, 1 << 24),
            f"{world} ranks are too many to check sums of {self.dtype} exactly.",
        )


def require(holds: bool, otherwise: str) -> None:
    """Raises `CaseError` with the given sentence unless the condition holds."""
    if not holds:
        raise CaseError(otherwise)


def value(case: Case, rank: int, index: int) -> int:
    """Returns an element of a rank: a whole number from 1 to 7, so that sums are exact."""
    return 1 + (index + 3 * rank + case.seed) % PERIOD


def dense_tensor(case: Case, ranks: Sequence[int]) -> torch.Tensor:
    """Returns the sum of the ranks' tensors, computed from one period of their values."""
    period = [sum(value(case, rank, index) for rank in ranks) for index in range(PERIOD)]
    repeats = -(-case.elements // PERIOD)
    return torch.tensor(period, dtype=DTYPES[case.dtype]).repeat(repeats)[: case.elements].clone()


def occupied_blocks(case: Case, rank: int) -> npt.NDArray[np.int64]:
    """Returns the non-zero blocks of a rank in increasing order.

    Block b is non-zero if the (b + 1)-th output of SplitMix64, seeded by the seed and the rank, is
    below the density. With overlap "all", every rank has the blocks of rank 0.
    """
    stream = rank if case.overlap == "random" else 0
    start = int(mix(np.array([(case.seed << 32) | stream], dtype=np.uint64))[0])
    with np.errstate(over="ignore"):
        steps = np.arange(1, case.blocks + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
        outputs = mix(steps + np.uint64(start))
    return np.flatnonzero((outputs >> np.uint64(11)) < np.uint64(int(case.density * 2**53)))


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambles 64-bit numbers with the output function of SplitMix64."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        return z ^ (z >> np.uint64(31))


def rows(case: Case, rank: int, blocks: npt.NDArray[np.int64]) -> torch.Tensor:
    """Returns a rank's elements of the listed blocks, a row per block, with zeros past the end."""
    table = torch.tensor(
        [[value(case, rank, phase + i) for i in range(case.block)] for phase in range(PERIOD)],
        dtype=DTYPES[case.dtype],
    )
    values = table[torch.from_numpy(blocks * case.block % PERIOD)]
    if len(blocks) and blocks[-1] == case.blocks - 1:
        values[-1, case.elements - int(blocks[-1]) * case.block :] = 0
    return values


# The operations


class Operation(Protocol):
    """One all-reduce that can be repeated."""

    def refill(self) -> None:
        """Fills the input again, because the all-reduce overwrites it."""

    def all_reduce(self) -> None:
        """Runs the collective; only this is timed."""

    def is_correct(self) -> bool:
        """Returns whether the result equals the exact sum."""

    def facts(self) -> dict[str, int]:
        """Returns facts that a reader of the times should know."""


class Dense:
    """An in-place all-reduce of a dense tensor."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.world = case, world
        self.original = dense_tensor(case, [rank])
        self.tensor = torch.empty_like(self.original)

    def refill(self) -> None:
        self.tensor.copy_(self.original)

    def all_reduce(self) -> None:
        dist.all_reduce(self.tensor)

    def is_correct(self) -> bool:
        return torch.equal(self.tensor, dense_tensor(self.case, range(self.world)))

    def facts(self) -> dict[str, int]:
        return {}


class Sparse:
    """An all-reduce of a sparse tensor with one row per non-zero block."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.world = case, world
        self.blocks = [occupied_blocks(case, other) for other in range(world)]
        self.union = np.unique(np.concatenate(self.blocks))
        self.indices = torch.from_numpy(self.blocks[rank]).unsqueeze(0)
        self.values = rows(case, rank, self.blocks[rank])
        self.refill()

    def refill(self) -> None:
        size = (self.case.blocks, self.case.block)
        self.tensor = torch.sparse_coo_tensor(
            self.indices.clone(),
            self.values.clone(),
            size,
            is_coalesced=True,
            check_invariants=False,
        )

    def all_reduce(self) -> None:
        dist.all_reduce(self.tensor)

    def is_correct(self) -> bool:
        expected = torch.zeros((len(self.union), self.case.block), dtype=self.values.dtype)
        for rank, blocks in enumerate(self.blocks):
            places = torch.from_numpy(np.searchsorted(self.union, blocks))
            expected[places] += rows(self.case, rank, blocks)
        result = self.tensor.coalesce()
        same_blocks = torch.equal(result.indices()[0], torch.from_numpy(self.union))
        return same_blocks and torch.equal(result.values(), expected)

    def facts(self) -> dict[str, int]:
        return {
            "blocks": self.case.blocks,
            "nonzero_blocks": self.indices.shape[1],
            "union_blocks": len(self.union),
        }


def prepare(case: Case, rank: int, world: int) -> Operation:
    """Builds a case, checks its first iteration and runs the rest of the warm-up."""
    case.check(world)
    kind = Sparse if case.mode == "sparse" else Dense
    operation: Operation = kind(case, rank, world)
    measure(operation)
    if not operation.is_correct():
        raise WrongSumError("the first all-reduce did not return the sum.")
    for _ in range(case.warmup - 1):
        measure(operation)
    return operation


def measure(operation: Operation) -> tuple[int, int]:
    """Runs an iteration and returns its start and end, in ns of the monotonic clock."""
    operation.refill()
    dist.barrier()
    start_ns = time.perf_counter_ns()
    operation.all_reduce()
    return start_ns, time.perf_counter_ns()


# The two ways of running


def run_once(case: Case, rank: int, world: int, iterations: int) -> None:
    """Measures one case and prints one line."""
    operation = prepare(case, rank, world)
    times = [measure(operation) for _ in range(iterations)]
    times_us = [(end - start) / 1000 for start, end in times]
    emit({**describe(case, rank, world, operation), "times_us": times_us, "checked": True})


def run_interactive(case: Case, rank: int, world: int) -> None:
    """Obeys the lines of standard input until `quit` or the end of input."""
    operation = prepare_and_print_ready(case, rank, world)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "go" and not argument:
            start_ns, end_ns = measure(operation)
            us = (end_ns - start_ns) / 1000
            emit({"us": us, "start_ns": start_ns, "end_ns": end_ns})
        elif command == "set":
            case = changed(case, argument)
            del operation  # Two cases may not fit into memory at the same time.
            operation = prepare_and_print_ready(case, rank, world)
        elif command == "quit" and not argument:
            break
        elif command:
            raise CaseError(f"{line.strip()!r} is not a command; use go, set {{...}} or quit.")


def prepare_and_print_ready(case: Case, rank: int, world: int) -> Operation:
    """Prepares a case and prints its "ready" line."""
    operation = prepare(case, rank, world)
    emit({"ready": True, **describe(case, rank, world, operation), "checked": True})
    return operation


def changed(case: Case, argument: str) -> Case:
    """Applies the JSON object of a `set` line to a case."""
    try:
        changes = json.loads(argument)
    except json.JSONDecodeError as error:
        raise CaseError(f"set needs a JSON object: {error}.") from error
    require(isinstance(changes, dict), "set needs a JSON object.")
    former = dataclasses.asdict(case)
    for key, given in changes.items():
        require(key in former, f"set has no key {key!r}.")
        wanted = (int, float) if key == "density" else type(former[key])
        right = isinstance(given, wanted) and not isinstance(given, bool)
        require(right, f"{given!r} is not of the right type for {key}.")
    return dataclasses.replace(case, **changes)


def describe(case: Case, rank: int, world: int, operation: Operation) -> dict[str, object]:
    """Returns the fields of all long lines; only sparse cases have `overlap` and `block`."""
    facts = {"peer": "gloo", "rank": rank, "world": world, **dataclasses.asdict(case)}
    if case.mode != "sparse":
        facts |= {"density": 1.0}
        del facts["overlap"], facts["block"]
    return facts | operation.facts()


def emit(message: dict[str, object]) -> None:
    """Prints a JSON line in one write, because ranks may share a terminal."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


# The command line


def main() -> int:
    """Joins the group, runs and leaves. Exits with 2 for a bad case and 1 for other failures."""
    parser = argument_parser()
    args = parser.parse_args()
    case = case_of(parser, args)
    try:
        join(args)
        if args.interactive:
            run_interactive(case, args.rank, args.world)
        else:
            run_once(case, args.rank, args.world, args.iters)
        dist.barrier()  # No rank may close its sockets while another still reads from them.
        dist.destroy_process_group()
    except CaseError as error:
        leave(args.rank, str(error), status=2)
    except RuntimeError as error:
        leave(args.rank, str(error), status=1)
    return 0


def leave(rank: int, reason: str, status: int) -> NoReturn:
    """Reports a failure and exits immediately, because the other ranks may no longer answer."""
    emit({"peer": "gloo", "rank": rank, "error": reason})
    print(f"gloo.py: rank {rank}: {reason}", file=sys.stderr, flush=True)
    os._exit(status)


def join(args: argparse.Namespace) -> None:
    """Joins the process group."""
    if args.iface:
        os.environ["GLOO_SOCKET_IFNAME"] = args.iface
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.master}",
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=args.timeout),
    )


def case_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Case:
    """Returns the case, with the defaults of its mode. Exits if an argument is invalid."""
    if args.bytes is None:
        args.bytes = DEFAULT_BYTES[args.mode]
    if args.iters is None:
        args.iters = DEFAULT_ITERATIONS[args.mode]
    case = Case(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Case)})
    host, _, port = args.master.rpartition(":")
    try:
        require(args.world >= 1, "--world must be at least 1.")
        require(0 <= args.rank < args.world, "--rank must be from 0 to --world minus 1.")
        require(bool(host) and port.isdecimal(), "--master must be HOST:PORT.")
        require(args.iters >= 1, "--iters must be at least 1.")
        require(args.timeout > 0, "--timeout must be more than 0.")
        names = [name for _, name in socket.if_nameindex()]
        require(args.iface in (None, *names), f"there is no network interface {args.iface}.")
        case.check(args.world)
    except CaseError as error:
        parser.error(str(error))
    return case


def argument_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description="Time Gloo's all-reduce as one rank of a group.")
    add = parser.add_argument
    add("--rank", type=int, required=True, help="number of this process")
    add("--world", type=int, required=True, help="number of processes")
    add("--master", required=True, metavar="HOST:PORT", help="address of rank 0")
    add("--iface", metavar="NAME", help="interface that Gloo binds to (GLOO_SOCKET_IFNAME)")
    add("--bytes", type=int, help="size of the whole tensor (default: 100000000; small: 4096)")
    add("--mode", choices=tuple(DEFAULT_BYTES), default="dense", help="what to measure")
    add("--dtype", choices=tuple(DTYPES), default="f32", help="element type")
    add("--density", type=float, default=0.01, help="share of non-zero blocks, for sparse")
    add("--overlap", choices=("random", "all"), default="random", help="which blocks, for sparse")
    add("--block", type=int, default=256, help="elements of a block, for sparse")
    add("--iters", type=int, help="timed iterations (default: 10; small: 200)")
    add("--warmup", type=int, default=2, help="untimed iterations; the first is checked")
    add("--seed", type=int, default=1, help="seed of the data")
    add("--timeout", type=float, default=120.0, help="seconds until a collective fails")
    add("--interactive", action="store_true", help="obey go, set {...} and quit from stdin")
    return parser


if __name__ == "__main__":
    sys.exit(main())
