"""Messages of the package mention the package and its options."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import racksum
from conftest import ROOT, Aggregator
from racksum.extras import FLOORS, needed
from racksum.options import ConnectOptions


def test_lines_say_whose_they_are_where_logging_is_not_set_up(cluster):
    connect = f"racksum.connect({cluster.address!r}, job='own', rank=0, world=1, insecure=True)"
    ran = subprocess.run(
        [sys.executable, "-c", f"import racksum; {connect}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = ran.stderr.splitlines()
    assert lines, ran.stderr
    assert all(line.startswith("racksum: ") for line in lines), ran.stderr


def test_what_the_package_logs_and_warns_of_begins_with_its_name():
    for path in Path(racksum.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert path.name == "log.py" or "getLogger(" not in text, path
        warned = re.findall(r'warnings\.warn\(\s*f?"([^"]*)', text)
        assert text.count("warnings.warn(") == len(warned), path
        assert all(message.startswith("racksum: ") for message in warned), path


#: The options of a rank, as the command line spells them.
FLAGS = [field.replace("_", "-") for field in ConnectOptions.__dataclass_fields__]
FLAG = re.compile(rf"--({'|'.join(FLAGS)})\b(?!-)")
COMMAND = re.compile(r"`racksum [^`]*")


@pytest.mark.parametrize(
    "room", ["proto", "net", "worker", "aggregator/src/registry", "python/src"]
)
def test_libraries_name_options_as_their_callers_do(room):
    """Messages of libraries reach Python users, so they name a flag only with its program."""
    for path in (ROOT / room).rglob("*.rs"):
        if "tests" in path.parts or path.name == "tests.rs":
            continue
        for line in path.read_text().splitlines():
            code = line.split("//")[0]
            assert not FLAG.search(COMMAND.sub("", code)), f"{path}: {line}"


@pytest.mark.parametrize(
    ("torch", "sentence"),
    [
        (
            "None",
            "ModuleNotFoundError: racksum.torch needs torch 2.15 or newer, which is not installed; "
            "install torch, or racksum[torch]",
        ),
        (
            "SimpleNamespace(__version__='2.6.0+cpu')",
            "ImportError: racksum.torch needs PyTorch 2.15 or newer, but 2.6.0+cpu is installed; "
            "upgrade it, or use racksum.connect, which works with any version",
        ),
        (
            "SimpleNamespace(__version__='2.15.0', "
            "distributed=SimpleNamespace(is_available=lambda: False))",
            "ImportError: racksum.torch needs torch.distributed, but this PyTorch 2.15.0 was built "
            "without it; install a build that has it",
        ),
    ],
    ids=["none", "too old", "not distributed"],
)
def test_a_torch_that_does_not_do_is_named(torch, sentence):
    script = f"""
        import sys
        from types import SimpleNamespace
        sys.modules["torch"] = {torch}
        try:
            import racksum.torch
        except ImportError as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == f"{sentence}\n"


def test_an_extra_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        needed("matplotlib.figure", "Study.plot")
    assert str(missing.value) == (
        "Study.plot needs matplotlib 3.8 or newer, which is not installed; install matplotlib, or "
        "racksum[plot]"
    )
    assert missing.value.name == "matplotlib"


def test_extras_and_their_floors_are_those_of_the_project():
    project = (ROOT / "python" / "pyproject.toml").read_text()
    for package, (extra, floor) in FLOORS.items():
        assert f'{extra} = ["{package}>={floor}"]' in project


def refused(at: Aggregator, **options: Any) -> racksum.Error:
    """Returns the error of a rank that cannot join."""
    options = {"job": "errors", "rank": 0, "world": 1, "join_timeout": 20.0, **options}
    with pytest.raises(racksum.Error) as error:
        racksum.connect(options.pop("aggregator", at.address), **options)
    return error.value


ERRORS: dict[str, tuple[Callable[[Aggregator], racksum.Error], str]] = {
    "beyond loopback": (
        lambda at: refused(at, aggregator="192.0.2.1:7177"),
        "set `identity` to",
    ),
    "both": (lambda at: refused(at, identity="/dev/null", insecure=True), "with `insecure`"),
    "earlier": (lambda at: refused(at, generation=2, world=2), "greater `generation`"),
    "running": (lambda at: refused(at, generation=2), "another `job`"),
    "no room": (lambda at: refused(at, job="one more"), "set `wait`"),
}


def test_errors_name_keywords():
    aggregator = Aggregator("--max-jobs", "1")
    try:
        with racksum.connect(
            aggregator.address, job="errors", rank=0, world=1, generation=2
        ) as session:
            session.allreduce(np.ones(1, np.float32))
            messages = {name: str(provoke(aggregator)) for name, (provoke, _) in ERRORS.items()}
    finally:
        aggregator.stop()
    for name, (_, text) in ERRORS.items():
        assert text in messages[name]
        assert not FLAG.search(COMMAND.sub("", messages[name]))
