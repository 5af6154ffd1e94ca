"""Reports of tests, in the format of the Rust crate `tests/report`."""

from __future__ import annotations

import json
import os
from typing import Any


def append(entry: dict[str, Any]) -> None:
    """Appends a line to the report in one write, so that processes may share the file."""
    path = os.environ.get("RACKSUM_TEST_REPORT")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def skip(test: str, why: str) -> None:
    """Records that a test did not run, and why."""
    append({"skip": {"test": test, "why": why}})


def time(what: str, seconds: float, most: float) -> None:
    """Records how long something took, and how long it may take on a quiet machine.

    No test asserts on time: `cargo xtask bench failures` judges the times.
    """
    test = os.environ.get("RACKSUM_TEST_NAME") or os.environ.get("PYTEST_CURRENT_TEST", "")
    ms, most_ms = round(seconds * 1000), round(most * 1000)
    append({"time": {"test": test.split(" ")[0], "what": what, "ms": ms, "most": most_ms}})
