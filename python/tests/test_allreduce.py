"""The results of allreduce, the tensors that it accepts, and waits for its ops."""

from __future__ import annotations

import gc
import re
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch

import racksum

WORLD = 3

FLOATS = [np.float32, np.float64, np.float16]
INTEGERS = [np.int32, np.int64]


def inputs(dtype, shape=(1000,)):
    """Returns a tensor of small whole numbers for each rank, with exact sums in every dtype."""
    return [
        np.random.default_rng(rank).integers(-8, 9, shape).astype(dtype) for rank in range(WORLD)
    ]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize(("op", "of_all"), [("sum", np.sum), ("min", np.min), ("max", np.max)])
def test_arrays_of_every_dtype_are_reduced_in_place(cluster, dtype, op, of_all):
    tensors = inputs(dtype)
    expected = of_all(np.stack(tensors), axis=0).astype(dtype)
    returned = cluster.run(WORLD, lambda session: session.allreduce(tensors[session.rank], op))
    for rank, tensor in enumerate(tensors):
        assert returned[rank] is tensor
        np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_average_is_the_sum_divided_once(cluster, dtype):
    tensors = inputs(dtype)
    expected = (np.sum(np.stack(tensors).astype(np.float64), axis=0) / WORLD).astype(dtype)
    cluster.run(WORLD, lambda session: session.allreduce(tensors[session.rank], "avg"))
    for tensor in tensors:
        np.testing.assert_allclose(tensor, expected, rtol=1e-3 if dtype is np.float16 else 1e-6)


def test_bfloat16_of_numpy_and_of_torch_meet(cluster):
    tensors = inputs(np.float32)
    expected = np.sum(np.stack(tensors), axis=0)

    def work(session):
        mine = tensors[session.rank]
        if session.rank == 0:
            return session.allreduce(mine.astype(ml_dtypes.bfloat16)).astype(np.float32)
        return session.allreduce(torch.from_numpy(mine).bfloat16()).float().numpy()

    for sums in cluster.run(WORLD, work):
        np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64],
)
def test_torch_tensors_of_every_dtype_are_reduced_in_place(cluster, dtype):
    tensors = [torch.from_numpy(x).to(dtype) for x in inputs(np.float32, (10, 7, 11))]
    expected = torch.stack(tensors).double().sum(0).to(dtype)
    cluster.run(WORLD, lambda session: session.allreduce(tensors[session.rank]))
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("elements", [0, 1, 255, 256, 257, 70_001])
def test_tensors_of_any_size_are_reduced(cluster, elements):
    def work(session):
        return session.allreduce(np.full(elements, session.rank + 1, np.float32))

    for sums in cluster.run(WORLD, work):
        np.testing.assert_array_equal(sums, np.full(elements, 6, np.float32))


def test_a_slice_is_reduced_and_what_is_beside_it_left(cluster):
    def work(session):
        whole = torch.ones(300)
        session.allreduce(whole[100:200])
        return whole

    for whole in cluster.run(WORLD, work):
        assert whole.tolist() == [1.0] * 100 + [3.0] * 100 + [1.0] * 100


def test_a_narrow_wire_rounds_and_all_ranks_get_the_same_bits(cluster):
    def work(session, wire):
        generator = np.random.default_rng(session.rank)
        return session.allreduce(generator.normal(size=5000).astype(np.float32), wire=wire)

    exact = cluster.run(WORLD, lambda session: work(session, None))[0]
    for wire, error in [("bf16", 0.05), ("f16", 0.01), ("int8", 0.2), ("fixed32", 1e-5)]:
        sums = cluster.run(WORLD, lambda session, wire=wire: work(session, wire))
        assert all(one.tobytes() == sums[0].tobytes() for one in sums), wire
        assert np.abs(sums[0] - exact).max() < error, wire
        assert wire == "fixed32" or np.abs(sums[0] - exact).max() > 0, wire


def test_blocks_of_zeros_are_not_sent(cluster):
    def work(session):
        x = np.zeros(256 * 1000, np.float32)
        x[256 * 17] = 1
        before = session.stats()["tx_bytes"]
        session.allreduce(x)
        assert x[256 * 17] == WORLD
        assert x.sum() == WORLD
        return session.stats()["tx_bytes"] - before

    assert all(sent < 4096 for sent in cluster.run(WORLD, work))


def test_the_counters_are_those_that_the_documentation_names(place):
    named = re.findall(r"``(\w+)``", racksum.Session.stats.__doc__)
    with place.connect() as session:
        assert list(session.stats()) == named


def test_ops_in_flight_end_in_any_order(cluster):
    def work(session):
        handles = [
            session.allreduce(np.full(size, 1.0, np.float32), async_op=True)
            for size in (100_000, 10, 50_000)
        ]
        return [handle.wait().sum() for handle in reversed(handles)]

    assert cluster.run(WORLD, work) == [[150_000, 30, 300_000]] * WORLD


def test_a_handle_says_whether_it_is_done(place):
    asked = threading.Event()

    def work(session):
        if session.rank == 1:
            asked.wait(60)
        handle = session.allreduce(np.ones(10, np.float32), async_op=True)
        if session.rank == 0:
            assert not handle.done()
            with pytest.raises(TimeoutError, match=r"not ended after 0\.01 s"):
                handle.wait(0.01)
            asked.set()
        first = handle.wait()
        assert handle.done()
        assert handle.wait() is first
        assert handle.absent == ()
        return first.sum()

    assert place.run(2, work) == [20, 20]


def test_an_op_that_is_done_has_reduced_its_tensor(place):
    def work(session):
        x = np.ones(10, np.float32)
        handle = session.allreduce(x, async_op=True)
        while not handle.done():
            time.sleep(0.001)
        return x.sum()

    assert place.run(2, work) == [20, 20]


def test_a_handle_keeps_its_tensor(place):
    def work(session):
        handle = session.allreduce(np.ones(100_000, np.float32), async_op=True)
        gc.collect()
        np.zeros(100_000, np.float32)
        return handle.wait().sum()

    assert place.run(2, work) == [200_000, 200_000]


def test_an_op_whose_handle_is_dropped_goes_on(place):
    def work(session):
        x = np.ones(1000, np.float32)
        if session.rank == 0:
            session.allreduce(x, async_op=True)
            gc.collect()
            reduced = session.allreduce(np.ones(10, np.float32)).sum()
            while x.sum() != 2000:
                time.sleep(0.001)
            return reduced
        assert session.allreduce(x).sum() == 2000
        return session.allreduce(np.ones(10, np.float32)).sum()

    assert place.run(2, work) == [20, 20]


def test_more_ops_than_may_be_in_flight_wait_for_room(place):
    def work(session):
        count = 5 * session.max_ops
        handles = [
            session.allreduce(np.full(1000, i, np.float32), async_op=True) for i in range(count)
        ]
        return [handle.wait()[0] for handle in reversed(handles)] == [
            2.0 * i for i in reversed(range(count))
        ]

    assert place.run(2, work) == [True, True]
