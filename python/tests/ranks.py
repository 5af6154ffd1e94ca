"""Ranks as processes that share a Gloo group. The PyTorch tests run functions in them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import racksum
import racksum.torch

#: Seconds that an op of a test may take.
TIMEOUT = 30.0


class Ranks:
    """A process for each rank. Tests share the processes, because importing torch is slow."""

    def __init__(self, world: int) -> None:
        port = new_port()
        spawn = multiprocessing.get_context("spawn")
        self.world = world
        self._pools = [
            ProcessPoolExecutor(1, spawn, _initialize, (rank, world, port)) for rank in range(world)
        ]

    def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Runs ``work``, a module-level function, at every rank, and returns the results."""
        running = [pool.submit(work, *arguments, **named) for pool in self._pools]
        try:
            return [rank.result(timeout=100) for rank in running]
        except TimeoutError:
            # End the processes: a rank that hangs would still hang in the next test.
            self.close()
            raise

    def outcomes(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Like ``run``, but returns the errors of ranks that failed, and ends all processes."""
        running = [pool.submit(work, *arguments) for pool in self._pools]
        try:
            return [rank.exception(timeout=100) or rank.result() for rank in running]
        finally:
            self.close()

    def close(self) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


#: Ports below the ephemeral range, so that the system does not assign one before a test binds it.
_PORTS = range(12_000, 32_000)

#: The number of the next port to try. Processes begin at different ports.
_next_port = count(os.getpid() * 31)


def new_port() -> int:
    """Returns a free port, which no other test of this process gets."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def _initialize(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )


def session_of_group(address: str, job: str, **options: Any) -> racksum.Session:
    """Joins a job with the ranks of the default group."""
    options = {"timeout": TIMEOUT, "join_timeout": TIMEOUT, **options}
    rank, world = dist.get_rank(), dist.get_world_size()
    return racksum.connect(address, job=job, rank=rank, world=world, **options)


def backend_options(address: str, job: str, **options: Any) -> racksum.torch.Options:
    """Returns the options of a group on the backend."""
    options = {"timeout": TIMEOUT, "join_timeout": TIMEOUT, **options}
    return racksum.torch.Options(aggregator=address, job=job, **options)


@cache
def group_on_backend(address: str, job: str) -> dist.ProcessGroup:
    """Returns a group of all ranks, which tests share until the processes end."""
    return dist.new_group(backend="racksum", pg_options=backend_options(address, job))


Check = Callable[[dist.ProcessGroup], Any]


class Checks(list[Check]):
    """The checks that all ranks of a group run."""

    def add(self, behaviour: Check) -> Check:
        """Adds a check, as a decorator."""
        self.append(behaviour)
        return behaviour


def in_group(check: Check, address: str, job: str) -> Any:
    """Runs a check in a group that other checks share, and checks that the group still works."""
    group = group_on_backend(address, job)
    result = check(group)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [group.size()] * 3
    return result


@contextmanager
def wrapped(
    net: nn.Module, through: str, address: str, job: str, state: dict[str, Any], **options: Any
) -> Iterator[DistributedDataParallel]:
    """Wraps a model whose gradients go through the hook, the backend or Gloo."""
    if through == "backend":
        pg_options = backend_options(address, job, **state)
        group = dist.new_group(backend="racksum", pg_options=pg_options)
        yield DistributedDataParallel(net, process_group=group, **options)
        dist.destroy_process_group(group)
        return
    model = DistributedDataParallel(net, **options)
    if through == "gloo":
        yield model
        return
    with session_of_group(address, job) as session:
        model.register_comm_hook(
            racksum.torch.HookState(session, **state), racksum.torch.allreduce_hook
        )
        yield model
