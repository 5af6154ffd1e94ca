#!/usr/bin/env python3
"""Compares the losses of the `workloads` when they train with racksum and with Gloo.

    python learning.py --racksum target/release/racksum --out target/learning

`cargo xtask bench learning` installs what this script needs, and runs it. Each example trains with
four ranks on this host: with Gloo, with racksum, and with racksum again, from the same seed. Then
the transformer of letters trains with compressors. Losses are measured on samples that no rank
trains on. The output is tables, `learning.jsonl` with every curve, and `learning.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WORKLOADS = Path(__file__).resolve().parent / "workloads"
RANKS = 4

#: The examples and their flags.
EXACT = [
    ("digits", []),
    ("words", []),
    ("words", ["--sparse"]),
    ("recommender", []),
    ("recommender", ["--sparse"]),
    ("letters", []),
    ("letters", ["--whole"]),
]
#: Limit on the difference between the final loss and Gloo's, as a share of Gloo's loss.
MOST_OFF = 1e-3

#: The example that trains with compressors, and its flags.
COMPRESSED = ("letters", ["--whole", "--block=32"])
#: Each entry has a factor for the number of steps, further flags, and compressors. Each compressor
#: has its argument, and the share by which the final loss may exceed that of dense gradients. If
#: random-k keeps one block in a hundred, a block waits for about a hundred steps and then carries
#: the sum of a hundred gradients. Such a sum needs a smaller learning rate, and so more steps.
COMPRESSORS = [
    (
        1,
        [],
        [
            ("top-k", "0.1", 0.02),
            ("top-k", "0.01", 0.05),
            ("random-k", "0.1", 0.02),
            ("threshold", "0.02", 0.02),
            ("threshold", "0.08", 0.05),
        ],
    ),
    (4, ["--lr=0.03"], [("random-k", "0.01", 0.05)]),
]


@dataclass(frozen=True)
class Learnt:
    """The results of a run."""

    name: str
    curve: list[tuple[int, float]]
    final_loss: float
    weights: str
    steps_per_s: float
    sent_bytes_per_step: int | None

    def off(self, other: Learnt) -> float:
        """Returns how far the final loss exceeds the other's, as a share of the other's loss."""
        return self.final_loss / other.final_loss - 1

    def most_off(self, other: Learnt) -> float:
        """Returns the largest difference between two curves, as a share of the other's loss."""
        pairs = zip(self.curve, other.curve, strict=True)
        return max(abs(ours / theirs - 1) for (_, ours), (_, theirs) in pairs)


class Bench:
    """Runs examples with one aggregator."""

    def __init__(self, aggregator: str, out: Path) -> None:
        self._aggregator = aggregator
        self._out = out / "learning.jsonl"
        self._out.write_text("")

    def learn(self, example: str, flags: list[str], backend: str, steps: int) -> Learnt:
        """Trains an example and returns the results."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), str(WORKLOADS / f"{example}.py")),
            *(
                f"--backend={backend}",
                f"--steps={steps}",
                f"--curve={max(steps // 50, 1)}",
            ),
            *flags,
        ]
        environment = {
            **os.environ,
            "RACKSUM_AGGREGATOR": self._aggregator,
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(command)} failed:\n{done.stderr}")
        *curve, end = [json.loads(line) for line in done.stdout.splitlines()]
        learnt = Learnt(
            name=" ".join([example, *flags, backend]),
            curve=[(point["step"], point["loss"]) for point in curve],
            final_loss=end["final_loss"],
            weights=end["weights"],
            steps_per_s=end["steps_per_s"],
            sent_bytes_per_step=end["sent_bytes_per_step"],
        )
        with self._out.open("a") as out:
            out.write(json.dumps({"steps": steps, **asdict(learnt)}) + "\n")
        return learnt


def exact(bench: Bench, steps: int, figure: Figure) -> bool:
    """Trains every example with Gloo and twice with racksum.

    Returns whether the losses agree and both runs with racksum end with the same weights.
    """
    print(
        f"\n{steps} steps of f32, {RANKS} ranks: the final loss may be off by {MOST_OFF:g}"
    )
    print(f"{'example':<22}{'gloo':>10}{'racksum':>10}{'off':>10}{'most':>10}   rerun")
    good = True
    all_axes = figure.subplots(2, 4).flatten()
    for (example, flags), axes in zip(EXACT, all_axes, strict=False):
        gloo = bench.learn(example, flags, "gloo", steps)
        ours, again = (bench.learn(example, flags, "racksum", steps) for _ in range(2))
        off, name = ours.off(gloo), " ".join([example, *flags])
        same = ours.weights == again.weights
        good &= abs(off) <= MOST_OFF and same
        print(
            f"{name:<22}{gloo.final_loss:>10.5f}{ours.final_loss:>10.5f}{off:>+10.1e}"
            f"{ours.most_off(gloo):>10.1e}   {'same weights' if same else 'OTHER WEIGHTS'}",
            flush=True,
        )
        plot(axes, [(gloo, "gloo", "-"), (ours, "racksum", "--")])
        axes.set_title(name, fontsize="medium")
    all_axes[-1].remove()
    return good


def compressed(bench: Bench, steps: int, figure: Figure) -> bool:
    """Trains with compressors, with and without error feedback.

    Returns whether the losses stay within their limits and feedback lowers each of them.
    """
    example, flags = COMPRESSED
    print(
        f"\n{example} with compressors: off is relative to dense gradients after as many steps"
    )
    head = ("compressor", "steps", "sent", "loss", "off", "must", "without feedback")
    print("{:<16}{:>7}{:>9}{:>9}{:>8}{:>7}{:>20}".format(*head))
    good = True
    all_axes = figure.subplots(1, len(COMPRESSORS))
    for (times, more, compressors), axes in zip(COMPRESSORS, all_axes, strict=True):
        length, base = times * steps, [*flags, *more]
        dense = bench.learn(example, base, "racksum", length)
        lines = [(dense, "dense", "-")]
        print(
            f"{'none':<16}{length:>7}{dense.sent_bytes_per_step:>9}{dense.final_loss:>9.4f}",
            flush=True,
        )
        for name, keep, most in compressors:
            chosen = [*base, f"--compressor={name}", f"--keep={keep}"]
            ours = bench.learn(example, chosen, "racksum", length)
            without = bench.learn(
                example, [*chosen, "--no-feedback"], "racksum", length
            )
            off = ours.off(dense)
            good &= off <= most and without.final_loss > ours.final_loss
            print(
                f"{name + ' ' + keep:<16}{length:>7}{ours.sent_bytes_per_step:>9}"
                f"{ours.final_loss:>9.4f}{off:>+8.1%}{most:>7.0%}"
                f"{without.final_loss:>12.4f}{without.off(dense):>+8.1%}",
                flush=True,
            )
            lines += [
                (ours, f"{name} {keep}", "--"),
                (without, f"{name} {keep}, no feedback", ":"),
            ]
        plot(axes, lines)
        axes.set_title(
            " ".join([example, *more, "with compressors"]), fontsize="medium"
        )
    return good


def plot(axes: Axes, lines: list[tuple[Learnt, str, str]]) -> None:
    """Draws curves, each with its label and style."""
    for learnt, label, style in lines:
        axes.plot(*zip(*learnt.curve, strict=True), style, label=label)
    axes.set(xlabel="steps", ylabel="loss, held out")
    axes.legend(fontsize="x-small")


@contextmanager
def aggregator(racksum: Path) -> Iterator[str]:
    """Runs an aggregator during the ``with`` block, and yields its address."""
    command = [str(racksum), "aggregator", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        found = re.match(r"racksum aggregator on (\S+?): ", line)
        if not found:
            sys.exit(f"error: the aggregator printed {line!r} instead of its address")
        try:
            yield found[1]
        finally:
            process.terminate()
            # Read the aggregator's last lines, because a full pipe would keep it from ending.
            process.communicate()


def main() -> int:
    """Runs all trainings, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--racksum", type=Path, required=True, help="path of the program racksum"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=500, help="steps of an example")
    parser.add_argument("--compressed-steps", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(14, 10), layout="constrained")
    above, below = figure.subfigures(2, 1)
    with aggregator(arguments.racksum) as address:
        bench = Bench(address, arguments.out)
        good = exact(bench, arguments.steps, above)
        good &= compressed(bench, arguments.compressed_steps, below)
    figure.savefig(arguments.out / "learning.png")
    print(f"\n{'all checks pass' if good else 'a check FAILED'}; results: {arguments.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
