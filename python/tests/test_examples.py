"""Each example runs alone, with torch and racksum and nothing else."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, Cluster

EXAMPLES = ROOT / "python" / "examples"
RUNS = [
    ("ddp", 2, []),
    ("embedding", 2, []),
    ("embedding", 2, ["--sparse"]),
    ("backend", 2, []),
    ("fsdp2", 4, []),
]


@pytest.mark.parametrize(("name", "ranks", "flags"), RUNS, ids=str)
def test_an_example_learns(cluster: Cluster, tmp_path, name, ranks, flags):
    """Runs a copy of the example with the command from its docstring, as a reader would."""
    script = tmp_path / f"{name}.py"
    shutil.copy(EXAMPLES / script.name, script)
    command = f"torchrun --standalone --nproc-per-node {ranks} {' '.join([script.name, *flags])}"
    assert command in re.split(r"\n| {2,}#", ast.get_docstring(ast.parse(script.read_text())))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RACKSUM_AGGREGATOR": cluster.address,
            "RACKSUM_JOB": cluster.new_job(),
        },
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert losses[-1] < losses[0], ran.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_needs_torch_and_racksum_alone(path):
    tree = ast.parse(path.read_text())
    names = [node.names[0].name for node in ast.walk(tree) if isinstance(node, ast.Import)]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    needed = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert needed == {"torch", "racksum"}
    assert path.stem in [name for name, *_ in RUNS]
