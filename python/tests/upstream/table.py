"""Compares the results of `run.py` with the section of docs/c10d.md that lists them."""

from __future__ import annotations

from pathlib import Path

import tomllib

__all__ = ["compared", "reasons", "write", "written"]

#: For each test, and for `gloo` and `racksum`: the verdict and the text of an error.
Found = dict[str, dict[str, dict[str, str]]]

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "c10d.md"
BEGIN, END = "<!-- python/tests/upstream/run.py --write -->", "<!-- end -->"


def reasons() -> dict[str, str]:
    """Returns the reasons why racksum does not pass tests, by the name of the test."""
    text = (Path(__file__).parent / "reasons.toml").read_text()
    return {
        test: reason["why"] for reason in tomllib.loads(text)["reason"] for test in reason["tests"]
    }


def compared(found: Found) -> list[str]:
    """Returns sentences about missing reasons, unneeded reasons, and unlisted tests."""
    wrong = []
    for name, by in found.items():
        if by["gloo"]["verdict"] != "passed":
            continue
        racksum = by["racksum"]
        passes, has_reason = racksum["verdict"] == "passed", name in reasons()
        if not passes and not has_reason:
            wrong.append(f"{name}: only Gloo passes, and reasons.toml does not say why: {racksum}")
        if passes and has_reason:
            wrong.append(f"{name}: passes with racksum; take it out of reasons.toml")
        if passes and name not in written() and name not in reasons():
            wrong.append(f"{name}: docs/c10d.md does not list it; run run.py --write")
    return wrong


def written() -> str:
    """Returns the section of docs/c10d.md that lists the results."""
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]


def write(found: Found) -> None:
    """Writes the results to docs/c10d.md."""
    before, after = DOCUMENT.read_text().split(BEGIN)[0], DOCUMENT.read_text().split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{section(found)}{END}{after}")


def section(found: Found) -> str:
    """Returns the section: the number of tests by result, and their names."""
    both = [name for name, by in found.items() if by.get("racksum", {}).get("verdict") == "passed"]
    skipped = sum(by["gloo"]["verdict"] == "skipped" for by in found.values())
    lines = [
        f"Of {len(found)} tests, {skipped} are not for Gloo on CPUs; most need GPUs, NCCL or MPI.",
        f"{len(both)} pass with Gloo and with racksum, and {len(reasons())} with Gloo alone:",
        "",
        "| only Gloo passes | why |",
        "|---|---|",
    ]
    by_reason: dict[str, list[str]] = {}
    for test, why in reasons().items():
        by_reason.setdefault(why, []).append(f"`{test}`")
    lines += [f"| {', '.join(tests)} | {why} |" for why, tests in by_reason.items()]
    lines += ["", "Both pass:", *wrapped(f"`{name}`" for name in both), ""]
    return "\n".join(lines)


def wrapped(names: object) -> list[str]:
    """Wraps names into lines."""
    lines = [""]
    for name in names:  # type: ignore[attr-defined]
        if len(lines[-1]) + len(name) > 100:
            lines.append("")
        lines[-1] += f" {name}," if lines[-1] else f"{name},"
    lines[-1] = lines[-1].removesuffix(",") + "."
    return lines
