"""A real aggregator on loopback, and jobs whose ranks are threads of the test."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

import racksum
from report import skip

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]


def binary() -> Path:
    """Returns the path of the program `racksum`: RACKSUM_BINARY, or the newest build in target/."""
    named = os.environ.get("RACKSUM_BINARY")
    if named:
        return Path(named)
    built = [ROOT / "target" / profile / "racksum" for profile in ("release", "debug")]
    built = [path for path in built if path.exists()]
    if not built:
        pytest.exit("target/ has no program racksum; run `cargo build` first", returncode=1)
    return max(built, key=lambda path: path.stat().st_mtime)


class Aggregator:
    """An aggregator in a process of its own."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        command = [binary(), "aggregator", "--port", str(port), "--pool-mib", "64", *arguments]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RACKSUM_")
        }
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        found = re.match(r"racksum aggregator on (\S+?): ", ready)
        assert found, f"the aggregator did not print its address, but {ready!r}"
        self.address = found[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def stop(pid: int) -> None:
    """Stops a process, and waits until none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> Iterator[str]:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError):  # The thread has ended.
                # The state follows the name of the program, which is in parentheses.
                yield stat.read_text().rpartition(")")[2].split()[0]

    while any(state != "T" for state in states()):
        time.sleep(0.001)


@pytest.fixture(scope="session")
def shared_aggregator() -> Iterator[Aggregator]:
    """An aggregator that tests share if they do not disturb it."""
    aggregator = Aggregator("--max-jobs", "64")
    yield aggregator
    aggregator.stop()


@pytest.fixture
def aggregator() -> Iterator[Aggregator]:
    """An aggregator that the test may kill."""
    aggregator = Aggregator()
    yield aggregator
    if aggregator.process.poll() is None:
        aggregator.kill()


_jobs = count()


class Cluster:
    """Runs jobs at an aggregator."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self, **options: Any) -> racksum.Session:
        """Joins a job, by default a new one with one rank, and returns the session."""
        options = {"job": self.new_job(), "rank": 0, "world": 1, "timeout": 20.0, **options}
        return racksum.connect(options.pop("aggregator", self.address), **options)

    @staticmethod
    def new_job() -> str:
        return f"job-{os.getpid()}-{next(_jobs)}"

    def run(self, world: int, work: Callable[[racksum.Session], T], **options: Any) -> list[T]:
        """Runs ``work`` at every rank of a new job, and returns the result of each rank."""
        options = {"job": self.new_job(), "world": world, **options}

        def be(rank: int) -> T:
            with self.connect(rank=rank, **options) as session:
                return work(session)

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(be, range(world)))


@pytest.fixture
def cluster(shared_aggregator: Aggregator) -> Cluster:
    return Cluster(shared_aggregator.address)


@pytest.fixture
def racks() -> Iterator[list[Cluster]]:
    """Two racks, whose aggregators have the same parent."""
    root = Aggregator()
    below = [Aggregator("--parent", root.address) for _ in range(2)]
    yield [Cluster(rack.address) for rack in below]
    for aggregator in [*below, root]:
        aggregator.stop()


class Sidecar(Cluster):
    """Runs a sidecar process, and jobs at the sidecar."""

    def __init__(self, path: Path, *arguments: str) -> None:
        super().__init__(f"unix:{path}")
        self.path = path
        command = [binary(), "worker", "--socket", path, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(f"racksum worker at {path}: ")

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=30) == 0


@pytest.fixture(params=["aggregator", "sidecar"])
def place(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """Each place where ranks may join: an aggregator, or the sidecar of their host."""
    if request.param == "aggregator":
        yield cluster
        return
    sidecar = Sidecar(tmp_path / "socket")
    yield sidecar
    sidecar.stop()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        skip(report.nodeid, report.longrepr[2].removeprefix("Skipped: "))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    # Import torch only if there are such tests, because the import is slow.
    if gpu and not importlib.import_module("torch").cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="CUDA finds no GPU"))
