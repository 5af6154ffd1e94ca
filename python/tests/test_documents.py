"""The statements of documents about tests are true."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import test_upstream_collectives
import test_upstream_ddp
import test_upstream_graphs
import test_upstream_groups
import test_upstream_hooks
import test_upstream_refusals
import test_upstream_several
from conftest import ROOT
from upstream import table

TESTS = Path(__file__).parent
VERDICTS = {"passes", "delegated", "differs", "refused"}


def rows() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Returns the rows of docs/c10d.md: a behaviour, its result, and the tests that show it."""
    return [
        (behaviour, verdict, re.findall(r"`(\w+)::(\w+)`", shown))
        for behaviour, verdict, shown in cells()
        if not SOURCE.fullmatch(behaviour)
    ]


#: A reference to a line of torch's own source.
SOURCE = re.compile(r"`([\w/]+\.\w+):(\d+)`")


#: The number of columns of the tables that name racksum's tests, and the prefixes of header rows.
COLUMNS = 3
HEADS = ("upstream", "line of", "---")


def cells() -> list[list[str]]:
    """Returns the cells of the tables of docs/c10d.md, by row."""
    found = []
    for line in (ROOT / "docs" / "c10d.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == COLUMNS and not cells[0].startswith(HEADS):
            found.append(cells)
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_is_listed_of_gloo_is_shown_by_a_test(row):
    _, verdict, tests = row
    assert verdict in VERDICTS
    assert tests
    for file, name in tests:
        text = (TESTS / f"test_{file}.py").read_text()
        assert re.search(rf'def {name}\(|^    "{name}": ', text, re.MULTILINE), f"{file}::{name}"


LINES = [(SOURCE.fullmatch(line), code) for line, code, _ in cells() if SOURCE.fullmatch(line)]


@pytest.mark.parametrize(("line", "code"), LINES, ids=lambda cell: cell if cell else "")
def test_lines_of_torch_say_what_is_said_of_them(line, code):
    path = Path(torch.__file__).parent / line[1]
    assert code.strip("`") in path.read_text().splitlines()[int(line[2]) - 1]


def ended(gloo: str, racksum: str) -> dict[str, dict[str, str]]:
    return {"gloo": {"verdict": gloo}, "racksum": {"verdict": racksum, "says": "why"}}


def test_what_only_gloo_passes_needs_a_reason_and_only_that():
    """Checks how a run of torch's own tests is compared with docs/c10d.md."""
    [explained, *_] = table.reasons()
    [both, *_] = re.findall(r"`(test_\w+)`[,.]", table.written().split("Both pass:")[1])
    wrong = {
        "test_of_gloo_alone": (ended("passed", "failed"), "only Gloo passes, and reasons.toml"),
        explained: (ended("passed", "passed"), "take it out"),
        "test_that_is_new": (ended("passed", "passed"), "does not list it"),
    }
    for name, (end, text) in wrong.items():
        [sentence] = table.compared({name: end})
        assert sentence.startswith(f"{name}: ")
        assert text in sentence
    fine = {
        explained: ended("passed", "timed out"),
        both: ended("passed", "passed"),
        "test_of_nobody": ended("failed", "failed"),
        "test_of_gpus": {"gloo": {"verdict": "skipped"}},
    }
    assert table.compared(fine) == []


def test_what_only_gloo_passes_is_listed_and_called_nothing_else():
    text = table.written()
    for test, why in table.reasons().items():
        assert f"`{test}`" in text
        assert why in text
    passing = [behaviour for behaviour, verdict, _ in rows() if verdict in ("passes", "delegated")]
    claimed = {test for behaviour in passing for test in re.findall(r"`(test_\w+)`", behaviour)}
    assert not claimed & set(table.reasons())


def test_what_is_asked_as_of_gloo_is_listed():
    text = (ROOT / "docs" / "c10d.md").read_text()
    listed = Counter(name for _, name in re.findall(r"`(\w+)::(\w+)`", text))
    asked = {check.__name__ for check in test_upstream_collectives.CHECKS}
    asked |= {check.__name__ for check in test_upstream_groups.CHECKS}
    asked |= {check.__name__ for check in test_upstream_several.CHECKS}
    asked |= {check.__name__ for check in test_upstream_hooks.CHECKS}
    asked |= {scenario.__name__ for scenario in test_upstream_ddp.SCENARIOS}
    asked |= {scenario.__name__ for scenario in test_upstream_graphs.SCENARIOS}
    asked |= set(test_upstream_refusals.REFUSALS)
    assert not asked - set(listed)
