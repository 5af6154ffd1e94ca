"""Default names of jobs, and the proof that a new generation belongs to the same job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import racksum
from racksum.torch.groups import drawn_in
from ranks import TIMEOUT, Ranks

#: The sessions of the rank in this process.
_sessions: list[racksum.Session] = []


@pytest.fixture
def launches() -> Iterator[list[Ranks]]:
    """Two launches of two ranks each, as on two hosts."""
    launches = [Ranks(2), Ranks(2)]
    yield launches
    for ranks in launches:
        ranks.close()


def begin(address: str, **options: object) -> tuple[str, str | None]:
    """Joins a job without a name, as under `torchrun --master-port 29500` on one host."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none")
    session = racksum.torch.connect(address, timeout=TIMEOUT, join_timeout=TIMEOUT, **options)
    _sessions.append(session)
    return session.job, session.options.secret


def reduced(nth: int = -1) -> list[float]:
    x = torch.ones(2)
    _sessions[nth].allreduce(x)
    return x.tolist()


def is_over(nth: int) -> str:
    with pytest.raises(racksum.SessionClosed) as over:
        reduced(nth)
    return str(over.value)


def test_two_launches_have_jobs_of_their_own(shared_aggregator, launches):
    first, second = (ranks.run(begin, shared_aggregator.address) for ranks in launches)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert not {*first[0]} & {*second[0]}
    for ranks in launches:
        assert ranks.run(reduced) == [[2.0, 2.0]] * 2


def test_only_the_next_life_of_the_same_job_ends_one(shared_aggregator, launches):
    own, other = launches
    named = {"job": "one-name", "generation": 7}
    own.run(begin, shared_aggregator.address, **named)
    for generation in (7, 8):
        for why in other.run(refusal, shared_aggregator.address, generation):
            assert "does not prove that it belongs to the same job" in why
    assert own.run(reduced) == [[2.0, 2.0]] * 2
    own.run(begin, shared_aggregator.address, **{**named, "generation": 8})
    assert own.run(reduced) == [[2.0, 2.0]] * 2
    for why in own.run(is_over, 0):
        assert "generation 8 of job" in why
        assert "replaced generation 7" in why


def refusal(address: str, generation: int) -> str:
    """Returns the refusal of a rank whose job has the name of another job."""
    drawn = drawn_in(dist.distributed_c10d._get_default_store())
    options = racksum.ConnectOptions.resolve(
        drawn=drawn,
        aggregator=address,
        job="one-name",
        generation=generation,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        join_timeout=TIMEOUT,
    )
    with pytest.raises(racksum.Refused) as refused:
        racksum.Session(options)
    return str(refused.value)


def test_a_store_keeps_what_the_first_rank_has_drawn():
    stores = [dist.HashStore(), dist.TCPStore("127.0.0.1", 0, 1, is_master=True)]
    for store in stores:
        store.set_timeout(timedelta(seconds=TIMEOUT))
    drawn = [drawn_in(store) for store in stores]
    assert [drawn_in(store) for store in stores] == drawn
    assert drawn[0] is not None
    assert drawn[1] is not None
    assert drawn[0].job != drawn[1].job
    assert drawn[0].secret != drawn[1].secret
    assert len(bytes.fromhex(drawn[0].secret)) == 16
