"""Ranks of a host with a sidecar."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import racksum
from conftest import Aggregator, Cluster, Sidecar, binary


@pytest.fixture
def hosts(tmp_path: Path, shared_aggregator: Aggregator) -> Iterator[list[Sidecar]]:
    """The sidecars of two hosts."""
    flags = ["--aggregator", shared_aggregator.address]
    hosts = [Sidecar(tmp_path / name, *flags) for name in ("one", "two")]
    yield hosts
    for host in hosts:
        host.stop()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    sidecar = Sidecar(tmp_path / "socket")
    yield sidecar
    if sidecar.process.poll() is None:
        sidecar.stop()
        assert not sidecar.path.exists()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_tensors_are_reduced_in_place(sidecar, shared):
    def work(session):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for elements in (1, 1000, 300_000):
                x = session.empty(elements, dtype) if shared else torch.empty(elements, dtype=dtype)
                x.fill_(session.rank + 1)
                assert session.allreduce(x) is x
                assert x.eq(6).all()
        y = session.empty((30, 20), np.float64) if shared else np.empty((30, 20))
        y[:] = session.rank
        session.allreduce(y[10:], "max")
        return y.sum()

    of_ranks = sidecar.run(3, work)
    assert of_ranks == [20 * (20 * 2 + 10 * rank) for rank in range(3)]


def test_an_average_and_a_list_of_blocks(sidecar):
    def work(session):
        x = np.full(5, session.rank, np.float32)
        assert session.allreduce(x, "avg").tolist() == [0.5] * 5
        indices = np.array([3, 1 + session.rank], np.int64)
        where, sums = session.allreduce_blocks(indices, np.ones(64, np.float32), 320, block=32)
        assert sums.tolist() == [1.0] * 64 + [2.0] * 32
        return where.tolist()

    assert sidecar.run(2, work) == [[1, 2, 3]] * 2


def test_memory_that_is_shared_goes_with_its_tensors(sidecar):
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:racksum")

    with sidecar.connect() as session:
        x = session.empty(1000)
        part = x[10:20]
        assert mapped() == 1
        del x
        gc.collect()
        assert mapped() == 1, "a part of it is there"
        part.fill_(1)
        assert session.allreduce(part).tolist() == [1.0] * 10
        del part
        gc.collect()
        assert mapped() == 0
        like = session.empty_like(torch.ones(3, 4, dtype=torch.float64))
        assert (like.shape, like.dtype) == ((3, 4), torch.float64)


def test_without_a_sidecar_empty_is_a_tensor_like_any_other(cluster):
    with cluster.connect() as session:
        x = session.empty((2, 3))
        assert (x.shape, x.dtype) == ((2, 3), torch.float32)
        assert session.empty(4, np.int32).dtype == np.int32


def test_ranks_that_disagree_are_told_and_go_on(sidecar):
    def work(session):
        with pytest.raises(racksum.Mismatch, match="the ranks disagree"):
            session.allreduce(np.ones(10 + session.rank, np.float32))
        return session.allreduce(np.ones(1, np.float32)).item()

    assert sidecar.run(2, work) == [2, 2]


def reduce_for_ever(session):
    while True:
        session.allreduce(np.ones(1, np.float32))


def test_a_sidecar_that_is_killed_is_an_error_and_its_ranks_may_go_on_without(sidecar, cluster):
    job = cluster.new_job()

    def work(session):
        session.allreduce(np.ones(1, np.float32))
        if session.rank == 0:
            time.sleep(0.3)
            sidecar.process.kill()
        with pytest.raises(racksum.NoAggregator, match="the sidecar at"):
            reduce_for_ever(session)
        with cluster.connect(job=job, rank=session.rank, world=2) as direct:
            return direct.allreduce(np.ones(1, np.float32)).item()

    assert sidecar.run(2, work) == [2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda sidecar, session: [session.empty(10) for _ in range(500)],
        lambda sidecar, session: session.allreduce(np.ones(10, np.float32)),
        lambda sidecar, session: sidecar.connect(),
        lambda sidecar, session: session.close(),
    ],
    ids=["empty", "allreduce", "connect", "close"],
)
def test_a_sidecar_that_is_stopped_holds_up_no_other_thread(sidecar, call):
    with sidecar.connect() as session:
        waiter = threading.Thread(target=call, args=(sidecar, session))
        pid = sidecar.process.pid
        # Whatever becomes of this process, the sidecar goes on.
        going_on = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pid}"])
        sidecar.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        waiter.start()
        time.sleep(0.3)
        assert time.monotonic() - stopped < 1.0, "this thread had to wait as well"
        waiter.join()
        going_on.wait()


def on_hosts(hosts, cluster, work, ranks=((0, 0), (0, 1), (1, 2), (1, 3), (None, 4))):
    """What a job comes to of which some ranks are at sidecars, and some are not."""
    job = cluster.new_job()

    def be(host, rank):
        at = cluster if host is None else hosts[host]
        local = sum(1 for other, _ in ranks if other == host) if host is not None else None
        with at.connect(job=job, rank=rank, world=len(ranks), local_world=local) as session:
            return work(session)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: be(*rank), ranks))


def test_hosts_with_sidecars_and_ranks_without_are_one_job(hosts, cluster):
    def work(session):
        sums = []
        for i, elements in enumerate((1, 1000, 0, 300_000)):
            x = (
                session.empty(elements, torch.float32)
                if session.rank % 2
                else torch.empty(elements)
            )
            x.fill_(session.rank + i)
            session.allreduce(x)
            assert x.eq(10 + 5 * i).all()
            y = np.zeros(elements, np.float64)
            y[: elements // 2] = session.rank
            sums.append(session.allreduce(y, "avg").sum())
        z = torch.full((1000,), session.rank, dtype=torch.int64)
        assert session.allreduce(z, "max")[0] == 4
        handles = [
            session.allreduce(np.full(500, i, np.float32), async_op=True) for i in range(100)
        ]
        assert [handle.wait()[0] for handle in handles] == [5.0 * i for i in range(100)]
        return sums

    assert on_hosts(hosts, cluster, work) == [[0, 1000, 0, 300_000]] * 5


def test_a_rank_that_is_lost_on_one_host_is_named_on_the_other(hosts, cluster):
    def work(session):
        session.allreduce(np.ones(1, np.float32))
        if session.rank == 2:
            time.sleep(0.2)
            return None
        with pytest.raises(racksum.PeerLost) as lost:
            session.allreduce(np.ones(1, np.float32))
        return lost.value.ranks

    assert on_hosts(hosts, cluster, work) == [(2,), (2,), None, (2,), (2,)]


def test_ranks_that_disagree_across_hosts_are_told_and_go_on(hosts, cluster):
    def work(session):
        host = session.rank // 2
        with pytest.raises(racksum.Mismatch, match="the ranks disagree"):
            session.allreduce(np.ones(10 + host, np.float32))
        return session.allreduce(np.ones(1, np.float32)).item()

    ranks = ((0, 0), (0, 1), (1, 2), (1, 3))
    assert on_hosts(hosts, cluster, work, ranks) == [4, 4, 4, 4]


def test_no_sidecar_is_an_error_that_says_what_to_start(tmp_path):
    with pytest.raises(racksum.NoAggregator, match=r"start `racksum worker --socket`"):
        racksum.connect(f"unix:{tmp_path}/none", job="job", rank=0, world=1)


@contextmanager
def fake_sidecar(path: Path, *answers: bytes) -> Iterator[Cluster]:
    """Hears who wants to join, answers this, and stays until the test ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        ended = threading.Event()

        def serve() -> None:
            line, _ = server.accept()
            with line:
                assert b"join" in line.recv(65536)
                for answer in answers:
                    line.send(answer)
                ended.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        yield Cluster(f"unix:{path}")
        ended.set()
        thread.join()


def test_a_sidecar_of_another_version_says_which_it_speaks(tmp_path):
    answer = b'{"wrong_version": {"speaks": 2}}'
    sentence = "the sidecar speaks version 2 of its protocol, and this rank version 1"
    with fake_sidecar(tmp_path / "socket", answer) as other:
        with pytest.raises(racksum.VersionMismatch, match=sentence) as refused:
            other.connect()
        assert isinstance(refused.value, racksum.Refused)
        assert "\n" not in str(refused.value)


def test_a_sidecar_that_says_what_nobody_understands_is_an_error(tmp_path):
    with fake_sidecar(tmp_path / "socket", b"{]") as other, pytest.raises(racksum.Error) as refused:
        other.connect()
    assert "\n" not in str(refused.value)


def test_a_sidecar_that_says_nothing_is_waited_for_within_the_limit(tmp_path):
    with fake_sidecar(tmp_path / "socket") as silent, pytest.raises(racksum.JoinTimeout):
        silent.connect(join_timeout=0.5)


def test_ranks_that_do_not_come_are_named(sidecar):
    with pytest.raises(racksum.JoinTimeout) as waited:
        sidecar.connect(rank=0, world=3, join_timeout=0.5)
    assert waited.value.missing == (1, 2)


def test_what_a_sidecar_does_not_do_is_refused(sidecar):
    with pytest.raises(racksum.BadArgument, match="neither rejoin nor go on"):
        sidecar.connect(on_rank_loss="continue")
    with pytest.raises(racksum.Refused, match="start it with --aggregator"):
        sidecar.connect(world=2, local_world=1)


def test_a_socket_where_somebody_serves_is_not_taken(sidecar):
    command = [binary(), "worker", "--socket", sidecar.path]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode == 3
    assert "somebody serves there already" in second.stderr
    with sidecar.connect() as session:
        session.allreduce(np.ones(1, np.float32))
