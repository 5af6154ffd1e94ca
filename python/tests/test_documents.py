"""What documents say of tests is so."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import test_upstream_collectives
import test_upstream_ddp
import test_upstream_graphs
import test_upstream_groups
import test_upstream_hooks
import test_upstream_refusals
from conftest import ROOT

TESTS = Path(__file__).parent
VERDICTS = {"passes", "delegated", "refused"}


def rows() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What docs/c10d.md lists: a behaviour, what becomes of it, and the tests that show it."""
    found = []
    for line in (ROOT / "docs" / "c10d.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("upstream", "---"):
            behaviour, verdict, shown = cells
            found.append((behaviour, verdict, re.findall(r"`(\w+)::(\w+)`", shown)))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_is_listed_of_gloo_is_shown_by_a_test(row):
    _, verdict, tests = row
    assert verdict in VERDICTS
    assert tests
    for file, name in tests:
        text = (TESTS / f"test_{file}.py").read_text()
        assert re.search(rf'def {name}\(|^    "{name}": ', text, re.MULTILINE), f"{file}::{name}"


def test_what_is_asked_as_of_gloo_is_listed():
    listed = Counter(name for _, _, tests in rows() for _, name in tests)
    asked = {check.__name__ for check in test_upstream_collectives.CHECKS}
    asked |= {check.__name__ for check in test_upstream_groups.CHECKS}
    asked |= {check.__name__ for check in test_upstream_hooks.CHECKS}
    asked |= {scenario.__name__ for scenario in test_upstream_ddp.SCENARIOS}
    asked |= {scenario.__name__ for scenario in test_upstream_graphs.SCENARIOS}
    asked |= set(test_upstream_refusals.REFUSALS)
    assert not asked - set(listed)
