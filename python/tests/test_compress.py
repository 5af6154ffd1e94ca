"""Compressors keep the blocks that they promise, and the memory stores the rest."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

import racksum
import racksum.torch
from racksum.torch.compress import (
    BlockRandomK,
    BlockThreshold,
    BlockTopK,
    BlockTopKRatio,
    ResidualMemory,
    Rounded,
    wire_for,
)

BLOCK = 32


def tensor(*greatest: float) -> torch.Tensor:
    """Returns a tensor with one of these values in each block; the last block is short."""
    x = torch.zeros(len(greatest), BLOCK)
    x[:, 3] = torch.tensor(greatest)
    return x.flatten()[:-5]


def kept(compressor, x: torch.Tensor, name: str = "x") -> list[int]:
    """Returns the numbers of the blocks that are kept, after checking that they are unchanged."""
    left = compressor.decompress(*compressor.compress(x, name))
    assert left.shape == x.shape
    marks = [bool(block.any()) for block in left.split(BLOCK)]
    for is_kept, before, after in zip(marks, x.split(BLOCK), left.split(BLOCK), strict=True):
        assert not is_kept or torch.equal(before, after)
    return [i for i, is_kept in enumerate(marks) if is_kept]


def test_the_heaviest_blocks_are_kept():
    x = tensor(1, -5, 0, 3, 2)
    assert kept(BlockTopK(2, BLOCK), x) == [1, 3]
    assert kept(BlockTopK(100, BLOCK), x) == [0, 1, 3, 4]
    assert kept(BlockTopKRatio(0.6, BLOCK), x) == [1, 3, 4]
    assert kept(BlockTopKRatio(0.001, BLOCK), x) == [1], "one block must be kept"
    assert kept(BlockThreshold(2.0, BLOCK), x) == [1, 3, 4]


def test_blocks_that_are_not_numbers_are_kept():
    assert kept(BlockThreshold(2.0, BLOCK), tensor(1, float("inf"), 0)) == [1]
    left = BlockThreshold(2.0, BLOCK)
    x = tensor(1, float("nan"))
    assert left.decompress(*left.compress(x, "x"))[BLOCK + 3].isnan()


def test_blocks_at_random_are_the_same_at_all_ranks_and_others_each_step():
    x = torch.ones(100 * BLOCK)
    one, other = BlockRandomK(0.2, seed=7, block=BLOCK), BlockRandomK(0.2, seed=7, block=BLOCK)
    steps = [kept(one, x) for _ in range(3)]
    assert [kept(other, x) for _ in range(3)] == steps
    assert all(len(step) == 20 for step in steps)
    assert steps[0] != steps[1]
    assert kept(one, x, "y") != kept(other, x, "z"), "two tensors have the same random blocks"
    again = BlockRandomK(0.2, seed=7, block=BLOCK)
    again.load_state_dict({"x": 2})
    assert kept(again, x) == steps[2]


def test_what_is_left_out_comes_with_the_next_step():
    memory, compressor = ResidualMemory(), BlockTopK(1, BLOCK)
    sent = torch.zeros(3 * BLOCK - 5)
    given = torch.zeros_like(sent)
    for _ in range(30):
        x = memory.compensate(tensor(1, 2, 3), "x")
        given += tensor(1, 2, 3)
        tensors, ctx = compressor.compress(x, "x")
        memory.update(x, "x", compressor, tensors, ctx)
        sent += compressor.decompress(tensors, ctx)
        torch.testing.assert_close(sent + memory.residuals["x"], given)
    assert sent.split(BLOCK)[0].any(), "the lightest block was never sent"


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 2], ids=["left out", "sent"])
def test_what_is_no_number_is_not_remembered(bad, place):
    memory, compressor = ResidualMemory(), BlockThreshold(2.0, BLOCK)
    x = tensor(1, 1, 3)
    x[place * BLOCK] = bad
    if place == 0:
        compressor.choose = lambda blocks, name: torch.tensor([2])
    memory.update(x, "x", compressor, *compressor.compress(x, "x"))
    left = memory.residuals["x"]
    assert left.isfinite().all()
    assert left[BLOCK : 2 * BLOCK].any(), "the finite elements were not stored"


def test_a_tensor_that_changes_its_size_is_refused():
    memory, compressor = ResidualMemory(), BlockTopK(1, BLOCK)
    x = tensor(1, 2)
    memory.update(x, "bucket 0", compressor, *compressor.compress(x, "bucket 0"))
    with pytest.raises(racksum.BadArgument, match="has 10 elements, but its residual has 59"):
        memory.compensate(torch.ones(10), "bucket 0")


@pytest.mark.parametrize("wire", ["bf16", "f16", "int8"])
def test_rounding_is_that_of_the_wire(cluster, wire):
    x = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    compressor = Rounded(wire, block=BLOCK)
    [rounded], _ = compressor.compress(x, "x")
    assert not torch.equal(rounded, x)
    with cluster.connect() as session:
        sent = session.allreduce(x.clone(), wire=wire, block=BLOCK)
    if wire == "int8":
        # The result is rounded too, with a scale that may differ in its last bit.
        torch.testing.assert_close(rounded, sent, rtol=1e-6, atol=0)
    else:
        assert torch.equal(rounded, sent)


def test_rounding_what_another_compressor_keeps():
    compressor = Rounded("bf16", BlockTopK(1, BLOCK), BLOCK)
    x = tensor(1, 1.2345678)
    left = compressor.decompress(*compressor.compress(x, "x"))
    assert left.nonzero().tolist() == [[BLOCK + 3]]
    assert left[BLOCK + 3] == torch.tensor(1.2345678).bfloat16().float()
    zeros_and_worse = torch.cat([torch.zeros(BLOCK), torch.tensor([1.0, float("inf")])])
    [rounded], _ = Rounded("int8", block=BLOCK).compress(zeros_and_worse, "x")
    assert rounded[:BLOCK].eq(0).all()
    assert rounded[BLOCK:].isnan().all()


@pytest.mark.parametrize(
    ("wire", "unchanged"),
    [
        ("int8", set()),
        ("bf16", {torch.float16, torch.bfloat16}),
        ("f16", {torch.float16, torch.bfloat16}),
        ("fixed32", {torch.float16, torch.bfloat16}),
        ("f32", {torch.float16, torch.bfloat16}),
        ("f64", {torch.float16, torch.bfloat16, torch.float32}),
    ],
)
def test_what_is_as_narrow_as_the_wire_travels_as_it_is(wire, unchanged):
    floats = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    found = {dtype for dtype in floats if wire_for(wire, dtype) is None}
    assert found == unchanged
    assert all(wire_for(wire, dtype) == wire for dtype in floats - unchanged)
    assert wire_for(wire, torch.int64) is None
    x = torch.randn(100).to(torch.float16)
    if wire in ("bf16", "f16"):
        assert Rounded(wire).compress(x, "x")[0][0] is x


def test_a_state_is_pickled_without_its_session(cluster):
    with cluster.connect() as session:
        memory = ResidualMemory()
        memory.residuals["bucket 0"] = torch.ones(3)
        state = racksum.torch.HookState(session, compressor=BlockTopK(3), memory=memory)
        state.iteration = 5
        again = pickle.loads(pickle.dumps(state))
        assert again.session is None
        assert again.iteration == 0, "a loaded state must count steps from 0"
        assert again.memory.residuals["bucket 0"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "compressor",
    [
        None,
        BlockTopK(3),
        BlockTopKRatio(0.1),
        BlockRandomK(0.1),
        BlockThreshold(0.5),
        Rounded("bf16", BlockTopK(3)),
    ],
    ids=lambda compressor: type(compressor).__name__,
)
def test_a_checkpoint_with_a_state_is_loaded_as_one_of_weights_only(compressor):
    state = racksum.torch.HookState(None, compressor=compressor)
    state._layouts["0"] = [(0, (2, 3)), (None, (4,))]
    x = torch.randn(64 * BLOCK)
    if compressor is not None:
        compressor.compress(x, "bucket 0")
        state.memory.residuals["bucket 0"] = x
    file = io.BytesIO()
    torch.save({"hook": state}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)["hook"]
    assert again.session is None
    assert again._layouts == state._layouts
    assert type(again.compressor) is type(compressor)
    if compressor is not None:
        assert torch.equal(again.memory.residuals["bucket 0"], x)
        both = (compressor, again.compressor)
        assert torch.equal(*(c.decompress(*c.compress(x, "bucket 0")) for c in both))


def test_a_compressor_that_rounds_is_pickled_with_its_state():
    state = racksum.torch.HookState(None, compressor=Rounded("bf16", BlockTopK(1, BLOCK)))
    again = pickle.loads(pickle.dumps(state)).compressor
    x = tensor(1, 1.2345678)
    assert torch.equal(*(c.decompress(*c.compress(x, "x")) for c in (state.compressor, again)))


def test_blocks_are_those_of_the_compressor():
    compressor = Rounded("bf16", BlockTopK(1, 64))
    assert compressor.block == 64
    assert racksum.torch.HookState(None, compressor=compressor).block == 64
    assert racksum.torch.HookState(None).block == 256


def test_what_a_compressor_rounds_travels_so_and_nothing_else(cluster):
    class Bucket:
        def __init__(self, gradients):
            self._gradients = gradients

        def buffer(self):
            return self._gradients

        def index(self):
            return 0

        def is_last(self):
            return True

        def parameters(self):
            return []

    def sent(session, state):
        before = session.stats()["tx_bytes"]
        bucket = Bucket(torch.randn(1 << 16))
        racksum.torch.allreduce_hook(state, bucket).wait()
        return session.stats()["tx_bytes"] - before

    def work(session):
        state = racksum.torch.HookState(session, compressor=Rounded("int8"), start_iter=2)
        of_steps = [sent(session, state) for _ in range(3)]
        # Only the last step was compressed. Its float32 tensor is sent as int8.
        assert state.compression_stats() == (1.0, 4 << 16, 4 << 16)
        return of_steps

    for first, second, third in cluster.run(2, work):
        assert min(first, second) > 3.5 * third


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: BlockTopK(1, block=0), "block must be a power of two from 32 to 1024, not 0"),
        (lambda: BlockThreshold(1.0, block=48), "block must be a power of two"),
        (lambda: Rounded("int8", block=2048), "block must be a power of two"),
        (lambda: Rounded("int8", BlockTopK(1), block=64), "leaves out blocks of 256 elements"),
        (lambda: racksum.torch.HookState(None, block=33), "block must be a power of two"),
        (lambda: racksum.torch.HookState(None, block=True), "block must be a power of two"),
        (lambda: racksum.torch.HookState(None, block="64"), "block must be a power of two"),
        (lambda: racksum.torch.HookState(None, wire="bogus"), "wire must be one of .* 'bogus'"),
        (lambda: racksum.torch.HookState(None, wire=3), "wire must be one of f32"),
        (lambda: racksum.torch.HookState(None, wire="i32"), "wire must be one of .* 'i32'"),
        (
            lambda: racksum.torch.HookState(None, compressor=BlockTopK(1, 64), block=256),
            "block is 256, but the compressor leaves out blocks of 64 elements",
        ),
        (
            lambda: racksum.torch.HookState(None, compressor=Rounded("int8"), wire="bf16"),
            "wire is 'bf16', but the compressor rounds to int8",
        ),
        (lambda: BlockTopK(0), "k must be a whole number from 1"),
        (lambda: BlockTopK(2.5), "k must be a whole number from 1"),
        (lambda: BlockTopKRatio(1.5), "compress_ratio must be above 0"),
        (lambda: BlockRandomK(0.0), "compress_ratio must be above 0"),
        (lambda: Rounded("f32"), "wire must be a type to round to"),
        (
            lambda: racksum.torch.HookState(None, compressor=BlockTopK(1), start_iter=1),
            "start_iter must be 2",
        ),
        (lambda: racksum.torch.HookState(None, fallback="hope"), "fallback must be one of"),
        (
            lambda: racksum.torch.HookState(None, memory=ResidualMemory(), error_feedback=False),
            "error_feedback=False",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, match):
    with pytest.raises(racksum.BadArgument, match=match):
        make()
