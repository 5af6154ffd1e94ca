"""The c10d backend ``racksum``: ``init_process_group("racksum")``, or ``"cpu:racksum,cuda:nccl"``.

What reduces is racksum's, and so is what can be said as a sum (:mod:`racksum.torch.gathering`);
what goes from one rank to another, and operators and elements that racksum lacks, are Gloo's.
Tensors of a GPU go to either by way of the host (:mod:`racksum.torch.staging`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo
from torch.utils._pytree import tree_leaves, tree_map_only

from racksum.errors import BadArgument
from racksum.options import ConnectOptions
from racksum.session import DEFAULT_BLOCK, Session
from racksum.torch.gathering import broadcast, gather_into
from racksum.torch.groups import is_generation_given, new_generation, of_group
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.staging import Staging, allreduce, staging_of, to_host
from racksum.torch.work import Ends, Pending, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Options", "register"]

_Op: Any = dist.ReduceOp.RedOpType

#: The operators that racksum has.
_OPERATORS = {_Op.SUM: "sum", _Op.AVG: "avg", _Op.MIN: "min", _Op.MAX: "max"}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
#: What operators do to booleans, as operators on bytes.
_OF_BOOLEANS = {
    _Op.SUM: _Op.MAX,
    _Op.MAX: _Op.MAX,
    _Op.BOR: _Op.MAX,
    _Op.PRODUCT: _Op.MIN,
    _Op.MIN: _Op.MIN,
    _Op.BAND: _Op.MIN,
}


class Options:
    """The ``pg_options`` of a process group.

    :param wire: How floating point elements travel in sums and averages, if not unchanged: see
        :meth:`racksum.Session.allreduce`.
    :param block: Elements of a block: blocks of zeros are not sent.
    :param connect: What :func:`racksum.connect` takes, but for ``rank`` and ``world``.
    """

    def __init__(
        self, *, wire: str | None = None, block: int = DEFAULT_BLOCK, **connect: Any
    ) -> None:
        self.wire = wire
        self.block = block
        self.connect = connect


class RacksumBackend(Backend):
    """The ranks of a process group. They join a job of their own when they first reduce."""

    def __init__(self, group: Any, options: Options) -> None:
        super().__init__(group.group_rank, group.group_size)
        self._options = options
        self._name = group.group_id
        self._timeout = group.timeout
        self._session: Session | None = None
        self._staging = Staging()
        # Ranks that torchrun 2.15 starts again find the store as it was, with old addresses in it.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"racksum/gloo/{life}", group.store)
        self._gloo: Any = ProcessGroupGloo(store, self.rank(), self.size(), group.timeout)

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name.
        """``racksum``."""
        return "racksum"

    @property
    def session(self) -> Session:
        """The session of the group's ranks."""
        if self._session is None:
            seconds = self._timeout.total_seconds()
            limits = {"timeout": seconds, "join_timeout": seconds}
            options = ConnectOptions.resolve(
                **{**limits, **self._options.connect}, rank=self.rank(), world=self.size()
            )
            if not is_generation_given(self._options.connect):
                self._staging.drain()
                agreed = self._agreed(new_generation())
                options = dataclasses.replace(options, generation=agreed)
            self._session = Session(of_group(options, self._name))
            staging_of(self._session, self._staging)
        return self._session

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor, dense or sparse, in place."""
        x = _only(tensors)
        return Work([self._reduced(x, opts)], [x])

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces tensors, each with those of its place at other ranks."""
        return Work([self._reduced(x, opts) for x in tensors], list(tensors))

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor in place at the root; those of other ranks stay as they are."""
        x = _only(tensors)
        reduced = x if self.rank() == opts.rootRank else x.clone()
        return Work([self._reduced(reduced, opts)], [reduced])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduces tensors, one for each rank, and gives each its own."""
        output, parts = _only(outputs), _only(inputs)
        whole = torch.cat([part.reshape(-1) for part in parts])
        return Work([self._scattered(output, whole, opts)], [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Reduces a tensor, and gives each rank a part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Reduces tensors, and gives each rank a part of each."""
        parts = [
            self._scattered(output, whole.reshape(-1).clone(), opts)
            for output, whole in zip(outputs, inputs, strict=True)
        ]
        return Work(parts, list(outputs))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Gives all ranks the root's tensor."""
        x = _only(tensors)
        _check_dense(x)
        return Work([broadcast(self.session, x, opts.rootRank)], [x])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gives all ranks the tensors of all, in a list."""
        parts, x = _only(outputs), _only(inputs)
        _check_dense(x)
        whole = x.new_empty((self.size(), *x.shape))

        def copy_out(_: object) -> None:
            for part, of_rank in zip(parts, whole, strict=True):
                part.copy_(of_rank.view_as(part))

        gathered = gather_into(self.session, whole, x).then(copy_out)
        return Work([gathered], list(parts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Gives all ranks the tensors of all, in one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gives all ranks the tensors of all, several times."""
        for output in outputs:
            _check_dense(output)
        pairs = zip(outputs, inputs, strict=True)
        return Work([gather_into(self.session, *pair) for pair in pairs], list(outputs))

    def barrier(self, opts: Any) -> Work:
        """Ends once all ranks have called it, and their GPUs have come to it."""
        session, nothing = self.session, torch.zeros(1, dtype=torch.int32, device="cpu")
        # Of devices it may say the kind only.
        device = torch.empty(0, device=opts.device or "cpu").device

        def start() -> Ends:
            handle: Ends = session.allreduce(nothing, tag="barrier", async_op=True)
            return handle

        if self._staging.takes(device):
            return Work([self._staging.stage(device, start, lambda _: None)], [])
        self._staging.drain()
        return Work([start()], [])

    def send(self, tensors: Sequence[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._gloo.send(self._of_host(tensors), *args)

    def recv(self, tensors: Sequence[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._gloo.recv(self._of_host(tensors), *args)

    def recv_anysource(self, tensors: Sequence[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._gloo.recv_anysource(self._of_host(tensors), *args)

    def gather(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return Work([self._delegated(self._gloo.gather, outputs, *args)], tree_leaves(outputs))

    def scatter(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return Work([self._delegated(self._gloo.scatter, outputs, *args)], tree_leaves(outputs))

    def alltoall(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return Work([self._delegated(self._gloo.alltoall, outputs, *args)], tree_leaves(outputs))

    def all_to_all_single(self, output: Any, *args: Any) -> Any:
        """Gloo's."""
        return Work([self._delegated(self._gloo.all_to_all_single, output, *args)], [output])

    def shutdown(self) -> None:
        """Leaves the job."""
        if self._session is not None:
            self._session.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        """Leaves the job: what is in flight fails."""
        self.shutdown()

    def _agreed(self, number: int) -> int:
        """The number of the group's first rank."""
        agreed = torch.tensor([number], device="cpu")
        self._gloo.broadcast(agreed, 0).wait()
        return int(agreed)

    def _of_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors for Gloo to send or receive."""
        # On their way down, what comes would wait for all that was called before.
        for x in tensors:
            if self._staging.takes(x.device):
                raise BadArgument(
                    f"the tensor is on {x.device}; one rank sends another tensors of the host: "
                    'pass x.cpu(), or make the group of "cpu:racksum,cuda:nccl"'
                )
        return tensors

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
                x.copy_(copy, non_blocking=True)

        return self._staging.stage(device, start, copy_out)

    def _reduced(self, x: Tensor, opts: Any) -> Ends:
        """Starts reducing a tensor in place, whoever can."""
        by = opts.reduceOp.op
        if by == _Op.PREMUL_SUM:
            x.mul_(opts.reduceOp.factor)
            by = _Op.SUM
        if x.is_complex() and by in (_Op.SUM, _Op.AVG):
            x = torch.view_as_real(x)
        if by in _OPERATORS and x.dtype in (*_FLOATS, *_INTEGERS):
            return self._reduced_here(x, _OPERATORS[by])
        delegated = dist.AllreduceOptions()
        delegated.reduceOp = by
        if x.dtype is torch.bool and by in _OF_BOOLEANS:
            x = x.view(torch.uint8)
            delegated.reduceOp = _OF_BOOLEANS[by]
        return self._delegated(self._gloo.allreduce, [x], delegated)

    def _reduced_here(self, x: Tensor, by: str) -> Ends:
        options = self._options
        narrows = by in ("sum", "avg") and x.is_floating_point()
        wire = options.wire if narrows else None
        if x.is_sparse:
            return allreduce_sparse(self.session, x, by, wire=wire).then(x.copy_)
        return allreduce(self.session, x, by, wire=wire, block=options.block)

    def _scattered(self, output: Tensor, whole: Tensor, opts: Any) -> Ends:
        """Reduces ``whole``, which is of this call alone, and takes this rank's part of it."""
        own = whole.view(self.size(), -1)[self.rank()]
        return self._reduced(whole, opts).then(lambda _: output.copy_(own.view_as(output)))


def register() -> None:
    """Makes the backend known to torch, which calls this where it looks for entry points."""
    dist.Backend.register_backend("racksum", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: Options | None) -> RacksumBackend:
    if options is not None and not isinstance(options, Options):
        raise BadArgument(
            f"the pg_options of racksum are racksum.torch.Options, and not {type(options).__name__}"
        )
    return RacksumBackend(group, options or Options())


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise BadArgument(f"one tensor is given at a time, and not {len(tensors)}")
    return tensors[0]


def _check_dense(x: Tensor) -> None:
    if x.layout is not torch.strided or not x.is_contiguous():
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is not dense and contiguous; pass x.contiguous()"
        )
