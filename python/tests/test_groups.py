"""Sessions of the ranks of process groups: what is said of the group, and what is not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import racksum
import racksum.torch
from ranks import TIMEOUT, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def generation_of_none(address: str, job: str) -> int:
    with racksum.torch.connect(address, job=job, timeout=TIMEOUT, generation=None) as session:
        return session.generation


def test_a_generation_of_none_is_not_given(ranks, cluster):
    before = int(time.time())
    [generation] = ranks.run(generation_of_none, cluster.address, cluster.new_job())
    assert generation >= before


def options_that_are_none(address: str) -> None:
    for options in ({"rank": 0}, {"world": 1}, {"jobb": "mine"}):
        with pytest.raises(racksum.BadArgument, match=next(iter(options))):
            racksum.torch.connect(address, **options)


def test_what_is_no_option_is_refused(ranks, cluster):
    ranks.run(options_that_are_none, cluster.address)
