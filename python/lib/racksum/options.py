"""Options of a session: from arguments, then the environment, then torchrun's variables."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from numbers import Real
from typing import Any, NamedTuple

from racksum.errors import BadArgument, Error, JoinTimeout, NoAggregator, NoRoom

__all__ = [
    "MAX_ELEMENTS",
    "MAX_LANES",
    "OPTIONS",
    "ConnectOptions",
    "Drawn",
    "limits_of_group",
    "seconds_from",
    "text",
    "whole_from",
]

#: Limits from docs/wire.md, which hold for every aggregator.
MAX_JOB_BYTES = 128
MAX_LANES = 8
MAX_WORLD = 256
MAX_ELEMENTS = 2**36

#: A function that takes the name and the value of an argument, and returns the checked value or
#: raises `BadArgument`.
Check = Callable[[str, Any], Any]


class Drawn(NamedTuple):
    """The random name and secret that a rank of a process group generated for the job."""

    job: str
    secret: str


#: The option that each of these errors is about, since the error itself does not name it.
_ERROR_OPTIONS: Mapping[type[Error], tuple[str, ...]] = {
    NoAggregator: ("aggregator",),
    JoinTimeout: ("join_timeout",),
    NoRoom: ("join_timeout",),
}


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """The checked options of a session, such as the rank, the job and the aggregators.

    :func:`racksum.connect` makes them from its arguments and explains each. :meth:`resolve` makes
    them without connecting.

    >>> options = racksum.ConnectOptions(aggregator="10.0.0.1:7177", job="digits", rank=0, world=2)
    >>> options.timeout, options.join_timeout  # in seconds
    (60.0, 300.0)

    :raises racksum.BadArgument: An option is invalid. ``error.options`` names it.
    """

    aggregator: str
    job: str
    rank: int
    world: int
    generation: int = 0
    lanes: int = 1
    pool_slots: int = 0
    multicast: bool = True
    identity: str | os.PathLike[str] | None = None
    insecure: bool = False
    data_auth: str | None = None
    wait: bool = False
    rejoin: bool = False
    on_rank_loss: str = "abort"
    join_timeout: float = 300.0
    timeout: float = 60.0
    mtu: int | None = None
    interface: str | None = None
    local_world: int | None = None
    #: The name of the process group that uses this session; empty for the whole job. Admission
    #: rules match the job's name, not the group's.
    group: str = ""
    #: A secret, in hexadecimal, that all generations of the job share. A greater generation with
    #: the same secret ends the earlier ones.
    secret: str | None = None
    #: For each option that the environment set, the variable and its text, such as ``RANK='0'``.
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the options, and raises :class:`BadArgument` if one is invalid."""
        with self.naming_variables():
            for option in fields(self):
                value = getattr(self, option.name)
                if option.name in _CHECKS and (value is not None or option.default is not None):
                    checked = _CHECKS[option.name](option.name, value)
                    object.__setattr__(self, option.name, checked)
            if self.uses_sidecar and (self.rejoin or self.on_rank_loss != "abort"):
                raise BadArgument(
                    "rejoin and on_rank_loss cannot be set with unix:PATH, because ranks of a "
                    "sidecar neither rejoin nor continue without a lost rank; leave them out, or "
                    "connect directly to the aggregator",
                    ("rejoin", "on_rank_loss"),
                )
            if self.uses_sidecar and self.data_auth is not None:
                raise BadArgument(f"data_auth {_NOT_WITH_SIDECAR}", ("data_auth",))

    @contextmanager
    def naming_variables(self) -> Iterator[None]:
        """Prefixes errors about options with the environment variables that set them.

        >>> environment = {"RANK": "2", "WORLD_SIZE": "2"}
        >>> options = ConnectOptions.resolve(environment, aggregator="10.0.0.1:7177", job="digits")
        >>> with options.naming_variables():
        ...     raise racksum.BadArgument("rank must be below world", ("rank", "world"))
        Traceback (most recent call last):
            ...
        racksum.errors.BadArgument: RANK='2', WORLD_SIZE='2': rank must be below world
        """
        try:
            yield
        except (BadArgument, NoAggregator, JoinTimeout, NoRoom) as error:
            names = error.options if isinstance(error, BadArgument) else _ERROR_OPTIONS[type(error)]
            settings = [self.variables[name] for name in names if name in self.variables]
            if settings:
                error.args = (f"{', '.join(settings)}: {error}", *error.args[1:])
            raise

    @classmethod
    def resolve(
        cls,
        environment: Mapping[str, str] = os.environ,
        /,
        drawn: Drawn | None = None,
        **given: Any,
    ) -> ConnectOptions:
        """Completes the given options from the environment and checks them.

        An option that is ``None`` counts as not given.

        >>> environment = {"RANK": "3", "WORLD_SIZE": "8", "RACKSUM_JOB": "digits"}
        >>> options = ConnectOptions.resolve(environment, aggregator="10.0.0.1:7177")
        >>> options.job, options.rank, options.world
        ('digits', 3, 8)

        :param environment: The variables to read; by default those of the process.
        :param drawn: The generated secret and name of a process group's job. The name applies only
            if neither an option, nor ``RACKSUM_JOB``, nor torchrun's run id sets one.
        :param given: Options, with the names and meanings of :func:`racksum.connect`.
        :raises racksum.BadArgument: An option is unknown or invalid, or a required option is not
            set.
        """
        for name in given:
            if name not in OPTIONS:
                raise BadArgument(f"unknown option {name}; the options are {', '.join(OPTIONS)}")
        found = {name: value for name, value in given.items() if value is not None}
        defaults = {field.name: field.default for field in fields(cls)}
        unsupported = [
            name
            for name in _CONNECTION_OPTIONS
            if found.get(name, defaults[name]) != defaults[name]
        ]
        settings: dict[str, str] = {}
        for name, variables in _VARIABLES.items():
            first = None if name in found else _first(environment, variables)
            if first is not None:
                found[name], settings[name] = first
        if "job" not in found and drawn is not None:
            found["job"] = drawn.job
        if "job" not in found and (first := _job_of_rendezvous(environment)):
            found["job"], settings["job"] = first
        for name, what in _NEEDED.items():
            if name not in found:
                raise BadArgument(f"{name} is not set; {what}")
        options = cls(**found, secret=drawn and drawn.secret, variables=settings)
        if options.uses_sidecar and unsupported:
            raise BadArgument(f"{', '.join(unsupported)} {_NOT_WITH_SIDECAR}")
        return options

    @property
    def name(self) -> str:
        """The job's name, followed by ``/`` and the group's name if the session has a group."""
        return f"{self.job}/{self.group}" if self.group else self.job

    @property
    def uses_sidecar(self) -> bool:
        """True if the session connects to a sidecar."""
        return self.aggregator.startswith("unix:")


def limits_of_group(
    seconds: float | None, environment: Mapping[str, str] = os.environ
) -> dict[str, float]:
    """Returns ``timeout`` and ``join_timeout`` for a session, both set to its group's timeout.

    Leaves out an option that the environment sets, and both if the group has no timeout.
    """
    names = ("timeout", "join_timeout")
    unset = (name for name in names if not environment.get(f"RACKSUM_{name.upper()}", "").strip())
    return {} if seconds is None else dict.fromkeys(unset, seconds)


def whole_from(least: int, most: int) -> Check:
    """Returns a check that accepts whole numbers from ``least`` to ``most``."""

    def check(name: str, value: Any) -> int:
        # Each op runs this check four times, and `suppress` would take longer than the check.
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if least <= number <= most and not isinstance(value, bool):
                return number
        raise _not(f"a whole number from {least} to {most}", name, value)

    return check


def seconds_from(least: float) -> Check:
    """Returns a check that accepts finite numbers of seconds, ``least`` or more."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):
                seconds = float(value)
                if least <= seconds < math.inf:
                    return seconds
        raise _not(f"a finite number of seconds >= {least}", name, value)

    return check


def text(name: str, value: Any) -> str:
    """Returns a checked string. Refuses lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str) and (str.isascii(value) or _is_encodable(value)):
        return value
    raise _not("a valid Unicode string", name, value)


def _is_encodable(value: str) -> bool:
    return value.encode(errors="ignore").decode() == value


def _job(name: str, value: Any) -> str:
    if 1 <= len(text(name, value).encode()) <= MAX_JOB_BYTES:
        return str(value)
    raise _not(f"a name of 1 to {MAX_JOB_BYTES} bytes", name, value)


def _group(name: str, value: Any) -> str:
    if len(text(name, value).encode()) <= MAX_JOB_BYTES:
        return str(value)
    raise _not(f"a name of at most {MAX_JOB_BYTES} bytes", name, value)


def _path(name: str, value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return text(name, os.fspath(value))
    raise _not("a path", name, value)


def _either(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _not("True or False", name, value)


def _not(what: str, name: str, value: Any) -> BadArgument:
    """Returns the error for an argument with an invalid value."""
    return BadArgument(f"{name} must be {what}, not {value!r}", (name,))


def _first(
    environment: Mapping[str, str], variables: Mapping[str, Callable[[str], Any]]
) -> tuple[Any, str] | None:
    """Returns the value of the first variable that is set, and ``NAME='text'`` for messages."""
    for variable, read in variables.items():
        text = environment.get(variable, "").strip()
        setting = f"{variable}={text!r}"
        try:
            value = read(text) if text else None
        except ValueError as error:
            raise BadArgument(f"{setting}: {error}") from None
        if value is not None:
            return value, setting
    return None


def _run_of_torchrun(run: str) -> str | None:
    """Returns torchrun's run id, or None for "none", the id that torchrun uses by default."""
    return None if run == "none" else run


def _job_of_rendezvous(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns a job name made from the rendezvous address, and ``NAME='text'`` for messages.

    :raises BadArgument: The address is a loopback address. Every host has it, so jobs of different
        hosts could get the same name.
    """
    host, port = (environment.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (host and port):
        return None
    if _is_loopback(host):
        raise BadArgument(
            f"job is not set, and MASTER_ADDR={host} cannot name it: every host has that "
            "address, so other jobs could get the same name; pass job= or set RACKSUM_JOB, or use "
            "racksum.torch.connect, which generates a name for the ranks of a process group"
        )
    return f"{host}-{port}", f"MASTER_ADDR={host!r}"


def _is_loopback(host: str) -> bool:
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith((".localhost", ".localdomain")):
        return True
    with suppress(ValueError):
        address = ip_address(host.strip("[]"))
        mapped = getattr(address, "ipv4_mapped", None) or address
        return bool(mapped.is_loopback or mapped.is_unspecified)
    return False


def _interfaces_of_gloo(value: str) -> str:
    """Converts Gloo's interface names to NCCL's grammar, in which ``=`` marks exact names."""
    if value.startswith(("^", "=")):
        raise ValueError("Gloo takes plain names only; set RACKSUM_INTERFACE to use ^ or =")
    return f"={value}"


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


def _whole(text: str) -> int:
    with suppress(ValueError):
        return int(text)
    raise ValueError("must be a whole number")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    raise ValueError("must be a number of seconds")


_NEEDED = {
    "aggregator": (
        'call connect("HOST:PORT") or, for a sidecar, connect("unix:PATH"), or set '
        "RACKSUM_AGGREGATOR"
    ),
    "job": "pass job= or set RACKSUM_JOB",
    "rank": "pass rank= or set RACKSUM_RANK (torchrun sets RANK)",
    "world": "pass world= or set RACKSUM_WORLD (torchrun sets WORLD_SIZE)",
}

#: Options of the connection to the aggregator. Ranks of a sidecar cannot pass them, and ignore them
#: if the environment sets them. `data_auth` is refused even if the environment sets it, because a
#: user who sets it relies on it.
_CONNECTION_OPTIONS = ("identity", "interface", "mtu", "multicast", "pool_slots", "wait")

_NOT_WITH_SIDECAR = (
    "cannot be set with unix:PATH, because the sidecar owns the connection to the aggregator; "
    "`racksum worker --help` lists the options that the sidecar takes instead"
)

_CHECKS: dict[str, Check] = {
    "aggregator": text,
    "job": _job,
    "rank": whole_from(0, 2**16 - 1),
    "world": whole_from(1, MAX_WORLD),
    "generation": whole_from(0, 2**32 - 1),
    "lanes": whole_from(1, MAX_LANES),
    "pool_slots": whole_from(0, 2**32 - 1),
    "multicast": _either,
    "identity": _path,
    "insecure": _either,
    "data_auth": text,
    "wait": _either,
    "rejoin": _either,
    "on_rank_loss": text,
    "join_timeout": seconds_from(0.001),
    "timeout": seconds_from(0.001),
    "mtu": whole_from(1280, 65536),
    "interface": text,
    "local_world": whole_from(1, MAX_WORLD),
    "group": _group,
    "secret": text,
}

#: The names of the options that users may set.
OPTIONS = tuple(name for name in _CHECKS if name not in ("group", "secret"))

#: For each option, the variables that set it, in order of precedence, with their parsers.
_VARIABLES: dict[str, dict[str, Callable[[str], Any]]] = {
    "aggregator": {"RACKSUM_AGGREGATOR": str},
    "job": {"RACKSUM_JOB": str, "TORCHELASTIC_RUN_ID": _run_of_torchrun},
    "rank": {"RACKSUM_RANK": _whole, "RANK": _whole},
    "world": {"RACKSUM_WORLD": _whole, "WORLD_SIZE": _whole},
    "local_world": {"RACKSUM_LOCAL_WORLD": _whole, "LOCAL_WORLD_SIZE": _whole},
    "generation": {"RACKSUM_GENERATION": _whole, "TORCHELASTIC_RESTART_COUNT": _whole},
    "lanes": {"RACKSUM_LANES": _whole},
    "pool_slots": {"RACKSUM_POOL_SLOTS": _whole},
    "multicast": {"RACKSUM_MULTICAST": _flag},
    "identity": {"RACKSUM_IDENTITY": str},
    "insecure": {"RACKSUM_INSECURE": _flag},
    "data_auth": {"RACKSUM_DATA_AUTH": str},
    "wait": {"RACKSUM_WAIT": _flag},
    "rejoin": {"RACKSUM_REJOIN": _flag},
    "on_rank_loss": {"RACKSUM_ON_RANK_LOSS": str},
    "join_timeout": {"RACKSUM_JOIN_TIMEOUT": _seconds},
    "timeout": {"RACKSUM_TIMEOUT": _seconds},
    "mtu": {"RACKSUM_MTU": _whole},
    "interface": {
        "RACKSUM_INTERFACE": str,
        "NCCL_SOCKET_IFNAME": str,
        "GLOO_SOCKET_IFNAME": _interfaces_of_gloo,
    },
}
