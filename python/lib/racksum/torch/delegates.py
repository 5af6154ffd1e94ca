"""What the backend ``racksum`` leaves to Gloo.

Gloo sends from one rank to another, and has the collectives that cannot be said as sums. Tensors of
a GPU go to these by way of the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.utils._pytree import tree_leaves, tree_map_only

from racksum.eager import eager_methods
from racksum.errors import BadArgument
from racksum.torch.calls import Call, Chain, numbered
from racksum.torch.membership import Membership, start_earlier
from racksum.torch.staging import Staging, to_host
from racksum.torch.work import Ends, Pending, Work, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

__all__ = ["DelegatesToGloo"]


@eager_methods
class DelegatesToGloo(Backend):
    """The part of the backend that calls Gloo; its subclass says how collectives take turns."""

    _gloo: Any
    _membership: Membership
    _chain: Chain
    _staging: Staging
    #: Puts a collective in flight; ``joins`` says whether it needs the session.
    _run: Callable[..., Work]

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        """Waits until all ranks are here, and names one that is not; Gloo does it."""
        self._membership.check_process()
        # Gloo pairs collectives by the order in which they begin.
        start_earlier(self._chain, self._staging)
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

    def send(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Sends a tensor to a rank, by Gloo."""
        return _with_future(self._gloo.send(self._of_host(tensors), *args), tensors)

    def recv(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Receives a tensor from a rank, by Gloo."""
        return _with_future(self._gloo.recv(self._of_host(tensors), *args), tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Receives a tensor from whichever rank sends one, by Gloo."""
        return _with_future(self._gloo.recv_anysource(self._of_host(tensors), *args), tensors)

    @numbered("op", ops=lambda *_: 0)
    def gather(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Gives one rank the tensors of all, by Gloo."""
        return self._through_gloo(call, self._gloo.gather, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def scatter(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Gives each rank one of a rank's tensors, by Gloo."""
        return self._through_gloo(call, self._gloo.scatter, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def alltoall(self, call: Call, outputs: Any, *args: Any) -> Any:
        """Gives each rank one tensor of each, by Gloo."""
        return self._through_gloo(call, self._gloo.alltoall, outputs, *args)

    @numbered("op", ops=lambda *_: 0)
    def all_to_all_single(self, call: Call, output: Any, *args: Any) -> Any:
        """Gives each rank a part of the tensor of each, by Gloo."""
        return self._through_gloo(call, self._gloo.all_to_all_single, output, *args)

    def _of_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors for Gloo to send or receive."""
        self._membership.check_process()
        # On their way down, what comes would wait for all that was called before.
        for x in tensors:
            if self._staging.takes(x.device):
                raise BadArgument(
                    f"the tensor is on {x.device}; one rank sends another tensors of the host: "
                    'pass x.cpu(), or make the group of "cpu:racksum,cuda:nccl"'
                )
        return tensors

    def _through_gloo(self, call: Call, gloo: Callable[..., Any], outputs: Any, *args: Any) -> Work:
        """A collective of Gloo's, which writes to ``outputs``."""
        touched = [x for x in tree_leaves((outputs, args)) if isinstance(x, Tensor)]
        begin = lambda: [self._delegated(gloo, outputs, *args)]  # noqa: E731
        return self._run(call, touched, begin, tree_leaves(outputs), joins=False)

    def _delegated(self, call: Callable[..., Any], outputs: Any, *args: Any) -> Ends:
        """Has Gloo do something, which writes to ``outputs``."""
        [device, *_] = [x.device for x in tree_leaves((outputs, args)) if isinstance(x, Tensor)]
        if not self._staging.takes(device):
            self._staging.drain()
            return Pending(call(outputs, *args))

        def start() -> Ends:
            copies, *rest = tree_map_only(Tensor, lambda x: to_host(x)[0], (outputs, *args))
            return Pending(call(copies, *rest)).then(lambda _: copies)

        def copy_out(copies: Any) -> None:
            for x, copy in zip(tree_leaves(outputs), tree_leaves(copies), strict=True):
                write(x, copy, non_blocking=True)

        return self._staging.stage(device, start, copy_out)


def _with_future(work: dist.Work, tensors: Sequence[Tensor]) -> Work:
    """What Gloo sends or receives, with a future, which Gloo's lacks; no barrier waits for it."""
    return Work([Pending(work)], list(tensors), {})
