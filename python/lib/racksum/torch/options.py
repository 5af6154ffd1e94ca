"""The ``pg_options`` of a process group on racksum."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend

from racksum.errors import BadArgument
from racksum.options import OPTIONS
from racksum.session import DEFAULT_BLOCK
from racksum.torch.compress import block_of, checked_wire

__all__ = ["Options"]


class Options(Backend.Options):
    """The ``pg_options`` of a process group.

    :param wire: How floating point elements travel in sums and averages, if not unchanged: see
        :meth:`racksum.Session.allreduce`. Those that are as narrow already travel as they are.
    :param block: Elements of a block: blocks of zeros are not sent.
    :param connect: What :func:`racksum.connect` takes, but for ``rank`` and ``world``.
    """

    def __init__(
        self, *, wire: str | None = None, block: int = DEFAULT_BLOCK, **connect: Any
    ) -> None:
        super().__init__("racksum")
        self.wire = checked_wire(wire)
        self.block = block_of(block)
        known = set(OPTIONS) - {"rank", "world"}
        for name in connect.keys() - known:
            raise BadArgument(
                f"{name} is no option of a process group; wire, block and "
                f"{', '.join(sorted(known))} are"
            )
        self.connect = connect

    def of_group(self, group: Any) -> Options:
        """The same for a group: torch keeps the group's own data in its options."""
        own = Options(wire=self.wire, block=self.block, **self.connect)
        own._timeout = group.timeout
        own.group_name = group.group_id
        own.global_ranks_in_group = group.global_ranks_in_group
        return own
