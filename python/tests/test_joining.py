"""Ranks of a process group that wait for one which does not join: why, and which one it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import racksum
import racksum.torch
from conftest import Cluster
from ranks import Ranks, backend_options

#: Seconds that no test waits for.
LONG = 3600.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def reduced(group: dist.ProcessGroup) -> list[float]:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x.tolist()


def end_before_joining(address: str, job: str, doomed: int) -> None:
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG)
    group = dist.new_group(backend="racksum", pg_options=options)
    if dist.get_rank() == doomed:
        # The others wait by then, each in another stage of joining.
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    reduced(group)


@pytest.mark.parametrize("doomed", range(4))
def test_a_rank_that_is_killed_before_it_joins_is_named_to_all_others(
    cluster: Cluster, doomed: int
) -> None:
    told = Ranks(4).outcomes(end_before_joining, cluster.address, cluster.new_job(), doomed)
    assert isinstance(told.pop(doomed), BrokenProcessPool)
    for error in told:
        assert isinstance(error, racksum.PeerLost), error
        assert error.ranks == (doomed,), error
        assert f"rank {doomed} ended before joining" in str(error)


def refuse_at_one(address: str, job: str, refused: int) -> tuple[str, str]:
    """What two calls of a rank end with, of which one cannot join."""
    wrong = {"interface": "none0"} if dist.get_rank() == refused else {}
    options = backend_options(address, job, timeout=LONG, join_timeout=LONG, **wrong)
    group = dist.new_group(backend="racksum", pg_options=options)
    errors = []
    for _ in range(2):
        with pytest.raises(racksum.Error) as error:
            reduced(group)
        errors.append(f"{type(error.value).__name__}: {error.value}")
    dist.destroy_process_group(group)
    return errors[0], errors[1]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_rank_that_cannot_join_tells_the_others_why(
    ranks: Ranks, cluster: Cluster, refused: int
) -> None:
    told = ranks.run(refuse_at_one, cluster.address, cluster.new_job(), refused)
    assert all(first == second for first, second in told), "joining is tried once"
    why, heard = told[refused][0], told[1 - refused][0]
    kind, text = why.split(": ", 1)
    assert kind == "BadArgument"
    assert "none0" in text
    assert heard.startswith(f"PeerLost: rank {refused} left the process group ")
    assert heard.endswith(f" before joining it: {text}")


def come_late(address: str, job: str, late: int) -> str:
    options = backend_options(address, job, timeout=LONG, join_timeout=1.0)
    group = dist.new_group(backend="racksum", pg_options=options)
    if dist.get_rank() == late:
        # Of the default group, so that nobody has joined the other.
        dist.barrier()
    with pytest.raises(racksum.Error) as error:
        reduced(group)
    if dist.get_rank() != late:
        dist.barrier()
    dist.destroy_process_group(group)
    return type(error.value).__name__


@pytest.mark.parametrize("late", [0, 1])
def test_the_limit_of_joining_is_that_of_agreeing_too(
    ranks: Ranks, cluster: Cluster, late: int
) -> None:
    told = ranks.run(come_late, cluster.address, cluster.new_job(), late)
    assert (told[1 - late], told[late]) == ("JoinTimeout", "PeerLost")


def join_without_the_first(address: str, job: str) -> list[float]:
    options = backend_options(address, job)
    group = dist.new_group([1, 2], backend="racksum", pg_options=options)
    # All have made it.
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):
        while not store.check(["said by nobody"]):
            time.sleep(0.01)
    with pytest.raises(racksum.PeerLost, match="the store of the process groups does not answer"):
        racksum.torch.connect(address, group=group, generation=1)
    return reduced(group)


def test_a_group_joins_although_the_store_has_gone_meanwhile(cluster: Cluster) -> None:
    told = Ranks(3).outcomes(join_without_the_first, cluster.address, cluster.new_job())
    assert told[1:] == [[2.0] * 3] * 2


def join_beside(address: str, job: str) -> None:
    """One rank waits at the store for the other, which waits for it to join."""
    group = dist.new_group(backend="racksum", pg_options=backend_options(address, job))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        waiting = threading.Thread(target=store.get, args=(f"{job}-reduced",))
        waiting.start()
        # The thread holds the connection by then.
        time.sleep(0.5)
    reduced(group)
    if dist.get_rank() == 1:
        store.set(f"{job}-reduced", "yes")
    else:
        waiting.join()
    dist.destroy_process_group(group)


def test_joining_does_not_wait_for_a_thread_that_waits_at_the_store(
    ranks: Ranks, cluster: Cluster
) -> None:
    ranks.run(join_beside, cluster.address, cluster.new_job())


def test_all_groups_of_a_world_draw_one_name(cluster: Cluster) -> None:
    [names] = Ranks(1).outcomes(names_of_groups, cluster.address)
    assert len(set(names)) == 1, names


def names_of_groups(address: str) -> list[str]:
    dist.destroy_process_group()
    options = racksum.torch.Options(aggregator=address)
    store = dist.HashStore()
    dist.init_process_group("racksum", store=store, rank=0, world_size=1, pg_options=options)
    names = []
    for group in (dist.group.WORLD, dist.new_group(), dist.new_group(backend="racksum")):
        reduced(group)
        names.append(group._get_backend(torch.device("cpu")).session.job)
    with racksum.torch.connect(address) as session:
        names.append(session.job)
    dist.destroy_process_group()
    return names
