"""How a session connects: arguments, the environment, refusals."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import racksum
from conftest import ROOT, Cluster
from racksum import ConnectOptions
from racksum.options import (
    _VARIABLES,
    MAX_ELEMENTS,
    MAX_JOB_BYTES,
    MAX_LANES,
    MAX_WORLD,
    Drawn,
)

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
    gloo = {name: value for name, value in torchrun.items() if name != "NCCL_SOCKET_IFNAME"}
    found = ConnectOptions.resolve({**gloo, "GLOO_SOCKET_IFNAME": "eth1,ib0"})
    assert found.interface == "=eth1,ib0", "Gloo's names must match exactly"
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
    with pytest.raises(racksum.BadArgument, match=r"GLOO_SOCKET_IFNAME='\^lo': Gloo takes plain"):
        ConnectOptions.resolve({**gloo, "GLOO_SOCKET_IFNAME": "^lo"})


#: For each option, a valid text for its variable, and the value that the option gets.
VALUES = {
    "aggregator": ("b:2", "b:2"),
    "job": ("named", "named"),
    "rank": ("1", 1),
    "world": ("2", 2),
    "generation": ("3", 3),
    "lanes": ("4", 4),
    "pool_slots": ("5", 5),
    "multicast": ("0", False),
    "identity": ("/a/file", "/a/file"),
    "insecure": ("yes", True),
    "data_auth": ("mac", "mac"),
    "wait": ("on", True),
    "rejoin": ("true", True),
    "on_rank_loss": ("continue", "continue"),
    "join_timeout": ("6.5", 6.5),
    "timeout": ("7", 7.0),
    "mtu": ("9000", 9000),
    "interface": ("=eth0", "=eth0"),
    "local_world": ("8", 8),
}


@pytest.mark.parametrize("name", inspect.signature(racksum.connect).parameters)
def test_every_argument_has_a_variable(name):
    text, value = VALUES[name]
    given = {key: value for key, value in FULL.items() if key != name}
    found = ConnectOptions.resolve({f"RACKSUM_{name.upper()}": text}, **given)
    assert getattr(found, name) == value


def test_limits_are_those_of_the_wire():
    wire = (ROOT / "docs" / "wire.md").read_text()
    assert f"| ranks of a job | {MAX_WORLD};" in wire
    assert f"| lanes of a job | {MAX_LANES} |" in wire
    assert f"| bytes of a job's name, and of a group's | {MAX_JOB_BYTES} |" in wire
    assert f"| elements of an op | 2^{MAX_ELEMENTS.bit_length() - 1} |" in wire


def test_numbers_of_numpy_and_paths_are_taken():
    found = ConnectOptions.resolve(
        {}, **{**FULL, "rank": np.int64(0), "timeout": np.float32(2), "identity": Path("a/b")}
    )
    assert (found.rank, found.timeout, found.identity) == (0, 2.0, "a/b")
    assert type(found.rank) is int


def at(host: str) -> dict[str, str]:
    """Returns the environment of a rank that torchrun starts without a rendezvous id."""
    return {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": host, "MASTER_PORT": "29500"}


def test_torchrun_without_a_rendezvous_calls_every_job_alike():
    found = ConnectOptions.resolve(at("node7"), aggregator="a:1", rank=0, world=1)
    assert (found.job, found.secret) == ("node7-29500", None)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.0.1",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "localhost",
        "LocalHost.",
        "0.0.0.0",
    ],
)
def test_an_address_of_every_host_is_no_name(host):
    with pytest.raises(racksum.BadArgument, match="pass job= or set RACKSUM_JOB"):
        ConnectOptions.resolve(at(host), aggregator="a:1", rank=0, world=1)
    drawn = Drawn("job-1", "00" * 16)
    found = ConnectOptions.resolve(at(host), drawn=drawn, aggregator="a:1", rank=0, world=1)
    assert (found.job, found.secret) == drawn
    named = ConnectOptions.resolve(at(host), drawn=drawn, **FULL)
    assert (named.job, named.secret) == ("j", drawn.secret)


def test_a_name_that_is_drawn_comes_behind_what_the_user_says():
    drawn = Drawn("job-1", "00" * 16)
    own = {"aggregator": "a:1", "rank": 0, "world": 1}
    run = {**at("127.0.0.1"), "TORCHELASTIC_RUN_ID": "run"}
    assert ConnectOptions.resolve(run, drawn=drawn, **own).job == "run"
    assert ConnectOptions.resolve({**run, "RACKSUM_JOB": "mine"}, drawn=drawn, **own).job == "mine"
    assert ConnectOptions.resolve(at("node7"), drawn=drawn, **own).job == "job-1"


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
        ({"rank": 70_000}, {}, "rank must be a whole number from 0 to 65535, not 70000"),
        ({"rank": "0"}, {}, "rank must be a whole number from 0 to 65535, not '0'"),
        ({"rank": True}, {}, "rank must be a whole number from 0 to 65535, not True"),
        ({"generation": -1}, {}, "generation must be a whole number from 0 to 4294967295, not -1"),
        ({"lanes": 0}, {}, "lanes must be a whole number from 1 to 8, not 0"),
        ({"lanes": 9}, {}, "lanes must be a whole number from 1 to 8, not 9"),
        ({"job": 5}, {}, "job must be a valid Unicode string, not 5"),
        ({"job": "\ud800"}, {}, r"job must be a valid Unicode string, not '\\ud800'"),
        ({"job": ""}, {}, "job must be a name of 1 to 128 bytes, not ''"),
        ({"job": "ä" * 65}, {}, "job must be a name of 1 to 128 bytes, not 'ää"),
        ({"aggregator": 7}, {}, "aggregator must be a valid Unicode string, not 7"),
        ({"wait": 1}, {}, "wait must be True or False, not 1"),
        ({"insecure": "no"}, {}, "insecure must be True or False, not 'no'"),
        ({"identity": 5}, {}, "identity must be a path, not 5"),
        ({"identity": b"a"}, {}, "identity must be a path, not b'a'"),
        ({"data_auth": 5}, {}, "data_auth must be a valid Unicode string, not 5"),
        ({"timeout": "x"}, {}, "timeout must be a finite number of seconds >= 0.001, not 'x'"),
        ({"timeout": 0}, {}, "timeout must be a finite number of seconds >= 0.001, not 0"),
        ({"join_timeout": 0.0}, {}, "join_timeout must be a finite number of seconds .* not 0.0"),
        ({"join_timeout": True}, {}, "join_timeout must be a finite number of seconds .* not True"),
        ({"timeout": -1.0}, {}, "timeout must be a finite number of seconds .* not -1.0"),
        ({"timeout": float("inf")}, {}, "timeout must be a finite number of seconds .* not inf"),
        ({"timeout": float("nan")}, {}, "timeout must be a finite number of seconds .* not nan"),
        ({"timeout": 10**400}, {}, "timeout must be a finite number of seconds"),
        ({"world": 257}, {}, "world must be a whole number from 1 to 256, not 257"),
        ({"local_world": 0}, {}, "local_world must be a whole number from 1 to 256, not 0"),
        ({"mtu": 1.5}, {}, "mtu must be a whole number from 1280 to 65536, not 1.5"),
        ({"lane": 1}, {}, "unknown option lane; the options are aggregator, job"),
        ({"aggregator": "unix:/a", "rejoin": True}, {}, "a sidecar neither rejoin nor"),
    ],
)
def test_what_cannot_be_is_refused(given, environment, sentence):
    with pytest.raises(racksum.BadArgument, match=sentence):
        ConnectOptions.resolve(environment, **{**FULL, **given})


#: An invalid text for each variable, and its error. The extension raises the last seven errors.
WRONG = {
    "RACKSUM_JOB": ("x" * 129, "job must be a name of 1 to 128 bytes"),
    "TORCHELASTIC_RUN_ID": ("x" * 129, "job must be a name of 1 to 128 bytes"),
    "RACKSUM_RANK": ("70000", "rank must be a whole number from 0 to 65535, not 70000"),
    "RACKSUM_WORLD": ("0", "world must be a whole number from 1 to 256, not 0"),
    "WORLD_SIZE": ("257", "world must be a whole number from 1 to 256, not 257"),
    "RACKSUM_LOCAL_WORLD": ("0", "local_world must be a whole number"),
    "LOCAL_WORLD_SIZE": ("0", "local_world must be a whole number"),
    "RACKSUM_GENERATION": ("-1", "generation must be a whole number"),
    "TORCHELASTIC_RESTART_COUNT": ("-1", "generation must be a whole number"),
    "RACKSUM_LANES": ("9", "lanes must be a whole number from 1 to 8, not 9"),
    "RACKSUM_POOL_SLOTS": ("-1", "pool_slots must be a whole number"),
    "RACKSUM_MULTICAST": ("maybe", "must be 1 or 0"),
    "RACKSUM_INSECURE": ("maybe", "must be 1 or 0"),
    "RACKSUM_WAIT": ("maybe", "must be 1 or 0"),
    "RACKSUM_REJOIN": ("maybe", "must be 1 or 0"),
    "RACKSUM_JOIN_TIMEOUT": ("soon", "must be a number of seconds"),
    "RACKSUM_TIMEOUT": ("nan", "timeout must be a finite number of seconds >= 0.001, not nan"),
    "RACKSUM_MTU": ("big", "must be a whole number"),
    "GLOO_SOCKET_IFNAME": ("^lo", "Gloo takes plain names only"),
    "RANK": ("1", "rank 1 must be below the number of ranks, 1"),
    "RACKSUM_AGGREGATOR": ("here", "is not an aggregator address (HOST:PORT)"),
    "RACKSUM_IDENTITY": ("/nowhere", "/nowhere: "),
    "RACKSUM_DATA_AUTH": ("rot13", "one of none, mac, aead"),
    "RACKSUM_ON_RANK_LOSS": ("cry", "one of abort, continue"),
    "RACKSUM_INTERFACE": ("nope", 'no usable interface matches "nope"'),
    "NCCL_SOCKET_IFNAME": ("nope", 'no usable interface matches "nope"'),
}


def test_every_variable_has_a_text_that_cannot_be():
    assert WRONG.keys() == {name for variables in _VARIABLES.values() for name in variables}


@pytest.mark.parametrize("variable", WRONG)
def test_what_the_environment_says_wrong_is_named_with_its_variable(variable, monkeypatch):
    option = next(name for name, variables in _VARIABLES.items() if variable in variables)
    for name in (name for variables in _VARIABLES.values() for name in variables):
        monkeypatch.delenv(name, raising=False)
    text, sentence = WRONG[variable]
    monkeypatch.setenv(variable, text)
    given = {"aggregator": "127.0.0.1:1", "job": "j", "rank": 0, "world": 1}
    given.pop(option, None)
    with pytest.raises(racksum.BadArgument) as wrong:
        racksum.connect(**given)
    assert str(wrong.value).startswith(f"{variable}={text!r}: ")
    assert sentence in str(wrong.value)


@pytest.mark.parametrize("aggregator", ["127.0.0.1:9", "no-such-host.invalid:7177"])
def test_an_aggregator_of_the_environment_that_does_not_answer_is_named_with_it(
    monkeypatch, aggregator
):
    monkeypatch.setenv("RACKSUM_AGGREGATOR", aggregator)
    named = re.escape(f"RACKSUM_AGGREGATOR={aggregator!r}: ")
    with pytest.raises(racksum.NoAggregator, match=f"^{named}"):
        racksum.connect(job="job", rank=0, world=1, join_timeout=0.5)
    with pytest.raises(racksum.NoAggregator) as error:
        racksum.connect(aggregator, job="job", rank=0, world=1, join_timeout=0.5)
    assert "RACKSUM" not in str(error.value), "no variable set this option"


def joined_late(connect: Callable[[int], Any]) -> tuple[int, racksum.JoinTimeout]:
    """Returns the limit and the error of a join that reached the aggregator.

    A busy machine may take longer than the first limit for the handshake.
    """
    for limit in (1, 10, 80):
        with pytest.raises((racksum.JoinTimeout, racksum.NoAggregator)) as error:
            connect(limit)
        if isinstance(error.value, racksum.JoinTimeout):
            return limit, error.value
    raise error.value


def test_a_limit_of_the_environment_that_ends_a_join_is_named(monkeypatch, cluster):
    def connect(limit: int) -> None:
        monkeypatch.setenv("RACKSUM_JOIN_TIMEOUT", str(limit))
        racksum.connect(cluster.address, job=cluster.new_job(), rank=0, world=2)

    limit, late = joined_late(connect)
    assert str(late).startswith(f"RACKSUM_JOIN_TIMEOUT='{limit}': ")
    assert late.missing == (1,)


def test_an_error_about_two_variables_names_both(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        racksum.BadArgument, match=r"^RANK='2', WORLD_SIZE='2': rank 2 must be below"
    ):
        racksum.connect("127.0.0.1:1", job="j")
    with pytest.raises(racksum.BadArgument, match=r"^RACKSUM_DATA_AUTH='mac': data_auth cannot"):
        ConnectOptions.resolve({"RACKSUM_DATA_AUTH": "mac"}, **{**FULL, "aggregator": "unix:/a"})
    with pytest.raises(racksum.BadArgument, match=r"^MASTER_ADDR='n{150}': job must be a name of"):
        ConnectOptions.resolve(at("n" * 150), aggregator="a:1", rank=0, world=1)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"aggregator": "here"}, racksum.BadArgument, "HOST:PORT"),
        ({"aggregator": "a:1,,b:2"}, racksum.BadArgument, "in the list is empty"),
        ({"rank": 1}, racksum.BadArgument, "rank 1 must be below the number of ranks, 1"),
        ({"data_auth": "rot13"}, racksum.BadArgument, "one of none, mac, aead"),
        ({"on_rank_loss": "cry"}, racksum.BadArgument, "one of abort, continue"),
        ({"interface": "nope"}, racksum.BadArgument, 'no usable interface matches "nope"'),
        ({"aggregator": "192.0.2.1:7"}, racksum.BadArgument, "only loopback addresses"),
        ({"identity": "/nowhere"}, racksum.BadArgument, "/nowhere"),
    ],
)
def test_a_session_that_cannot_be_says_why(cluster, options, error, sentence):
    with pytest.raises(error, match=sentence):
        cluster.connect(join_timeout=5.0, **options)


def test_the_longest_name_is_taken(place):
    job = place.new_job().ljust(MAX_JOB_BYTES, "x")
    with place.connect(job=job) as session:
        assert session.allreduce(np.ones(2, np.float32)).tolist() == [1, 1]


def test_all_lanes_are_taken(aggregator):
    with Cluster(aggregator.address).connect(lanes=MAX_LANES) as session:
        x = np.ones(2, np.float32)
        assert session.allreduce(x, lane=MAX_LANES - 1).tolist() == [1, 1]


def test_nobody_at_the_address_is_said_soon():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(racksum.NoAggregator, match=address) as nobody:
            racksum.connect(address, job="j", rank=0, world=1, join_timeout=2.0)
        assert isinstance(nobody.value, ConnectionError)


def test_a_rank_that_does_not_come_is_named(cluster):
    _, late = joined_late(lambda limit: cluster.connect(world=2, join_timeout=float(limit)))
    assert "rank 1 had not joined" in str(late)
    assert late.missing == (1,)
    assert isinstance(late, TimeoutError)


def test_two_sessions_of_one_rank_are_one_too_many(place):
    job = place.new_job()
    with place.connect(job=job) as session:
        with pytest.raises(
            racksum.Refused, match=r"all its ranks \(1\) have joined|rank 0 has already joined"
        ):
            place.connect(job=job)
        assert session.allreduce(np.ones(2, np.float32)).tolist() == [1, 1]


def test_a_later_generation_ends_the_one_before(place):
    job = place.new_job()
    with place.connect(job=job) as before, place.connect(job=job, generation=1) as after:
        assert after.allreduce(np.ones(2, np.float32)).tolist() == [1, 1]
        with pytest.raises(racksum.SessionClosed):
            before.allreduce(np.ones(2, np.float32))
        with pytest.raises(racksum.Refused, match=r"generation"):
            place.connect(job=job)
