"""Runs the process group tests that torch's wheel ships, with Gloo and with racksum.

    python run.py                        # all; compares with docs/c10d.md
    python run.py --only test_all_gather # runs only tests whose names begin with this
    python run.py --write                # writes the results to docs/c10d.md, then compares

The run fails if a test passes only with Gloo and `reasons.toml` does not say why. Each test has
processes of its own, which are forks of this one: importing torch takes longer than most tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: The number of ranks, and the number for tests that need more ranks.
WORLD, LARGE_WORLD = 4, 8
#: Seconds that a test may take.
LIMIT = 120
#: The number of tests that run at the same time.
AT_ONCE = 2
#: The number of times that a failing test is run.
TRIES = 2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The tests read these variables when they are imported.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(LIMIT)

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as autograd
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

import racksum.torch  # noqa: F401 - before forks, each of which would import it.
import table
from conftest import Aggregator


class Forks:
    """Starts a test's ranks as forks of its process, so that they need not import torch again."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        fork = torch.multiprocessing.get_context("fork").Process
        self._start_processes(fork)  # type: ignore[attr-defined]


def suites() -> list[type[unittest.TestCase]]:
    """Returns the test classes, with the base classes that torch's own launchers use."""
    base = distributed_test.MultiProcessTestCase
    group = (
        Forks,
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    )
    of_rpc = [autograd.DdpUnderDistAutogradTest, autograd.DdpComparisonTest]
    mixed = [(one, TensorPipeRpcAgentTestFixture, Forks, base) for one in of_rpc]
    return [type(bases[1].__name__, bases, {}) for bases in (group, *mixed)]


@dataclass
class Try:
    """A run of a test with Gloo or with racksum."""

    suite: type[unittest.TestCase]
    name: str
    through: str = "gloo"
    world: int = WORLD
    nth: int = 1
    pid: int = 0
    began: float = 0.0

    def path(self, log: Path, suffix: str) -> Path:
        """Returns the path of one of the run's files."""
        return log / f"{self.name}-{self.through}-{self.nth}.{suffix}"


@dataclass
class End:
    """How a test ended."""

    verdict: str
    says: str = ""
    seconds: float = 0.0


def run_all(tests: list[Try], log: Path) -> table.Found:
    """Runs tests, a few at a time: each with Gloo and then, if it passes, with racksum."""
    waiting, running = tests[::-1], list[Try]()
    found: table.Found = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(started(waiting.pop(), log))
        time.sleep(0.02)
        for one in list(running):
            end = end_of(one, log)
            if end is None:
                continue
            running.remove(one)
            print(f"{one.name} {one.through}: {end.verdict}, {end.seconds:.1f} s", flush=True)
            if again := after(one, end):
                waiting.append(again)
            found.setdefault(one.name, {})[one.through] = asdict(end)
    return dict(sorted(found.items()))


def after(one: Try, end: End) -> Try | None:
    """Returns the run that follows this one, if any."""
    if end.verdict == "skipped" and "small world" in end.says and one.world == WORLD:
        return Try(one.suite, one.name, world=LARGE_WORLD)
    if end.verdict not in ("passed", "skipped") and one.nth < TRIES:
        return Try(one.suite, one.name, one.through, one.world, one.nth + 1)
    if end.verdict == "passed" and one.through == "gloo":
        return Try(one.suite, one.name, "racksum", one.world)
    return None


def started(one: Try, log: Path) -> Try:
    """Starts a test."""
    one.began = time.monotonic()
    one.path(log, "json").unlink(missing_ok=True)
    sys.stdout.flush()
    one.pid = os.fork()
    if one.pid == 0:
        try:
            be(one, log)
        finally:
            os._exit(1)
    return one


def end_of(one: Try, log: Path) -> End | None:
    """Returns how a test has ended, or None while it runs."""
    seconds = time.monotonic() - one.began
    pid, _ = os.waitpid(one.pid, os.WNOHANG)
    if pid == 0 and seconds < LIMIT + 10:
        return None
    # Also end the ranks that the test has left behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    if pid == 0:
        os.waitpid(one.pid, 0)
    try:
        verdict, says = json.loads(one.path(log, "json").read_text())
    except (FileNotFoundError, ValueError):
        verdict, says = "timed out" if pid == 0 else "died", ""
    return End(verdict, says, round(seconds, 1))


def be(one: Try, log: Path) -> None:
    """Runs a test in this process, which runs no other test."""
    os.setsid()
    output = os.open(one.path(log, "log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["WORLD_SIZE"] = str(one.world)
    if one.through == "racksum":
        os.environ["RACKSUM_JOB"] = f"{one.name}-{os.getpid()}"
        put_in_place_of_gloo()
    result = unittest.TestResult()
    unittest.TestSuite([one.suite(one.name)]).run(result)
    if result.skipped:
        end = "skipped", result.skipped[0][1]
    elif result.wasSuccessful():
        end = "passed", ""
    else:
        _, trace = (result.errors + result.failures)[0]
        end = "failed", sentence(trace)
        print(trace, flush=True)
    one.path(log, "json").write_text(json.dumps(end))
    os._exit(0)


def sentence(trace: str) -> str:
    """Returns a trace's first error line, preferring errors that a rank raised."""
    lines = [line.strip() for line in trace.splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith("Error")]
    of_rank = [line for line in errors if "exited with error code" not in line]
    return (of_rank or errors or lines or [""])[0][:300]


def put_in_place_of_gloo() -> None:
    """Replaces Gloo with racksum in groups that request Gloo."""
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper

    def make_ours(size: Any, rank: Any, ranks: Any, backend: Any, *given: Any, **more: Any) -> Any:
        ours = dist.Backend(str(backend).replace("gloo", "racksum"))
        return make(size, rank, ranks, ours, *given, **more)

    c10d._new_process_group_helper = make_ours


def main() -> None:
    """Runs the tests that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="test_", help="run only tests with this prefix")
    parser.add_argument("--log", type=Path, help="folder for results; by default a new one")
    parser.add_argument("--write", action="store_true", help="write the results to docs/c10d.md")
    options = parser.parse_args()
    log = options.log or Path(tempfile.mkdtemp(prefix="racksum-upstream-"))
    log.mkdir(parents=True, exist_ok=True)
    tests = [
        Try(suite, name)
        for suite in suites()
        for name in unittest.TestLoader().getTestCaseNames(suite)
        if name.startswith(options.only)
    ]
    aggregator = Aggregator("--max-jobs", "64")
    os.environ["RACKSUM_AGGREGATOR"] = aggregator.address
    try:
        found = run_all(tests, log)
    finally:
        aggregator.stop()
    (log / "results.json").write_text(json.dumps(found, indent=1))
    if options.write:
        table.write(found)
    wrong = table.compared(found)
    ends = [by.get("racksum", by["gloo"])["verdict"] for by in found.values()]
    print(f"{len(found)} tests: {ends.count('passed')} pass, {ends.count('skipped')} are skipped")
    print("\n".join([*wrong, f"the output of each test is in {log}"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
