"""The ``pg_options`` of process groups on the ``racksum`` backend."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend

from racksum.errors import BadArgument
from racksum.options import OPTIONS
from racksum.session import DEFAULT_BLOCK
from racksum.torch.compress import block_of, checked_wire

__all__ = ["Options"]


class Options(Backend.Options):
    """The ``pg_options`` of a process group on the ``racksum`` backend.

    >>> options = racksum.torch.Options(aggregator="127.0.0.1:7177", wire="bf16")
    >>> torch.distributed.init_process_group("racksum", pg_options=options)
    >>> x = torch.full((3,), 0.1)
    >>> torch.distributed.all_reduce(x)
    >>> torch.equal(x, torch.full((3,), 0.1).bfloat16().float())
    True

    :param wire: Type of floating-point elements on the network, in sums and averages, as for
        :meth:`racksum.Session.allreduce`. By default their own type. Narrower elements are sent
        unchanged, and so are 16-bit elements if the wire type has 16 bits.
    :param block: Elements of a block, a power of two from 32 to 1024. Blocks of zeros are not sent.
    :param connect: Options of :func:`racksum.connect`, except ``rank`` and ``world``.
    :raises racksum.BadArgument: ``wire`` or ``block`` is invalid, or an option is unknown.
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
                f"unknown option {name} of a process group; the options are wire, block, "
                f"{', '.join(sorted(known))}"
            )
        self.connect = connect

    def of_group(self, group: Any) -> Options:
        """Returns a copy of the options for a group. torch keeps data of the group in the copy.

        >>> from datetime import timedelta
        >>> from types import SimpleNamespace
        >>> group = SimpleNamespace(timeout=timedelta(minutes=5), group_id="7")
        >>> group.global_ranks_in_group = [0]
        >>> racksum.torch.Options(wire="bf16").of_group(group).wire
        'bf16'

        :param group: The description of the group that torch passes to a new backend.
        """
        own = Options(wire=self.wire, block=self.block, **self.connect)
        own._timeout = group.timeout
        own.group_name = group.group_id
        own.global_ranks_in_group = group.global_ranks_in_group
        return own
