"""Bad input raises an exception of the right type, whose message is one sentence.

The session continues.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import racksum


def refusals():
    read_only = np.ones(4, np.float32)
    read_only.flags.writeable = False
    freed, cut = torch.ones(4), torch.ones(100)
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(200)
    one = np.ones(4, np.float32)
    return {
        "a list": ([1.0, 2.0], {}, "not list"),
        "bool": (np.ones(4, bool), {}, "not of bool"),
        "complex": (torch.ones(4, dtype=torch.complex64), {}, "not of complex64"),
        "big-endian": (np.ones(4, ">f4"), {}, "not in this host's byte order"),
        "read-only": (read_only, {}, "read-only"),
        "strided array": (np.ones((4, 4), np.float32)[:, 1], {}, "ascontiguousarray"),
        "strided tensor": (torch.ones(4, 4).t()[1:], {}, r"x\.contiguous\(\)"),
        "sparse tensor": (torch.ones(4).to_sparse(), {}, "layout torch.sparse_coo"),
        "meta tensor": (torch.ones(4, device="meta"), {}, "is on meta"),
        "a tensor whose storage was freed": (freed, {}, "has no memory of its own"),
        "a tensor whose storage was cut": (cut, {}, "reaches beyond its storage"),
        "a tensor that stands for zeros": (torch._efficientzerotensor((4,)), {}, "no memory"),
        "a tensor of tensors": (OfTensors(), {}, r"for a DTensor, pass x\.to_local\(\)"),
        "numpy's scalar": (one.mean(), {}, "is a scalar, which cannot be reduced in place"),
        "masked array": (np.ma.masked_array(one, one == 1), {}, r"is masked; pass x\.filled"),
        "an object that only looks like an array": (LooksLikeAnArray(), {}, "not LooksLikeAnArray"),
        "unknown op": (np.ones(4, np.float32), {"op": "prod"}, 'unknown reduction "prod"'),
        "unknown wire": (np.ones(4, np.float32), {"wire": "f8"}, 'unknown wire type "f8"'),
        "wide wire": (np.ones(4, np.float16), {"wire": "f32"}, "cannot carry a tensor of f16"),
        "block": (
            np.ones(4, np.float32),
            {"block": 100},
            "a power of two .* not 100",
        ),
        "block below": (one, {"block": -1}, "block must be a whole number from 32 to 1024, not -1"),
        "fractional block": (one, {"block": 64.0}, "block must be a whole .* not 64.0"),
        "lane": (np.ones(4, np.float32), {"lane": 3}, "lane 3 does not exist"),
        "lane below": (one, {"lane": -1}, "lane must be a whole number from 0 to 7, not -1"),
        "lane beyond": (one, {"lane": 300}, "lane must be a whole number from 0 to 7, not 300"),
        "lane that is not a number": (one, {"lane": "a"}, "lane must be a whole number .* not 'a'"),
        "tag below": (one, {"tag": -1}, "tag must be a whole number from 0 to 1844.*, not -1"),
        "tag beyond": (one, {"tag": 1 << 64}, "tag must be a whole number .* not 1844"),
        "no op": (one, {"op": None}, "op must be a valid Unicode string, not None"),
        "wire that is not a name": (one, {"wire": 3}, "wire must be a valid Unicode string, not 3"),
    }


class OfTensors(torch.Tensor):
    """A tensor without memory of its own, like a DTensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise AssertionError("racksum must not compute with a tensor that has no memory")


class LooksLikeAnArray:
    __array_interface__ = np.ones(4, np.float32).__array_interface__


@pytest.mark.parametrize("what", refusals())
def test_what_cannot_be_reduced_is_refused_and_the_session_goes_on(place, what):
    x, options, sentence = refusals()[what]
    with place.connect() as session:
        with pytest.raises(racksum.BadArgument, match=sentence) as refused:
            session.allreduce(x, **options)
        assert isinstance(refused.value, ValueError)
        assert "\n" not in str(refused.value)
        assert session.allreduce(np.ones(4, np.float32)).tolist() == [1.0] * 4


def test_a_refusal_is_told_to_the_ranks_that_made_the_call(place):
    def work(session):
        x, blocks = np.ones(10, np.float32), np.ones(64, np.float32)
        refused = [
            lambda: session.allreduce(np.ones((10, 2), np.float32)[:, 0]),
            lambda: session.allreduce(x, lane=7),
            lambda: session.allreduce(x, lane=1),
            lambda: session.allreduce(x, wire="no such type"),
            lambda: session.allreduce_blocks(np.array([0, -1]), blocks, 64, block=32),
            lambda: session.allreduce_blocks(np.array([0]), blocks, 64, block=32),
        ]
        for call in refused:
            if session.rank == 0:
                with pytest.raises(racksum.BadArgument):
                    call()
            else:
                with pytest.raises(racksum.Mismatch, match="rank 0 has a call that it rejected"):
                    session.allreduce(x.copy())
        return session.allreduce(x).sum()

    assert place.run(2, work) == [20, 20]


def test_blocks_of_less_than_nothing_are_refused(place):
    with (
        place.connect() as session,
        pytest.raises(racksum.BadArgument, match=r"elements must be a whole .* not -1"),
    ):
        session.allreduce_blocks(np.zeros(1, np.int64), np.ones(32, np.float32), -1)


@pytest.mark.parametrize("shape", [-5, (2, -1), 2.5, "ab", None, (2**30, 2**30)], ids=str)
def test_a_tensor_of_a_shape_that_cannot_be_is_refused(place, shape):
    with place.connect() as session:
        with pytest.raises(racksum.BadArgument, match="shape must be a whole number from 0"):
            session.empty(shape)
        assert session.empty(np.int64(5)).shape == (5,)
        assert session.empty(np.array([2, 3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ones(4, np.float32), np.ones(5, np.float32)),
        (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)),
        (np.ones(4, np.float32), np.ones(4, np.float64)),
    ],
    ids=["size", "shape", "dtype"],
)
def test_ranks_that_call_an_op_differently_all_hear_of_it(place, one, other):
    def work(session):
        with pytest.raises(racksum.Mismatch, match=r"rank \d has .*; rank \d has ") as differs:
            session.allreduce([one, other][session.rank].copy())
        assert isinstance(differs.value, ValueError)
        return session.allreduce(np.ones(3, np.float32)).sum()

    assert place.run(2, work) == [6, 6]


def test_ops_on_the_same_memory_take_turns(place):
    called = threading.Event()

    def work(session):
        x = session.empty(8) if session.rank else np.empty(8, np.float32)
        x[:] = 1
        if session.rank == 1:
            assert called.wait(30)
        handles = [session.allreduce(x, async_op=True)]
        called.set()
        handles += [session.allreduce(again, async_op=True) for again in (x, x[:4], x[3:])]
        for handle in reversed(handles):
            handle.wait()
        return x.tolist()

    assert place.run(2, work) == [[8.0] * 3 + [16.0] + [8.0] * 4] * 2


def test_ops_on_the_same_memory_take_turns_where_ranks_agree_on_exponents(racks):
    job = racks[0].new_job()
    called = threading.Event()

    def be(rank):
        x = np.ones(300, np.float32)
        with racks[rank].connect(job=job, rank=rank, world=2) as session:
            if rank == 1:
                assert called.wait(30)
            first = session.allreduce(x, async_op=True)
            called.set()
            session.allreduce(x, wire="fixed32")
            session.allreduce(x[:200])
            first.wait()
            return x.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(be, range(2))) == [[8.0] * 200 + [4.0] * 100] * 2


def test_agreeing_on_exponents_takes_the_last_place_of_an_op_and_keeps_it(racks):
    job = racks[0].new_job()
    full = threading.Event()

    def be(rank):
        with racks[rank].connect(job=job, rank=rank, world=2) as session:
            if rank == 1:
                assert full.wait(30)
            tensors = [np.ones(300, np.float32) for _ in range(session.max_ops + 2)]
            handles = [session.allreduce(x, async_op=True) for x in tensors[: session.max_ops - 1]]
            full.set()
            # The op on exponents takes the last place in flight, so the sum waits for room.
            for x in tensors[session.max_ops - 1 :]:
                session.allreduce(x, wire="fixed32")
            for handle in handles:
                handle.wait()
            return {x.sum() for x in tensors}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(be, range(2))) == [{600.0}] * 2


@pytest.mark.parametrize("how", ["data", "set_"])
def test_memory_that_a_tensor_had_is_there_until_its_op_has_ended(place, how):
    moved = threading.Event()

    def work(session):
        # The memory of so large a tensor returns to the kernel as soon as it is freed.
        x = torch.ones(8 << 20)
        if session.rank == 1:
            assert moved.wait(30)
        handle = session.allreduce(x, async_op=True)
        if session.rank == 1:
            assert handle.wait().sum().item() == 2 * (8 << 20)
        else:
            if how == "data":
                x.data = torch.zeros(3)
            else:
                x.set_(torch.zeros(3))
            moved.set()
            with pytest.raises(racksum.BadArgument, match="was replaced, by"):
                handle.wait()
        return session.allreduce(torch.ones(3)).sum().item()

    assert place.run(2, work) == [6, 6]


@pytest.mark.parametrize("index", [-1, 2**32, 2**40])
def test_a_block_that_cannot_be_is_named_as_it_is(place, index):
    with place.connect() as session:
        with pytest.raises(racksum.BadArgument, match=f"no block {index}; blocks are numbered"):
            session.allreduce_blocks(np.array([0, index]), np.ones(64, np.float32), 64, block=32)
        assert session.allreduce(np.ones(4, np.float32)).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        ("float31", "dtype must be a torch or numpy dtype, not 'float31'"),
        (object, "not of object"),
        (torch.complex64, "not of complex64"),
        (np.uint8, "not of uint8"),
    ],
    ids=str,
)
def test_a_tensor_of_a_type_that_cannot_be_reduced_is_not_made(place, dtype, match):
    with place.connect() as session, pytest.raises(racksum.BadArgument, match=match):
        session.empty(4, dtype)


@pytest.mark.parametrize("timeout", ["x", float("nan"), float("inf"), True, -1])
def test_a_wait_of_no_seconds_is_refused(place, timeout):
    with place.connect() as session:
        handle = session.allreduce(np.ones(4, np.float32), async_op=True)
        with pytest.raises(racksum.BadArgument, match="timeout must be a finite number"):
            handle.wait(timeout)
        assert handle.wait(20).tolist() == [1.0] * 4


def test_an_overflow_names_the_element(cluster):
    def work(session):
        x = np.zeros(2000, np.float32)
        x[700] = np.inf
        with pytest.raises(racksum.Overflow) as overflow:
            session.allreduce(x, wire="fixed32")
        assert overflow.value.element == 512
        return session.allreduce(np.ones(3, np.float32)).sum()

    assert cluster.run(2, work) == [6, 6]
