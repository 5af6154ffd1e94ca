"""Handles: their results, waits from several threads, and errors."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

import racksum
import racksum.session


def started(session: racksum.Session) -> racksum.Handle:
    return session.allreduce(np.ones(4, np.float32), async_op=True)


def blocks(session: racksum.Session) -> racksum.Handle:
    ones = np.ones(32, np.float32)
    return session.allreduce_blocks(np.array([1]), ones, 96, block=32, async_op=True)


@pytest.mark.parametrize("start", [started, blocks])
@pytest.mark.parametrize("first", ["parent", "child"])
def test_what_is_made_of_a_result_leaves_it_to_its_parent(place, start, first):
    with place.connect() as session:
        parent = start(session)
        made = []
        child = parent.then(lambda result: made.append(result) or len(made))
        handles = [parent, child] if first == "parent" else [child, parent]
        for handle in handles * 2:
            handle.wait()
            assert handle.absent == ()
            assert handle.done()
        assert child.wait() == 1
        assert made[0] is parent.wait()
        assert parent.then(lambda _: "late").wait() == "late"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_result_that_fails_can_be_made_again(place, error):
    raised = [error()]

    def work(x):
        if raised:
            raise raised.pop()
        return x.sum()

    with place.connect() as session:
        handle = started(session).then(work)
        with pytest.raises(error):
            handle.wait()
        assert handle.wait() == 4


def test_sums_outlast_an_interrupt(place, monkeypatch):
    with place.connect() as session:
        handle = blocks(session)
        with monkeypatch.context() as patch:

            def interrupted(*_):
                raise KeyboardInterrupt

            patch.setattr(racksum.session, "empty_like", interrupted)
            with pytest.raises(KeyboardInterrupt):
                handle.wait()
        where, sums = handle.wait()
        assert (where.tolist(), sums.tolist()) == ([1], [1.0] * 32)


def test_an_error_is_the_same_however_often_it_is_waited_for(place):
    def work(session):
        x = np.ones(4 + session.rank, np.float32)
        handle = session.allreduce(x, async_op=True)
        errors = []
        for one in (handle, handle, handle.then(len), handle):
            with pytest.raises(racksum.Mismatch) as differs:
                one.wait()
            errors.append(differs.value)
        assert len({str(error) for error in errors}) == 1
        again = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
        assert again[0] == again[1] == again[3]

    place.run(2, work)


def test_whoever_is_to_come_before_an_op_is_asked_first(place):
    with place.connect() as session:
        asked = []
        session._before_op = lambda: asked.append(session.stats()["sidecar_ops"])
        started(session).wait()
        blocks(session).wait()
        with pytest.raises(racksum.BadArgument):
            session.allreduce(None)
        assert len(asked) == 3
