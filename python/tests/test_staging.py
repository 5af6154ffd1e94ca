"""Staging of GPU tensors on the host, and of host tensors on the same path."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch

import racksum
import racksum.torch
from racksum.torch import staging
from racksum.torch.staging import Staging, find, pack, staging_of, unpack
from test_lifecycle import python

WORLD = 3
BLOCK = 32
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """The device of the tensors. Host tensors take the path of GPU tensors."""
    monkeypatch.setattr(Staging, "takes", staticmethod(lambda device: True))
    return request.param


def of_blocks(*marks: int, rest: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor with one of these values in each block, and ``rest`` zeros at the end."""
    x = torch.zeros(len(marks) * BLOCK + rest, dtype=dtype)
    x[3 : len(marks) * BLOCK : BLOCK] = torch.tensor(marks, dtype=dtype)
    return x


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_blocks_that_are_not_zero_are_found_and_come_to_their_places(device, dtype):
    for rest in (0, 1, 31):
        x = of_blocks(0, 1, 0, -2, 0, rest=rest, dtype=dtype).to(device)
        assert find(x, BLOCK).tolist() == [1, 3]
        indices, values = pack(x, BLOCK, find(x, BLOCK))
        assert indices.tolist() == [1, 3, *([5] if rest else [])]
        assert len(values) == 2 * BLOCK + rest
        into = torch.ones_like(x)
        unpack(into, BLOCK, indices, values)
        assert torch.equal(into, x)
        unpack(into, BLOCK, indices[:2], values[: 2 * BLOCK])
        assert torch.equal(into, x)
    for elements in (0, 5):
        assert find(torch.ones(elements, dtype=dtype, device=device), BLOCK).tolist() == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_a_number_is_found_and_a_negative_zero_is_not(device, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 2
    odd = [float("nan"), -0.0, float("-inf"), tiny, -torch.finfo(dtype).max, 0.0]
    x = torch.cat(
        [of_blocks(0, dtype=dtype).index_fill(0, torch.tensor(9), value) for value in odd]
    )
    assert find(x.to(device), BLOCK).tolist() == [0, 2, 3, 4]


def allreduced(session: racksum.Session, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    return staging.allreduce(session, x, *args, **named).wait(20.0)


def at_rank(rank: int, dtype: torch.dtype, elements: int = 4000) -> torch.Tensor:
    """Returns a tensor: dense at rank 0, zero except for a few blocks at rank 1, zero at others."""
    x = torch.zeros(elements, dtype=dtype)
    draw = torch.Generator().manual_seed(rank)
    if rank == 0:
        x = torch.randint(-9, 9, (elements,), generator=draw).to(dtype)
    if rank == 1:
        x[70:90] = torch.randint(-9, 9, (20,), generator=draw).to(dtype)
        x[-7:] = 5
    return x


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
def test_sums_are_those_of_the_host_whatever_each_rank_gives(cluster, device, op, dtype):
    def work(session):
        for first in (0, 1):
            # The tensor is dense at one rank and sparse at others, and then sparse at all.
            x = at_rank(session.rank + first, dtype)
            expected = session.allreduce(x.clone(), op, block=BLOCK)
            found = allreduced(session, x.to(device), op, block=BLOCK)
            assert torch.equal(found.cpu(), expected)

    cluster.run(WORLD, work)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (64, 32)], ids=str)
def test_shapes_are_those_that_ranks_of_the_host_give(cluster, device, shape):
    def work(session):
        x = torch.ones(shape)
        if session.rank == 0:
            return session.allreduce(x).tolist()
        return allreduced(session, x.to(device)).tolist()

    cluster.run(2, work)


def test_a_narrow_wire(cluster, device):
    def work(session):
        x = torch.linspace(0, 1, 4000) * (session.rank + 1)
        expected = session.allreduce(x.clone(), "avg", wire="bf16")
        assert torch.equal(allreduced(session, x.to(device), "avg", wire="bf16").cpu(), expected)

    cluster.run(2, work)


def test_blocks_of_negative_zeros_have_the_same_bits_at_all_ranks(cluster, device):
    def work(session):
        x = torch.full((4 * BLOCK,), -0.0) if session.rank else torch.zeros(4 * BLOCK)
        return allreduced(session, x.to(device), block=BLOCK).cpu().view(torch.int32).any().item()

    assert cluster.run(2, work) == [False, False]


def test_only_blocks_that_are_not_zero_cross(cluster, device, monkeypatch):
    crossed = []
    to_host = staging.to_host

    def counted(*tensors):
        crossed.append(sum(x.nbytes for x in tensors))
        return to_host(*tensors)

    monkeypatch.setattr(staging, "to_host", counted)
    with cluster.connect() as session:
        allreduced(session, of_blocks(1, *[0] * 98, 1).to(device), block=BLOCK)
        allreduced(session, torch.ones(100 * BLOCK, device=device), block=BLOCK)
    assert crossed == [2 * (4 * BLOCK + 8), 100 * 4 * BLOCK]


def test_parameters_and_tensors_of_inference(cluster, device):
    with cluster.connect() as session:
        parameter = torch.nn.Parameter(torch.ones(5, device=device))
        assert allreduced(session, parameter) is parameter
        with torch.inference_mode():
            assert allreduced(session, torch.ones(5, device=device)).tolist() == [1] * 5
        sums = racksum.torch.allreduce_sparse(session, torch.eye(3, device=device).to_sparse(1))
        assert not sums.wait().is_inference()


def test_a_tensor_that_is_not_contiguous_is_refused(cluster, device):
    with cluster.connect() as session:
        with pytest.raises(racksum.BadArgument, match=r"pass x\.contiguous\(\)"):
            staging.allreduce(session, torch.ones(4, 4, device=device).t()[1:])
        with pytest.raises(racksum.BadArgument, match="not of bool"):
            allreduced(session, torch.ones(4, device=device, dtype=torch.bool))
        assert allreduced(session, torch.ones(4, device=device)).tolist() == [1] * 4


def test_many_in_flight_are_used_at_once(cluster, device):
    def work(session):
        xs = [torch.full((1000,), float(i), device=device) for i in range(100)]
        ops = [staging.allreduce(session, x) for x in xs]
        futures = [op.get_future() for op in ops[::2]]
        # These additions run on the current stream, without a synchronization.
        odd = [(op.wait() + 1).sum().item() for op in ops[1::2]]
        even = [(future.wait() + 1).sum().item() for future in futures]
        return even, odd

    even = [1000.0 * (2 * i + 1) for i in range(0, 100, 2)]
    odd = [1000.0 * (2 * i + 1) for i in range(1, 100, 2)]
    assert cluster.run(2, work) == [(even, odd)] * 2


@pytest.mark.gpu
def test_streams_wait_for_what_they_use_and_the_host_does_not(cluster):
    def late(value: float) -> torch.Tensor:
        """Returns a tensor whose elements are computed some time later."""
        x = torch.zeros(5_000_000, device="cuda")
        torch.cuda._sleep(100_000_000)
        return x.fill_(value)

    with cluster.connect() as session:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                op = staging.allreduce(session, late(3))
                assert not stream.query(), "the call waited for the stream"
                assert (op.wait() * 2).eq(6).all()
                future = staging.allreduce(session, late(4)).get_future()
            with torch.cuda.stream(torch.cuda.Stream()):
                assert (future.wait() * 2).eq(8).all()


def test_ops_of_the_host_come_after_those_before_them(cluster, device):
    def work(session):
        own = staging_of(session)
        if session.rank == 0:
            own._up.do(lambda: time.sleep(0.3))
        late = staging.allreduce(session, torch.ones(5, device=device))
        # The tensors have the same shape, so only the order distinguishes them.
        first = session.allreduce(torch.full((5,), 10.0))
        return first.tolist(), late.wait().tolist()

    assert cluster.run(2, work) == [([20.0] * 5, [2.0] * 5)] * 2


def test_a_call_that_is_interrupted_twice_comes_after_those_before_it(cluster, device):
    def work(session):
        own = staging_of(session)
        first, third = (torch.full((5,), value, device=device) for value in (1.0, 100.0))
        if session.rank == 1:
            staged = staging.allreduce(session, first)
            with pytest.raises(racksum.Mismatch):
                session.allreduce(torch.full((5,), 10.0))
        else:
            busy = threading.Event()
            own._up.do(busy.wait)
            staged = staging.allreduce(session, first)
            session._before_op = interrupt
            with pytest.raises(KeyboardInterrupt):
                session.allreduce(torch.full((5,), 10.0))
            session._before_op = own.drain
            busy.set()
        return staged.wait().tolist(), allreduced(session, third).tolist()

    def interrupt():
        raise KeyboardInterrupt

    assert cluster.run(2, work) == [([2.0] * 5, [200.0] * 5)] * 2


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_others_are_told_of_a_tensor_that_its_device_fails_to_make(
    cluster, device, monkeypatch, is_sparse
):
    class Failing:
        def synchronize(self):
            raise RuntimeError("device-side assert")

    def started(session):
        x = torch.ones(64, device=device)
        if is_sparse:
            return racksum.torch.allreduce_sparse(session, x.to_sparse())
        return staging.allreduce(session, x)

    def work(session):
        if session.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(staging, "so_far", lambda device: Failing())
                failed = started(session)
            with pytest.raises(RuntimeError, match="device-side assert"):
                failed.wait()
        # Start only once rank 0 has failed, because its patch of `so_far` affects both ranks.
        else:
            first_failed.wait(60)
            with pytest.raises(racksum.Mismatch):
                started(session).wait()
        first_failed.set()
        return allreduced(session, torch.ones(3, device=device)).tolist()

    first_failed = threading.Event()
    assert cluster.run(2, work) == [[2.0] * 3] * 2


def test_a_call_for_which_no_thread_starts_is_told_and_the_next_pairs(cluster, device):
    def work(session):
        own = staging_of(session)
        if session.rank == 0:
            do, own._up.do = own._up.do, no_thread
            with pytest.raises(RuntimeError, match="new thread"):
                staging.allreduce(session, torch.ones(5, device=device))
            own._up.do = do
            assert not own.is_behind()
        else:
            with pytest.raises(racksum.Mismatch):
                allreduced(session, torch.ones(5, device=device))
        return allreduced(session, torch.ones(3, device=device)).tolist()

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    assert cluster.run(2, work) == [[2.0] * 3] * 2


def test_what_comes_after_an_op_is_done_before_anyone_has_it(cluster, device):
    with cluster.connect() as session:
        op = staging.allreduce(session, torch.ones(5, device=device)).then(lambda x: x.add_(1))
        assert [op.wait().tolist(), op.wait().tolist()] == [[2.0] * 5] * 2
        assert op.done()


def test_ops_of_a_device_have_the_handle_of_the_host(cluster, device):
    with cluster.connect() as session:
        x = torch.ones(5, device=device)
        ops = [
            staging.allreduce(session, x.clone()),
            racksum.torch.allreduce_sparse(session, x.to_sparse()),
            staging.allreduce(session, x.clone()).then(lambda sums: sums * 2),
        ]
        for op in ops:
            assert type(op) is racksum.Handle
            with pytest.raises(racksum.BadArgument, match="timeout must be a finite number"):
                op.wait(-1)
            assert op.absent == ()
            assert op.done()
        assert [op.wait().sum().item() for op in ops[::2]] == [5, 10]
        assert ops[1].wait().to_dense().tolist() == [1] * 5


def test_a_copy_that_fails_after_its_op_has_ended_fails_the_next_wait():
    transfer = staging._Transfer(torch.device("cpu"))
    handle = racksum.Handle(transfer.ended.wait, transfer.outcome)
    with transfer.capturing_errors():
        transfer.end("sums", staging.so_far(torch.device("cpu")), ())
        assert handle.wait() == "sums"
        raise RuntimeError("device-side assert")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            handle.wait()


def test_errors_have_their_types(cluster, device):
    def work(session):
        differs = staging.allreduce(session, torch.ones(4 + session.rank, device=device))
        sums = staging.allreduce(session, torch.ones(3, device=device))
        with pytest.raises(racksum.Mismatch, match=r"rank \d has .*; rank \d has "):
            differs.then(lambda x: x.mul_(2)).wait()
        return sums.wait().tolist()

    assert cluster.run(2, work) == [[2.0] * 3] * 2


def test_waiting_has_a_limit(cluster, device):
    waited = threading.Event()

    def work(session):
        if session.rank == 1:
            waited.wait(60)
        op = staging.allreduce(session, torch.ones(3, device=device))
        if session.rank == 0:
            with pytest.raises(racksum.WaitTimeout):
                op.wait(0.01)
            waited.set()
        return op.wait().tolist()

    assert cluster.run(2, work) == [[2.0] * 3] * 2


def test_a_sparse_tensor(cluster, device):
    def work(session):
        torch.manual_seed(session.rank)
        indices = torch.randint(50, (1, (0, 12, 5)[session.rank]))
        x = torch.sparse_coo_tensor(indices, torch.randn(indices.shape[1], 8), (50, 8))
        expected = session.allreduce(x.to_dense(), "avg")
        found = racksum.torch.allreduce_sparse(session, x.to(device), "avg").wait()
        assert found.device.type == device
        assert found.is_coalesced()
        torch.testing.assert_close(found.to_dense().cpu(), expected)

    cluster.run(WORLD, work)


def test_threads_end_with_their_session(cluster, device):
    session = cluster.connect()
    before = set(threading.enumerate())
    allreduced(session, torch.ones(3, device=device))
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} == {"racksum-up", "racksum-down"}
    session.close()
    del session
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()


def test_a_fork_is_told_that_the_session_is_not_its_own(cluster, monkeypatch):
    monkeypatch.setattr(Staging, "takes", staticmethod(lambda device: True))
    with cluster.connect() as session:
        allreduced(session, torch.ones(3))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                allreduced(session, torch.ones(3))
            except racksum.SessionClosed:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert allreduced(session, torch.ones(3)).tolist() == [1.0] * 3


def test_a_script_that_ends_with_ops_in_flight_ends(cluster):
    ran = python(
        """
        import sys
        import torch, racksum
        from racksum.torch import staging

        staging.Staging.takes = staticmethod(lambda device: True)
        session = racksum.connect(sys.argv[1], job=sys.argv[2], rank=0, world=1)
        for _ in range(50):
            staging.allreduce(session, torch.ones(1_000_000))
        """,
        cluster.address,
        cluster.new_job(),
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_importing_starts_no_thread_and_leaves_gpus_alone():
    ran = python(
        """
        import os
        import torch
        before = len(os.listdir("/proc/self/task"))
        import racksum.torch
        print(len(os.listdir("/proc/self/task")) - before, torch.cuda.is_initialized())
        """
    )
    assert ran.stdout == "0 False\n", ran.stderr
