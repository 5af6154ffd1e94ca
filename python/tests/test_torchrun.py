"""The workloads of the benches under torchrun. Some tests kill a rank or the aggregator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Aggregator

WORKLOADS = ROOT / "benches" / "workloads"


class Torchrun:
    """A workload with two ranks under torchrun."""

    def __init__(
        self, example: str, *arguments: str, restarts: int = 0, **environment: str
    ) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        self.process = subprocess.Popen(
            [
                *torchrun,
                "--max-restarts",
                str(restarts),
                "--standalone",
                WORKLOADS / example,
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines that the workload prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def until(self, step: int) -> dict[str, Any]:
        """Returns the first line of this step or a later one."""
        return next(line for line in self.lines() if line.get("step", 0) >= step)

    def end(self) -> dict[str, Any]:
        """Waits until the workload has ended, and returns the last line."""
        last = list(self.lines())[-1]
        assert self.process.wait(timeout=60) == 0
        return last

    def ranks(self) -> list[int]:
        """Returns the ranks' process ids."""
        return [
            int(stat.parent.name)
            for stat in Path("/proc").glob("[0-9]*/stat")
            if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid
        ]


@pytest.mark.parametrize(
    "command",
    [["letters.py"], ["digits.py"], ["words.py", "--sparse"], ["recommender.py", "--sparse"]],
    ids=" ".join,
)
def test_an_example_learns_what_it_learns_with_gloo(shared_aggregator, command):
    example, *flags = command
    losses = []
    for backend in ("gloo", "racksum"):
        run = Torchrun(
            example,
            *flags,
            "--backend",
            backend,
            "--steps",
            "20",
            RACKSUM_AGGREGATOR=shared_aggregator.address,
        )
        losses.append(run.end()["final_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_training_goes_on_from_its_checkpoint_when_a_rank_is_killed(shared_aggregator, tmp_path):
    flags = ["--steps", "200", "--curve", "20"]
    at = {"RACKSUM_AGGREGATOR": shared_aggregator.address}
    undisturbed = Torchrun("digits.py", *flags, **at).end()
    saved = ["--checkpoint", str(tmp_path / "saved.pt"), "--save-every", "10"]
    disturbed = Torchrun("digits.py", *flags, *saved, restarts=1, **at)
    disturbed.until(step=60)
    os.kill(disturbed.ranks()[1], signal.SIGKILL)
    end = disturbed.end()
    assert end["final_loss"] == undisturbed["final_loss"]
    assert end["weights"] == undisturbed["weights"]


def test_the_weights_are_the_same_bits_when_the_aggregator_is_killed(aggregator):
    flags = ["--steps", "200", "--curve", "20"]
    undisturbed = Torchrun("digits.py", *flags, RACKSUM_AGGREGATOR=aggregator.address).end()
    standby = Aggregator()
    both = f"{aggregator.address},{standby.address}"
    disturbed = Torchrun("digits.py", *flags, RACKSUM_AGGREGATOR=both)
    disturbed.until(step=60)
    aggregator.kill()
    end = disturbed.end()
    assert end["weights"] == undisturbed["weights"]
    standby.stop()
