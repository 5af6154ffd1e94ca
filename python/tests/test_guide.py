"""The guide's commands and code are run if they need no cluster, or else parsed."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser

import racksum
import racksum.torch
from conftest import ROOT, Aggregator, binary
from racksum.options import _VARIABLES
from ranks import Ranks, wrapped

GUIDES = ["docs/pytorch.md", "python/README.md"]
#: The section of the guide that creates a certificate authority with other tools.
PKI = "Identities of an existing PKI"


def blocks(path: str, language: str) -> list[tuple[str, str]]:
    """Returns the blocks of code, each with the heading above it."""
    found, heading, inside = [], "", None
    for line in (ROOT / path).read_text().splitlines():
        if inside is not None:
            if line == "```":
                found.append((heading, "\n".join(inside)))
                inside = None
            else:
                inside.append(line)
        elif line == f"```{language}":
            inside = []
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def commands() -> list[Any]:
    """Returns every command of the guides."""
    return [
        pytest.param(command, id=f"{Path(path).stem}-{command[:40]}")
        for path in GUIDES
        for heading, block in blocks(path, "sh")
        if heading != PKI
        for line in block.splitlines()
        if (command := line.split(" #")[0].strip())
    ]


@pytest.mark.parametrize("command", commands())
def test_a_command_is_one(command):
    arguments = shlex.split(command.removesuffix("&"))
    CHECKS[arguments[0]](arguments[1:])


def check_racksum(arguments: list[str]) -> None:
    """Checks that the command's help lists the flags."""
    text = subprocess.run(
        [binary(), arguments[0], "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for flag in [argument for argument in arguments if argument.startswith("--")]:
        assert re.search(rf"{flag}\b", text), flag


def check_torchrun(arguments: list[str]) -> None:
    """Checks that torchrun parses the arguments, and that the script exists or is a user's."""
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.training_script == "train.py" or (ROOT / parsed.training_script).exists()


def check_export(arguments: list[str]) -> None:
    """Checks that the package reads the variables."""
    known = {name for variables in _VARIABLES.values() for name in variables}
    assert {argument.split("=")[0] for argument in arguments} <= known


def check_pip(arguments: list[str]) -> None:
    """Checks that the package has the extra."""
    assert arguments[0] in ("install", "uninstall")
    text = (ROOT / "python" / "pyproject.toml").read_text()
    for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)):
        assert f"\n{extra} = [" in text


def check_python(arguments: list[str]) -> None:
    """Checks that the file or folder exists."""
    paths = [argument for argument in arguments if "/" in argument]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def check_cargo(arguments: list[str]) -> None:
    """Checks that the command builds the binary, or runs a case that the benches have."""
    if arguments[:3] == ["xtask", "bench", "peers"]:
        sources = (ROOT / "benches" / "harness" / "src").glob("*.rs")
        assert any(f"{arguments[-1].removesuffix('-w2')}" in path.read_text() for path in sources)
    else:
        assert arguments == ["build", "--release"]


CHECKS = {
    "racksum": check_racksum,
    "torchrun": check_torchrun,
    "export": check_export,
    "pip": check_pip,
    "python": check_python,
    "cargo": check_cargo,
}


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{Path(path).stem}-{heading}")
        for path in GUIDES
        for heading, block in blocks(path, "python")
    ],
)
def test_code_names_what_there_is(block):
    for node in ast.walk(ast.parse(block)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name.startswith("racksum.") and name != "racksum.torch":
            owner: Any = racksum
            for part in name.split(".")[1:]:
                assert hasattr(owner, part), name
                owner = getattr(owner, part)


def test_identities_of_another_authority_serve(tmp_path):
    [(_, block)] = [found for found in blocks("docs/pytorch.md", "sh") if found[0] == PKI]
    path = f"{binary().parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euc", block],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "agg-1" in ran.stdout
    assert "aggregator" in ran.stdout
    aggregator = Aggregator("--identity", str(tmp_path / "agg-1.pem"), "--data-auth", "mac")
    try:
        with racksum.connect(
            aggregator.address, job="pki", rank=0, world=1, identity=tmp_path / "node-0.pem"
        ) as session:
            assert session.allreduce(torch.ones(3)).tolist() == [1.0] * 3
    finally:
        aggregator.stop()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def trained(block: str, through: str, address: str, job: str) -> list[torch.Tensor]:
    """Runs the guide's loop over a few batches."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    data = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(8, 16, 12, generator=data)
    with wrapped(net, through, address, job, {}) as model:
        names = {
            "contextlib": contextlib,
            "torch": torch,
            "device": "cpu",
            "model": model,
            "loader": [(batch[:, :8], batch[:, 8:]) for batch in batches],
            "loss_of": nn.functional.mse_loss,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        exec(block, names)
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("heading", ["Mixed precision", "Gradient accumulation"])
def test_a_loop_of_the_guide_trains_as_with_gloo(ranks, cluster, heading):
    [(_, block)] = [found for found in blocks("docs/pytorch.md", "python") if found[0] == heading]
    gloo = ranks.run(trained, block, "gloo", "", "")
    ours = ranks.run(trained, block, "hook", cluster.address, cluster.new_job())
    torch.testing.assert_close(ours, gloo)


def test_the_picture_is_what_its_script_draws() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "docs/overview.py"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == (ROOT / "docs/overview.svg").read_text()
