"""Ranks as processes with a Gloo group, which tests of PyTorch hand functions to."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
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
    """A process for each rank, for as long as the tests run: importing torch takes long."""

    def __init__(self, world: int) -> None:
        port = new_port()
        spawn = multiprocessing.get_context("spawn")
        self.world = world
        self._pools = [
            ProcessPoolExecutor(1, spawn, _initialize, (rank, world, port)) for rank in range(world)
        ]

    def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Has every rank do the work, which is a function of a module, and returns what it gave."""
        running = [pool.submit(work, *arguments, **named) for pool in self._pools]
        try:
            return [rank.result(timeout=100) for rank in running]
        except TimeoutError:
            # What hangs would hang for whoever comes next as well.
            self.close()
            raise

    def outcomes(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Like ``run``, with the error in the place of what a rank gave that failed or ended."""
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


def new_port() -> int:
    """One that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _initialize(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )


def session_of_group(address: str, job: str, **options: Any) -> racksum.Session:
    """A session of the ranks of the group."""
    options = {"timeout": TIMEOUT, "join_timeout": TIMEOUT, **options}
    rank, world = dist.get_rank(), dist.get_world_size()
    return racksum.connect(address, job=job, rank=rank, world=world, **options)


def backend_options(address: str, job: str, **options: Any) -> racksum.torch.Options:
    """Of a group on the backend."""
    options = {"timeout": TIMEOUT, "join_timeout": TIMEOUT, **options}
    return racksum.torch.Options(aggregator=address, job=job, **options)


@cache
def group_on_backend(address: str, job: str) -> dist.ProcessGroup:
    """A group of all ranks, for as long as they are there."""
    return dist.new_group(backend="racksum", pg_options=backend_options(address, job))


Check = Callable[[dist.ProcessGroup], Any]


class Checks(list[Check]):
    """Behaviours that all ranks of a group check."""

    def add(self, behaviour: Check) -> Check:
        """Has a behaviour checked: a decorator."""
        self.append(behaviour)
        return behaviour


def in_group(check: Check, address: str, job: str) -> Any:
    """Checks something in a group that others are checked in as well, and still can be."""
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
    """A model whose gradients go through this: the hook, the backend or Gloo."""
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
