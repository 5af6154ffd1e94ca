"""The checked arguments of an op, and the collective call that an op belongs to."""

from __future__ import annotations

from typing import Any, NamedTuple

from racksum.options import MAX_ELEMENTS, MAX_LANES, text, whole_from
from racksum.tensor import tag_of

__all__ = ["ONE_OP", "Call", "PartOf", "checked_call"]


class PartOf(NamedTuple):
    """The collective call that an op belongs to. Ops of different calls never pair."""

    #: The collective's name, as in docs/wire.md.
    collective: str = "op"
    #: The root rank of the collective.
    root: int = 0
    #: The number of the call in its group.
    number: int = 0


#: The value for an op that belongs to no collective.
ONE_OP = PartOf()


class Call(NamedTuple):
    """The arguments of an op, which must be the same at all ranks."""

    elements: int
    dtype: str
    wire: str
    op: str
    block: int
    lane: int
    tag: int


#: The checks of an op's arguments, by the name of the argument.
_CHECKS = {
    "elements": whole_from(0, MAX_ELEMENTS),
    "wire": text,
    "op": text,
    "block": whole_from(32, 1024),
    "lane": whole_from(0, MAX_LANES - 1),
    "tag": whole_from(0, 2**64 - 1),
}


def checked_call(*, dtype: str, wire: str | None, tag: int | str, **given: Any) -> Call:
    """Returns the checked arguments of an op, or raises :class:`racksum.BadArgument`."""
    given["wire"] = dtype if wire is None else wire
    given["tag"] = tag_of(text("tag", tag)) if isinstance(tag, str) else tag
    checked = {name: _CHECKS[name](name, value) for name, value in given.items()}
    return Call(dtype=dtype, **checked)
