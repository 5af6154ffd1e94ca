"""Every public class and function has an example in its docstring, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import racksum
from conftest import Aggregator, Cluster
from racksum.torch.compress import BLOCKS
from test_sidecar import fake_sidecar

#: The modules that users import from. The `__all__` of each lists its public names.
MODULES = (
    "racksum",
    "racksum.errors",
    "racksum.torch",
    "racksum.torch.compress",
    "racksum.torch.profile",
    "racksum.torch.study",
)

#: The variables that torchrun sets for a single rank. With port 0 the store finds a free port.
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

#: The addresses of the aggregator and the sidecar in the examples.
AGGREGATOR, SIDECAR = "127.0.0.1:7177", "unix:/run/racksum"

#: Seconds that the examples of a docstring may take.
PATIENCE = 120.0


def public() -> dict[str, Any]:
    """Returns the public modules, and their classes, functions and methods, by name."""
    modules = [importlib.import_module(name) for name in MODULES]
    found: dict[str, Any] = {module.__name__: module for module in modules}
    for thing in (getattr(module, name) for module in modules for name in module.__all__):
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue
        whole = f"{thing.__module__}.{thing.__qualname__}"
        found[whole] = thing
        for name, member in vars(thing).items():
            function = getattr(member, "__func__", member)
            if inspect.isclass(thing) and not name.startswith("_") and inspect.isfunction(function):
                found[f"{whole}.{name}"] = function
    return found


def examples_of(name: str, names: dict[str, Any]) -> doctest.DocTest:
    """Returns a docstring's examples, which may use these names and those of their module."""
    thing = public()[name]
    own = vars(sys.modules[name if inspect.ismodule(thing) else thing.__module__])
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    [found] = finder.find(thing, name, module=False, globs={**own, **names})
    return found


NAMES = list(public())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    documentation = public()[name].__doc__
    assert documentation, "there is no docstring"
    assert name in MODULES or examples_of(name, {}).examples, "there is no example (>>>)"
    assert not re.search(r"::$", documentation, re.MULTILINE), (
        "write examples with >>>, so that they run"
    )


@pytest.fixture(scope="module")
def aggregator() -> Iterator[Aggregator]:
    aggregator = Aggregator()
    yield aggregator
    aggregator.stop()


@pytest.fixture(scope="module")
def process(aggregator: Aggregator) -> Iterator[ProcessPoolExecutor]:
    """A process that runs the examples: the threads of their process groups never end."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    yield pool
    end(pool)


def end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name, {}).examples])
def test_an_example_does_what_its_docstring_says(
    process: ProcessPoolExecutor, aggregator: Aggregator, tmp_path: Path, name: str
) -> None:
    running = process.submit(failures, name, aggregator.address, tmp_path)
    try:
        assert running.result(PATIENCE) == ""
    except TimeoutError:
        # If an example hangs, the examples after it need another process.
        end(process)
        raise


def failures(name: str, address: str, folder: Path) -> str:
    """Returns a report of the failing examples of a docstring, or an empty string."""
    os.chdir(folder)
    os.environ.update(TORCHRUN)
    report: list[str] = []
    with ExitStack() as stack:
        place = Place(address)
        names = {"racksum": racksum, "np": np, "torch": torch}
        if "session" in public()[name].__doc__ or name in SETUPS:
            names |= stack.enter_context(SETUPS.get(name, alone)(place))
        if name.startswith("racksum.torch.study."):
            names["found"] = found()
        if name.startswith("racksum.torch.profile."):
            names["profiled"] = profiled()
        test = examples_of(name, names)
        for example in test.examples:
            for text, there in place.real.items():
                example.source = example.source.replace(text, there)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        if dist.is_initialized():
            dist.destroy_process_group()
    return "".join(report)


class Place:
    """The real addresses of the aggregator and the sidecar."""

    def __init__(self, address: str) -> None:
        self.real = {AGGREGATOR: address}

    def connect(self, rank: int = 0, world: int = 1, **options: Any) -> racksum.Session:
        return racksum.connect(self.real[AGGREGATOR], rank=rank, world=world, **options)


Names = dict[str, Any]


@contextmanager
def alone(place: Place) -> Iterator[Names]:
    """Connects the session of a job with one rank."""
    with place.connect(job=Cluster.new_job()) as session:
        yield {"session": session}


@contextmanager
def two(place: Place, **options: Any) -> Iterator[list[racksum.Session]]:
    """Connects the sessions of a job with two ranks."""
    options["job"] = Cluster.new_job()
    with ThreadPoolExecutor(2) as pool:
        sessions = list(pool.map(lambda rank: place.connect(rank, 2, **options), range(2)))
    try:
        yield sessions
    finally:
        for session in sessions:
            session.close()


@contextmanager
def with_one_that_waits(place: Place) -> Iterator[Names]:
    with two(place) as [session, _]:
        yield {"session": session}


@contextmanager
def with_one_that_is_too_late(place: Place) -> Iterator[Names]:
    with two(place, timeout=1.0) as [session, _]:
        yield {"session": session}


@contextmanager
def with_one_that_left(place: Place) -> Iterator[Names]:
    with two(place) as [session, other]:
        other.close()
        yield {"session": session}


@contextmanager
def with_one_that_passes_three_elements(place: Place) -> Iterator[Names]:
    with two(place) as [session, other]:
        handle = other.allreduce(np.ones(3, np.float32), async_op=True)
        yield {"session": session}
        with pytest.raises(racksum.Mismatch):
            handle.wait()


@contextmanager
def at_a_full_aggregator(place: Place) -> Iterator[Names]:
    aggregator = Aggregator("--max-jobs", "1")
    place.real[AGGREGATOR] = aggregator.address
    try:
        with place.connect(job="first"):
            yield {}
    finally:
        aggregator.stop()


@contextmanager
def at_a_sidecar_of_another_release(place: Place) -> Iterator[Names]:
    path = Path("sidecar").absolute()
    with fake_sidecar(path, b'{"wrong_version": {"speaks": 2}}'):
        place.real[SIDECAR] = f"unix:{path}"
        yield {}


#: The setups of docstrings whose examples need a setup other than `alone`.
SETUPS: dict[str, Callable[[Place], AbstractContextManager[Names]]] = {
    "racksum.errors.Mismatch": with_one_that_passes_three_elements,
    "racksum.errors.NoRoom": at_a_full_aggregator,
    "racksum.errors.OpTimeout": with_one_that_is_too_late,
    "racksum.errors.PeerLost": with_one_that_left,
    "racksum.errors.VersionMismatch": at_a_sidecar_of_another_release,
    "racksum.errors.WaitTimeout": with_one_that_waits,
}


def found() -> Any:
    """Returns the study of the examples, as the module `racksum.torch.study` describes it."""
    studies: Any = sys.modules["racksum.torch.study"]
    bucket = studies.Bucket(
        elements=1_000_000,
        sparse=False,
        ready=0.05,
        scan=0.001,
        density=dict.fromkeys(BLOCKS, 0.1),
        union=dict.fromkeys(BLOCKS, 0.2),
    )
    return studies.Study(world=2, compute=0.1, after=0.01, compared=True, buckets=[bucket])


def profiled() -> Any:
    """Returns the profile of the examples, as the module `racksum.torch.profile` describes it."""
    profiles: Any = sys.modules["racksum.torch.profile"]
    front = profiles.ProfiledTensor(
        name="embed.weight .. block.0.bias",
        elements=1_000_000,
        element_bytes=4,
        forward_us=120.5,
        backward_us=600.0,
        update_us=90.0,
    )
    head = profiles.ProfiledTensor(
        name="head.weight",
        elements=200_000,
        element_bytes=4,
        forward_us=100.0,
        backward_us=299.5,
        update_us=20.0,
    )
    return profiles.Profile(
        name="Net",
        device="cpu",
        times="measured",
        tensors=[front, head],
        comment="Medians of 5 repeats, updates by SGD.",
    )


def test_every_setup_is_that_of_a_docstring() -> None:
    assert SETUPS.keys() <= set(NAMES)
