"""The part of the ``racksum`` backend that calls Gloo.

Gloo sends from rank to rank, and does the collectives that cannot be written as sums. GPU tensors
reach these collectives through host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.utils._pytree import tree_leaves, tree_map_only

from racksum.eager import eager_methods
from racksum.errors import BadArgument
from racksum.torch.call_order import Call, Chain, numbered
from racksum.torch.membership import Membership, start_earlier
from racksum.torch.staging import Staging, to_host
from racksum.torch.work import Work, handle_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from racksum.handle import Handle

__all__ = ["DelegatesToGloo"]


@eager_methods
class DelegatesToGloo(Backend):
    """The methods of the backend that call Gloo. A subclass must define ``_run``."""

    _gloo: Any
    _membership: Membership
    _chain: Chain
    _staging: Staging
    #: Starts a collective; ``joins`` says whether it needs the session.
    _run: Callable[..., Work]

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        """Waits through Gloo until all ranks call this. A timeout's error names a missing rank."""
        self._membership.check_process()
        # Gloo pairs collectives in the order in which they begin, so let earlier ones begin first.
        start_earlier(self._chain, self._staging)
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

    def send(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Sends a tensor to a rank through Gloo."""
        return _with_future(self._gloo.send(self._of_host(tensors), *args), tensors)

    def recv(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Receives a tensor from a rank through Gloo."""
        return _with_future(self._gloo.recv(self._of_host(tensors), *args), tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Receives a tensor from any rank through Gloo."""
        return _with_future(self._gloo.recv_anysource(self._of_host(tensors), *args), tensors)

    @numbered("op", ops=lambda *_: 0)
    def gather(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Gathers the tensors of all ranks at one rank through Gloo."""
        return self._through_gloo(call, self._gloo.gather, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def scatter(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Gives each rank one of the root's tensors through Gloo."""
        return self._through_gloo(call, self._gloo.scatter, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def alltoall(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Sends a separate tensor from each rank to every rank through Gloo."""
        return self._through_gloo(call, self._gloo.alltoall, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def all_to_all_single(self, call: Call, output: Any, *args: Any) -> Any:
        """Sends each rank its part of every rank's tensor through Gloo."""
        return self._through_gloo(call, self._gloo.all_to_all_single, output, *args)

    def _of_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors, or raises :class:`BadArgument` if one is on a GPU."""
        self._membership.check_process()
        # If a receive were staged, it would wait for all calls before it, and delay later calls.
        for x in tensors:
            if self._staging.takes(x.device):
                raise BadArgument(
                    f"the tensor is on {x.device}, but racksum sends and receives only tensors in "
                    'host memory; pass x.cpu(), or make the group with "cpu:racksum,cuda:nccl"'
                )
        return tensors

    def _through_gloo(self, call: Call, gloo: Callable[..., Any], outputs: Any, *args: Any) -> Work:
        """Starts a Gloo collective that writes to ``outputs``."""
        touched = [x for x in tree_leaves((outputs, args)) if isinstance(x, Tensor)]
        begin = lambda: [self._delegated(gloo, outputs, *args)]  # noqa: E731
        return self._run(call, touched, begin, tree_leaves(outputs), joins=False)

    def _delegated(self, call: Callable[..., Any], outputs: Any, *args: Any) -> Handle[Any]:
        """Calls Gloo, which writes to ``outputs``. GPU tensors are staged through host memory."""
        [device, *_] = [x.device for x in tree_leaves((outputs, args)) if isinstance(x, Tensor)]
        if not self._staging.takes(device):
            self._staging.drain()
            return handle_of(call(outputs, *args))

        def start() -> Handle[Any]:
            copies, *rest = tree_map_only(Tensor, lambda x: to_host(x)[0], (outputs, *args))
            return handle_of(call(copies, *rest)).then(lambda _: copies)

        def copy_out(copies: Any) -> None:
            for x, copy in zip(tree_leaves(outputs), tree_leaves(copies), strict=True):
                write(x, copy, non_blocking=True)

        return self._staging.stage(device, start, copy_out)


def _with_future(work: dist.Work, tensors: Sequence[Tensor]) -> Work:
    """Returns a work with a future, which Gloo's works lack. Barriers do not wait for this work."""
    return Work([handle_of(work).wait], list(tensors), {})
