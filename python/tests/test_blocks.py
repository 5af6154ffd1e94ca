"""Lists of blocks and sparse tensors are reduced like the equivalent dense tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import racksum
import racksum.torch

WORLD = 3


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
def test_blocks_are_those_of_the_dense_tensor(cluster, op):
    elements, block = 1000, 32
    count = -(-elements // block)

    def work(session):
        random = np.random.default_rng(session.rank)
        indices = np.sort(random.choice(count - 1, 9, replace=False)).astype(np.int64)
        values = random.integers(-9, 10, (9, block)).astype(np.float64)
        dense = np.zeros((count, block))
        dense[indices] = values
        dense = np.ascontiguousarray(dense.reshape(-1)[:elements])
        where, sums = session.allreduce_blocks(
            indices, values.reshape(-1), elements, op, block=block
        )
        session.allreduce(dense, op)
        found = np.zeros((count, block))
        found[where] = sums.reshape(-1, block)
        np.testing.assert_allclose(found.reshape(-1)[:elements], dense)
        return where.tolist()

    of_ranks = cluster.run(WORLD, work)
    assert of_ranks[0] == sorted(of_ranks[0])
    assert of_ranks[1:] == of_ranks[:1] * 2


def test_blocks_of_torch_that_ranks_lack_and_the_short_last_one(cluster):
    def work(session):
        if session.rank == 0:
            indices, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
        else:
            indices, values = torch.tensor([3]), torch.ones(4)
        return session.allreduce_blocks(indices, values, 100, block=32)

    for where, sums in cluster.run(WORLD, work):
        assert where.tolist() == [3]
        assert sums.tolist() == [2.0] * 4


def test_sums_are_not_made_of_fake_tensors(cluster):
    def work(session):
        indices, values = torch.tensor([0, 2]), torch.ones(64)
        handle = session.allreduce_blocks(indices, values, 96, block=32, async_op=True)
        with FakeTensorMode(), pytest.raises(racksum.BadArgument, match="no memory of its own"):
            handle.wait()
        return handle.wait()[0].tolist()

    assert cluster.run(2, work) == [[0, 2]] * 2


def test_what_is_listed_twice_is_combined(cluster):
    def work(session):
        indices = np.array([2, 0, 2], np.int64)
        values = np.repeat(np.array([1, 2, 3], np.float32), 32)
        return session.allreduce_blocks(indices, values, 96, block=32)[1].tolist()

    assert cluster.run(2, work) == [[4.0] * 32 + [8.0] * 32] * 2


@pytest.mark.parametrize(
    ("indices", "values", "match"),
    [
        ([5], 32, "block 5 is beyond the tensor's 3 blocks"),
        ([-1], 32, "there is no block -1"),
        ([0], 31, "the values have 124 bytes, but the listed blocks need 128"),
    ],
)
def test_blocks_that_cannot_be_are_refused_and_the_session_goes_on(place, indices, values, match):
    with place.connect() as session:
        with pytest.raises(racksum.BadArgument, match=match):
            session.allreduce_blocks(
                np.array(indices, np.int64), np.ones(values, np.float32), 96, block=32
            )
        with pytest.raises(racksum.BadArgument, match="must be int64, not int32"):
            session.allreduce_blocks(np.array([0], np.int32), np.ones(32, np.float32), 96, block=32)
        session.allreduce(np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("shape", "sparse_dim"),
    [
        ((50, 64), 1),
        ((50, 256), 1),
        ((40, 7), 1),
        ((30, 96), 1),
        ((30,), 1),
        ((9, 8, 32), 2),
        ((6, 5, 3), 2),
    ],
    ids=str,
)
def test_sparse_tensors_are_reduced_as_dense_ones(cluster, shape, sparse_dim):
    def work(session):
        torch.manual_seed(session.rank)
        entries = (0, 12, 5)[session.rank]
        indices = torch.stack([torch.randint(size, (entries,)) for size in shape[:sparse_dim]])
        values = torch.randint(-9, 10, (entries, *shape[sparse_dim:])).double()
        x = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        found = racksum.torch.allreduce_sparse(session, x, "avg").wait()
        assert found.is_coalesced()
        dense = session.allreduce(x.to_dense().contiguous(), "avg")
        torch.testing.assert_close(found.to_dense(), dense)
        # `is_coalesced` only reads a flag, so check the indices too.
        assert found.indices().unique(dim=1).shape == found.indices().shape

    cluster.run(WORLD, work)


def test_a_sparse_tensor_that_is_empty_everywhere(cluster):
    def work(session):
        x = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 32), (9, 32)
        )
        return racksum.torch.allreduce_sparse(session, x).wait()._nnz()

    assert cluster.run(2, work) == [0, 0]


def test_sparse_tensors_of_odd_shapes(cluster):
    with cluster.connect() as session:
        # The indices are in memory column by column, as in a transposed list.
        indices = torch.tensor([[0, 2], [1, 0]]).t()
        assert not indices.is_contiguous()
        x = torch.sparse_coo_tensor(indices, torch.ones(2), (3, 3), check_invariants=True)
        sums = racksum.torch.allreduce_sparse(session, x).wait()
        assert torch.equal(sums.to_dense(), x.to_dense())
        nothing = racksum.torch.allreduce_sparse(session, torch.zeros(4, 0).to_sparse(1)).wait()
        assert nothing.shape == (4, 0)
        for odd in (torch.tensor(3.0).to_sparse(), torch.ones(3), torch.eye(3).to_sparse_csr()):
            with pytest.raises(racksum.BadArgument, match="has no sparse COO dimension"):
                racksum.torch.allreduce_sparse(session, odd)
