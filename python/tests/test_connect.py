"""How a session connects: arguments, the environment, refusals."""

from __future__ import annotations

import socket

import numpy as np
import pytest

import racksum
from racksum import ConnectOptions

FULL = {"aggregator": "a:1", "job": "j", "rank": 0, "world": 1}


def test_what_is_given_comes_before_the_environment_and_that_before_torchrun():
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "RACKSUM_AGGREGATOR": "a:1,b:2",
    }
    found = ConnectOptions.resolve(torchrun)
    assert (found.rank, found.world, found.job, found.generation) == (3, 8, "run", 2)
    assert (found.aggregator, found.interface) == ("a:1,b:2", "=eth0")
    own = {
        **torchrun,
        "RACKSUM_RANK": "4",
        "RACKSUM_JOB": "mine",
        "RACKSUM_INTERFACE": "ib",
        "RACKSUM_INSECURE": "1",
        "RACKSUM_TIMEOUT": "2.5",
    }
    found = ConnectOptions.resolve(own, job="given")
    assert (found.rank, found.job, found.interface) == (4, "given", "ib")
    assert (found.insecure, found.timeout) == (True, 2.5)


def test_torchrun_without_a_rendezvous_calls_every_job_alike():
    here = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    found = ConnectOptions.resolve(here, aggregator="a:1", rank=0, world=1)
    assert found.job == "node7-29500"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("aggregator", "RACKSUM_AGGREGATOR"),
        ("job", "RACKSUM_JOB"),
        ("rank", "RACKSUM_RANK"),
        ("world", "RACKSUM_WORLD"),
    ],
)
def test_what_nobody_says_is_asked_for_by_name(name, sentence):
    given = {key: value for key, value in FULL.items() if key != name}
    with pytest.raises(racksum.BadArgument, match=sentence):
        ConnectOptions.resolve({}, **given)


@pytest.mark.parametrize(
    ("given", "environment", "sentence"),
    [
        ({"rank": 70_000}, {}, "rank is 0 to 65535, and not 70000"),
        ({"rank": "0"}, {}, "rank is a whole number, and not '0'"),
        ({"generation": -1}, {}, "generation is 0 to "),
        ({}, {"RACKSUM_MTU": "big"}, "RACKSUM_MTU='big': invalid literal"),
        ({}, {"RACKSUM_WAIT": "maybe"}, "RACKSUM_WAIT='maybe': it is 1 or 0"),
    ],
)
def test_what_cannot_be_is_refused(given, environment, sentence):
    with pytest.raises(racksum.BadArgument, match=sentence):
        ConnectOptions.resolve(environment, **{**FULL, **given})


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"aggregator": "here"}, racksum.BadArgument, "HOST:PORT"),
        ({"aggregator": "a:1,,b:2"}, racksum.BadArgument, "has no name"),
        ({"rank": 1}, racksum.BadArgument, "rank 1 is not below the world of 1"),
        ({"data_auth": "rot13"}, racksum.BadArgument, "there are none, mac, aead"),
        ({"on_rank_loss": "cry"}, racksum.BadArgument, "there are abort, continue"),
        ({"timeout": -1.0}, racksum.BadArgument, "timeout is a number of seconds"),
        ({"timeout": float("nan")}, racksum.BadArgument, "timeout is a number of seconds"),
        ({"interface": "nope"}, racksum.BadArgument, 'no usable interface matches "nope"'),
        ({"aggregator": "192.0.2.1:7"}, racksum.BadArgument, "only loopback addresses"),
        ({"identity": "/nowhere"}, racksum.BadArgument, "/nowhere"),
    ],
)
def test_a_session_that_cannot_be_says_why(cluster, options, error, sentence):
    with pytest.raises(error, match=sentence):
        cluster.connect(join_timeout=5.0, **options)


def test_nobody_at_the_address_is_said_soon():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(racksum.NoAggregator, match=address) as nobody:
            racksum.connect(address, job="j", rank=0, world=1, join_timeout=2.0)
        assert isinstance(nobody.value, ConnectionError)


def test_a_rank_that_does_not_come_is_named(cluster):
    with pytest.raises(racksum.JoinTimeout, match="rank 1 had not joined") as late:
        cluster.connect(world=2, join_timeout=1.0)
    assert late.value.missing == (1,)
    assert isinstance(late.value, TimeoutError)


def test_two_sessions_of_one_rank_are_one_too_many(place):
    job = place.new_job()
    with place.connect(job=job) as session:
        with pytest.raises(
            racksum.Refused, match=r"its 1 ranks have joined|rank 0 has joined already"
        ):
            place.connect(job=job)
        assert session.allreduce(np.ones(2, np.float32)).tolist() == [1, 1]


def test_a_later_generation_ends_the_one_before(place):
    job = place.new_job()
    with place.connect(job=job) as before, place.connect(job=job, generation=1) as after:
        assert after.allreduce(np.ones(2, np.float32)).tolist() == [1, 1]
        with pytest.raises(racksum.SessionClosed):
            before.allreduce(np.ones(2, np.float32))
        with pytest.raises(racksum.Refused, match=r"generation|life 1, and rank 0 is of life 0"):
            place.connect(job=job)
