"""Bad input gets an exception of the right type, one sentence, and a session that goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import racksum


def refusals():
    read_only = np.ones(4, np.float32)
    read_only.flags.writeable = False
    return {
        "a list": ([1.0, 2.0], {}, "and not list"),
        "bool": (np.ones(4, bool), {}, "not of bool"),
        "complex": (torch.ones(4, dtype=torch.complex64), {}, "not of complex64"),
        "big-endian": (np.ones(4, ">f4"), {}, "big-endian"),
        "read-only": (read_only, {}, "read-only"),
        "strided array": (np.ones((4, 4), np.float32)[:, 1], {}, "ascontiguousarray"),
        "strided tensor": (torch.ones(4, 4).t()[1:], {}, r"x\.contiguous\(\)"),
        "sparse tensor": (torch.ones(4).to_sparse(), {}, "layout torch.sparse_coo"),
        "meta tensor": (torch.ones(4, device="meta"), {}, "is on meta"),
        "integer average": (np.ones(4, np.int32), {"op": "avg"}, "avg is not defined for i32"),
        "unknown op": (np.ones(4, np.float32), {"op": "prod"}, 'no reduction "prod"'),
        "unknown wire": (np.ones(4, np.float32), {"wire": "f8"}, 'no wire type "f8"'),
        "wide wire": (np.ones(4, np.float16), {"wire": "f32"}, "cannot carry a tensor of f16"),
        "block": (np.ones(4, np.float32), {"block": 100}, "power of two; 100 is not"),
        "lane": (np.ones(4, np.float32), {"lane": 3}, "lane 3 does not exist"),
    }


@pytest.mark.parametrize("what", refusals())
def test_what_cannot_be_reduced_is_refused_and_the_session_goes_on(place, what):
    x, options, sentence = refusals()[what]
    with place.connect() as session:
        with pytest.raises(racksum.BadArgument, match=sentence) as refused:
            session.allreduce(x, **options)
        assert isinstance(refused.value, ValueError)
        assert "\n" not in str(refused.value)
        assert session.allreduce(np.ones(4, np.float32)).tolist() == [1.0] * 4


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


def test_an_overflow_names_the_element(cluster):
    def work(session):
        x = np.zeros(2000, np.float32)
        x[700] = np.inf
        with pytest.raises(racksum.Overflow) as overflow:
            session.allreduce(x, wire="fixed32")
        assert overflow.value.element == 512
        return session.allreduce(np.ones(3, np.float32)).sum()

    assert cluster.run(2, work) == [6, 6]
