"""Ranks of a host with a sidecar."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
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
import racksum.torch
import report
from conftest import Aggregator, Cluster, Sidecar, binary, stop
from racksum.torch.staging import Staging, allreduce


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


def shared_bytes(pid="self"):
    """Returns the bytes of shared memory that a process has mapped."""
    ranges = [
        line.split()[0].split("-")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:racksum" in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def test_a_sparse_gradient_costs_its_rows_and_not_its_table(sidecar):
    rows, width = 50_000, 256

    def work(session):
        torch.manual_seed(session.rank)
        for _ in range(3):
            indices = torch.randint(rows, (1, 40))
            x = torch.sparse_coo_tensor(indices, torch.randn(40, width), (rows, width))
            found = racksum.torch.allreduce_sparse(session, x).wait()
            assert found.is_coalesced()
            peak = max(shared_bytes(), shared_bytes(sidecar.process.pid))
        return found, x.coalesce(), peak

    of_ranks = sidecar.run(3, work)
    expected = sum(x.to_dense().double() for _, x, _ in of_ranks)
    for found, _, peak in of_ranks:
        torch.testing.assert_close(found.to_dense().double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.values(), of_ranks[0][0].values())
        assert peak < rows * width * 4 / 50, "the ranks shared the dense table of 51 MB"


def test_a_tensor_and_a_list_are_the_same_op(sidecar):
    def work(session):
        if session.rank:
            where, sums = session.allreduce_blocks(
                np.array([1], np.int64), np.full(32, 5, np.float32), 96, block=32
            )
            return where.tolist(), sums[::32].tolist()
        x = np.zeros(96, np.float32)
        x[64:] = 2
        return session.allreduce(x, block=32, tag=0)[::32].tolist()

    assert sidecar.run(2, work) == [[0, 5, 2], ([1, 2], [5, 2])]


def test_what_is_handed_and_what_leaves_the_host_is_counted(sidecar, hosts, cluster):
    def work(session):
        before = session.stats()
        assert before["sidecar_ops"] == before["sidecar_shared_bytes"] == 0
        session.allreduce(session.empty(1000).zero_().add_(1))
        session.allreduce(torch.ones(500))
        after = session.stats()
        assert after["sidecar_ops"] == 2
        assert (after["sidecar_shared_bytes"], after["sidecar_copied_bytes"]) == (4000, 4000)
        return after["tx_bytes"], after["rx_bytes"]

    assert sidecar.run(2, work) == [(0, 0)] * 2
    for sent, received in on_hosts(hosts, cluster, work, ((0, 0), (0, 1), (1, 2), (1, 3))):
        assert 6000 < sent < 7000
        assert 6000 < received < 7000
    with cluster.connect() as session:
        assert session.stats()["sidecar_ops"] == 0


def test_memory_that_is_shared_goes_with_its_tensors(sidecar):
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:racksum")

    # Free the objects that other tests have left in cycles.
    gc.collect()
    with sidecar.connect() as session:
        x = session.empty(1000)
        part = x[10:20]
        assert mapped() == 1
        del x
        gc.collect()
        assert mapped() == 1, "the memory of a live view was unmapped"
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
        # If this thread is blocked, another process lets the sidecar continue.
        going_on = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {pid}"])
        try:
            stop(pid)
            waiter.start()
            time.sleep(0.3)
            assert going_on.poll() is None, "the wait blocked this thread too"
        finally:
            going_on.terminate()
            going_on.wait()
            sidecar.process.send_signal(signal.SIGCONT)
            waiter.join()


@pytest.mark.parametrize(
    "call",
    [lambda session: session.empty(10), lambda session: session.stats()],
    ids=["empty", "stats"],
)
def test_waiting_for_a_sidecar_that_is_stopped_may_be_interrupted(sidecar, call):
    with sidecar.connect() as session:
        with interrupted(sidecar):
            call(session)
        assert session.allreduce(np.ones(2, np.float32)).sum() == 2


@contextmanager
def interrupted(sidecar):
    """Stops a sidecar, and checks that a wait for it can be interrupted."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        stop(sidecar.process.pid)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            yield
        report.time("a wait for a stopped sidecar is interrupted", time.monotonic() - began, 9.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        sidecar.process.send_signal(signal.SIGCONT)


def test_closing_beside_a_sidecar_that_is_stopped_may_be_interrupted(sidecar):
    session = sidecar.connect()
    with interrupted(sidecar):
        session.close()
    assert session.closed
    session.close()


def test_connecting_to_a_sidecar_that_is_stopped_ends_in_its_time(sidecar):
    stop(sidecar.process.pid)
    try:
        began = time.monotonic()
        with pytest.raises(racksum.JoinTimeout, match=r"after 0\.5 s the job had"):
            sidecar.connect(join_timeout=0.5)
        report.time("joining at a stopped sidecar gives up", time.monotonic() - began, 10.0)
    finally:
        sidecar.process.send_signal(signal.SIGCONT)


def test_a_rank_that_has_not_joined_may_try_again_at_once(sidecar):
    job = sidecar.new_job()
    for _ in range(500):
        with pytest.raises(racksum.JoinTimeout):
            sidecar.connect(job=job, world=2, join_timeout=0.002)


def on_hosts(hosts, cluster, work, ranks=((0, 0), (0, 1), (1, 2), (1, 3), (None, 4))):
    """Returns the results of a job in which some ranks use a sidecar and some do not."""
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


def test_lists_of_hosts_and_of_a_rank_without_a_sidecar_are_one_op(hosts, cluster):
    def work(session):
        indices = np.array([3 * session.rank % 7, 9], np.int64)
        where, sums = session.allreduce_blocks(indices, np.ones(64, np.float32), 320, block=32)
        either = np.zeros(320, np.float32)
        either[288:] = 1
        if session.rank % 2:
            session.allreduce(either, block=32, tag=0)
        else:
            nine, both = session.allreduce_blocks(
                np.array([9], np.int64), either[288:].copy(), 320, block=32
            )
            assert nine.tolist() == [9]
            either[288:] = both
        assert either[288:].tolist() == [5] * 32
        assert not either[:288].any()
        return where.tolist(), sums[::32].tolist()

    listed = ([0, 2, 3, 5, 6, 9], [1, 1, 1, 1, 1, 5])
    assert on_hosts(hosts, cluster, work) == [listed] * 5


def test_a_rank_that_is_lost_on_one_host_is_named_on_the_other(hosts, cluster):
    def work(session):
        session.allreduce(np.ones(1, np.float32))
        if session.rank == 2:
            time.sleep(0.2)
            return None
        with pytest.raises(racksum.PeerLost) as lost:
            session.allreduce(np.ones(1, np.float32))
        return lost.value.ranks

    *of_hosts, alone = on_hosts(hosts, cluster, work)
    assert of_hosts == [(2,), (2,), None, (2,)]
    # A rank that calls late may also learn of ranks that have left in the meantime.
    assert alone is not None
    assert 2 in alone


def test_ranks_that_disagree_across_hosts_are_told_and_go_on(hosts, cluster):
    def work(session):
        host = session.rank // 2
        with pytest.raises(racksum.Mismatch, match="the ranks disagree"):
            session.allreduce(np.ones(10 + host, np.float32))
        return session.allreduce(np.ones(1, np.float32)).item()

    ranks = ((0, 0), (0, 1), (1, 2), (1, 3))
    assert on_hosts(hosts, cluster, work, ranks) == [4, 4, 4, 4]


def test_a_rank_that_closes_a_job_that_is_over_has_its_memory_to_itself(hosts, cluster):
    def work(session):
        if session.rank == 2:
            time.sleep(0.5)
            return None
        x = session.empty(64 << 20, torch.int32).fill_(1)
        first = session.allreduce(x, async_op=True)
        # The ranks disagree about the next op while the first is folded.
        with pytest.raises(racksum.Mismatch):
            session.allreduce(np.ones(1 + session.rank, np.float32))
        session.close()
        behind = x[x.numel() // 2 :]
        behind.fill_(7)
        time.sleep(0.5)
        return behind.eq(7).all().item(), first

    of_ranks = on_hosts(hosts, cluster, work, ranks=((0, 0), (0, 1), (None, 2)))
    assert [kept for kept, _ in of_ranks[:2]] == [True, True]


def test_no_sidecar_is_an_error_that_says_what_to_start(tmp_path):
    with pytest.raises(racksum.NoAggregator, match=r"start `racksum worker --socket`"):
        racksum.connect(f"unix:{tmp_path}/none", job="job", rank=0, world=1, join_timeout=0.5)


def test_a_sidecar_that_starts_after_its_ranks_is_found(tmp_path, caplog):
    path = tmp_path / "late"
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(racksum.connect, f"unix:{path}", job="job", rank=0, world=1)
        while "retrying until join_timeout expires" not in caplog.text:
            assert not joined.done(), joined.exception()
            time.sleep(0.01)
        sidecar = Sidecar(path)
        joined.result(60).close()
    sidecar.stop()


@contextmanager
def fake_sidecar(path: Path, *answers: bytes) -> Iterator[Cluster]:
    """Receives a join, sends these answers, and keeps the connection open until the test ends."""
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
        try:
            yield Cluster(f"unix:{path}")
        finally:
            ended.set()
            thread.join()


def test_a_sidecar_of_another_version_says_which_it_speaks(tmp_path):
    answer = b'{"wrong_version": {"speaks": 2}}'
    sentence = "the sidecar speaks protocol version 2, but this rank speaks version 1"
    with fake_sidecar(tmp_path / "socket", answer) as other:
        with pytest.raises(racksum.VersionMismatch, match=sentence) as refused:
            other.connect()
        assert isinstance(refused.value, racksum.Refused)
        assert "\n" not in str(refused.value)


def test_a_sidecar_that_says_what_nobody_understands_is_an_error(tmp_path):
    raises = pytest.raises(racksum.NoAggregator, match=r"^the sidecar at .*socket: ")
    with fake_sidecar(tmp_path / "socket", b"{]") as other, raises as error:
        other.connect()
    assert "\n" not in str(error.value)


def test_a_sidecar_that_says_nothing_is_waited_for_within_the_limit(tmp_path):
    waited = pytest.raises(racksum.JoinTimeout, match=r"after 0\.5 s the job had")
    with fake_sidecar(tmp_path / "socket") as silent, waited:
        silent.connect(join_timeout=0.5)


def test_ranks_that_do_not_come_are_named(sidecar):
    with pytest.raises(racksum.JoinTimeout) as waited:
        sidecar.connect(rank=0, world=3, join_timeout=0.5)
    assert waited.value.missing == (1, 2)


def test_what_a_sidecar_does_not_do_is_refused(sidecar, monkeypatch):
    with pytest.raises(racksum.BadArgument, match="neither rejoin nor continue"):
        sidecar.connect(on_rank_loss="continue")
    for option in ({"data_auth": "aead"}, {"mtu": 1500}, {"wait": True}, {"identity": "node.pem"}):
        with pytest.raises(racksum.BadArgument, match=f"{next(iter(option))} cannot be set with"):
            sidecar.connect(**option)
    monkeypatch.setenv("RACKSUM_DATA_AUTH", "mac")
    with pytest.raises(racksum.BadArgument, match="data_auth cannot be set with unix"):
        sidecar.connect()
    monkeypatch.delenv("RACKSUM_DATA_AUTH")
    with pytest.raises(racksum.Refused, match="restart the sidecar with `racksum worker --agg"):
        sidecar.connect(world=2, local_world=1)


def test_why_hosts_cannot_join_is_of_the_type_that_a_rank_without_a_sidecar_hears(
    tmp_path, aggregator
):
    for arguments, options, error in [
        (["--aggregator", "127.0.0.1:1"], {"join_timeout": 4.0}, racksum.NoAggregator),
        (["--aggregator", aggregator.address], {"generation": 0}, racksum.Refused),
    ]:
        sidecar = Sidecar(tmp_path / "one", *arguments)
        with racksum.connect(
            aggregator.address, job="hosts", rank=0, world=1, generation=1, insecure=True
        ):
            with pytest.raises(racksum.Error) as raised:
                sidecar.connect(job="hosts", world=2, local_world=1, **options)
            assert type(raised.value) is error, raised.value
        sidecar.stop()


def test_memory_that_there_is_no_room_for_is_refused_and_the_session_goes_on(tmp_path):
    sidecar = Sidecar(tmp_path / "socket", "--memory", "1M")
    with sidecar.connect() as session:
        with pytest.raises(racksum.Error, match="2097152 bytes exceed the 1048576"):
            session.empty(1 << 19)
        assert session.allreduce(session.empty(1000).fill_(3)).eq(3).all()
    sidecar.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user ID")
def test_users_that_share_a_socket_hear_of_their_own_jobs():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        sidecar = Sidecar(Path(folder) / "socket", "--mode", "666")
        program = shutil.copy(binary(), Path(folder) / "racksum")
        command = [program, "status", sidecar.address, "--format", "json"]
        with sidecar.connect():
            jobs_by_user = [
                json.loads(subprocess.check_output(command, user=user))["jobs"]
                for user in (0, 65534)
            ]
        sidecar.stop()
    assert [len(jobs) for jobs in jobs_by_user] == [1, 0]


def test_systemd_may_open_the_socket(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as opened:
        opened.bind(str(path))
        opened.listen()
        # Like systemd, pass the socket as descriptor 3.
        command = f'exec 3<&{opened.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "{binary()}" worker'
        process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=[opened.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    # A caller that connects before the sidecar runs is answered once it runs.
    with racksum.connect(f"unix:{path}", job="job", rank=0, world=1) as session:
        assert session.allreduce(np.ones(1, np.float32)).item() == 1
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.startswith("racksum worker at the systemd socket: ")


def test_a_socket_where_somebody_serves_is_not_taken(sidecar):
    command = [binary(), "worker", "--socket", sidecar.path]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert second.returncode == 3
    assert "another process serves there" in second.stderr
    with sidecar.connect() as session:
        session.allreduce(np.ones(1, np.float32))


def test_blocks_that_a_gpu_has_packed_meet_whole_tensors(sidecar, monkeypatch):
    monkeypatch.setattr(Staging, "takes", staticmethod(lambda device: True))

    def work(session):
        x = torch.zeros(10_000)
        x[: 5_000 * session.rank] = 1
        return allreduce(session, x).wait().sum().item()

    assert sidecar.run(3, work) == [15_000] * 3
