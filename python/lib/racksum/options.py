"""How a session connects: arguments, then the environment, then torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from racksum.errors import BadArgument

__all__ = ["ConnectOptions"]


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """Who a rank is, and where its aggregators are. :func:`racksum.connect` explains each."""

    aggregator: str
    job: str
    rank: int
    world: int
    generation: int = 0
    lanes: int = 1
    pool_slots: int = 0
    multicast: bool = True
    identity: str | None = None
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

    @classmethod
    def resolve(
        cls, environment: Mapping[str, str] = os.environ, /, **given: Any
    ) -> ConnectOptions:
        """Completes what is given, ``None`` being nothing, by what the environment says."""
        found = {name: value for name, value in given.items() if value is not None}
        for name, (variables, read) in _VARIABLES.items():
            if name not in found:
                value = _first(environment, variables, read)
                if value is not None:
                    found[name] = value
        found.setdefault("job", _job_of_torchrun(environment))
        for name, what in _NEEDED.items():
            if found.get(name) is None:
                raise BadArgument(f"nobody says {what}")
        options = cls(**_checked(found))
        if options.is_beside and (options.rejoin or options.on_rank_loss != "abort"):
            raise BadArgument("ranks of a sidecar neither rejoin nor go on without a rank")
        return options

    @property
    def is_beside(self) -> bool:
        """Whether it is a sidecar that the session connects to."""
        return self.aggregator.startswith("unix:")


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    for name, (least, most) in _RANGES.items():
        value = found.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadArgument(f"{name} is a whole number, and not {value!r}")
        if not least <= value <= most:
            raise BadArgument(f"{name} is {least} to {most}, and not {value}")
    return found


def _first(
    environment: Mapping[str, str], variables: tuple[str, ...], read: Callable[[str], Any]
) -> Any:
    """The value of the first of the variables that is set to anything."""
    for variable in variables:
        text = environment.get(variable, "").strip()
        if text:
            try:
                return read(text)
            except ValueError as error:
                raise BadArgument(f"{variable}={text!r}: {error}") from None
    return None


def _job_of_torchrun(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "").strip()
    master = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    # Without a rendezvous of its own torchrun calls every job "none".
    if run in ("", "none") and all(master):
        return "{}-{}".format(*master)
    return run or None


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("it is 1 or 0")


_NEEDED = {
    "aggregator": (
        'where the aggregator is: give connect("HOST:PORT") or, of a sidecar, '
        'connect("unix:PATH"), or set RACKSUM_AGGREGATOR'
    ),
    "job": "which job it is: give job=, or set RACKSUM_JOB",
    "rank": "which rank this is: give rank=, or set RACKSUM_RANK (torchrun sets RANK)",
    "world": "how many ranks there are: give world=, or set RACKSUM_WORLD (torchrun: WORLD_SIZE)",
}

_RANGES = {
    "rank": (0, 2**16 - 1),
    "world": (1, 2**16 - 1),
    "local_world": (1, 2**16 - 1),
    "generation": (0, 2**32 - 1),
    "lanes": (1, 255),
    "pool_slots": (0, 2**32 - 1),
    "mtu": (1280, 65535),
}

#: Which variables say what, the first that is set; and how each is read.
_VARIABLES: dict[str, tuple[tuple[str, ...], Any]] = {
    "aggregator": (("RACKSUM_AGGREGATOR",), str),
    "job": (("RACKSUM_JOB",), str),
    "rank": (("RACKSUM_RANK", "RANK"), int),
    "world": (("RACKSUM_WORLD", "WORLD_SIZE"), int),
    "local_world": (("RACKSUM_LOCAL_WORLD", "LOCAL_WORLD_SIZE"), int),
    "generation": (("RACKSUM_GENERATION", "TORCHELASTIC_RESTART_COUNT"), int),
    "identity": (("RACKSUM_IDENTITY",), str),
    "insecure": (("RACKSUM_INSECURE",), _flag),
    "data_auth": (("RACKSUM_DATA_AUTH",), str),
    "wait": (("RACKSUM_WAIT",), _flag),
    "on_rank_loss": (("RACKSUM_ON_RANK_LOSS",), str),
    "join_timeout": (("RACKSUM_JOIN_TIMEOUT",), float),
    "timeout": (("RACKSUM_TIMEOUT",), float),
    "mtu": (("RACKSUM_MTU",), int),
    "interface": (("RACKSUM_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), str),
}
