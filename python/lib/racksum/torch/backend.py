"""The c10d backend ``racksum``: ``init_process_group("racksum")``, or ``"cpu:racksum,cuda:nccl"``.

What reduces is racksum's, and so is what can be said as a sum (:mod:`racksum.torch.gathering`);
what goes from one rank to another, and operators and elements that racksum lacks, are Gloo's.
Tensors of a GPU go to either by way of the host (:mod:`racksum.torch.staging`).
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo
from torch.utils._pytree import tree_leaves, tree_map_only

from racksum.eager import eager_methods
from racksum.errors import BadArgument
from racksum.log import logger
from racksum.options import OPTIONS, ConnectOptions
from racksum.session import DEFAULT_BLOCK, Session
from racksum.torch.compress import block_of, checked_wire, wire_for
from racksum.torch.gathering import broadcast, gather_into
from racksum.torch.groups import (
    default_store,
    drawn_in,
    is_generation_given,
    new_generation,
    of_group,
)
from racksum.torch.several import alike, check_root_tensor, combined, copying_to
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.staging import Staging, allreduce, staging_of, to_host
from racksum.torch.work import Before, Ends, Pending, Work, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from racksum.torch.work import Waits

__all__ = ["Options", "register"]

_Op: Any = dist.ReduceOp.RedOpType

_log = logger("racksum.torch")

#: The operators that racksum has.
_OPERATORS = {_Op.SUM: "sum", _Op.AVG: "avg", _Op.MIN: "min", _Op.MAX: "max"}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
#: The other elements that Gloo has.
_BYTES = (torch.int8, torch.uint8, torch.bool)
#: What operators do to booleans, as operators on bytes.
_OF_BOOLEANS = {
    _Op.SUM: _Op.MAX,
    _Op.MAX: _Op.MAX,
    _Op.BOR: _Op.MAX,
    _Op.PRODUCT: _Op.MIN,
    _Op.MIN: _Op.MIN,
    _Op.BAND: _Op.MIN,
}


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


@eager_methods
class RacksumBackend(Backend):
    """The ranks of a process group. They join a job of their own when they first reduce."""

    supports_splitting = True
    # Without these torch 2.15 recurses forever.
    supports_coalescing = supports_shrinking = False
    supports_abort_hooks = supports_completion_hooks = False
    supports_reconfigure = supports_window = _supports_time_estimate = False

    def __init__(self, group: Any, options: Options) -> None:
        super().__init__(group.group_rank, group.group_size)
        self._options = options.of_group(group)
        self._name = group.group_id
        self._timeout = group.timeout
        self._store = group.store
        self._session: Session | None = None
        self._staging = Staging()
        self._in_flight: dict[Work, None] = {}
        self._sequence = 0
        # Ranks that torchrun 2.15 starts again find the store as it was, with old addresses in it.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"racksum/gloo/{life}", group.store)
        self._gloo: Any = ProcessGroupGloo(store, self.rank(), self.size(), group.timeout)
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name.
        """``racksum``."""
        return "racksum"

    @property
    def options(self) -> Options:
        """The group's."""
        return self._options

    @property
    def session(self) -> Session:
        """The session of the group's ranks."""
        if self._session is None:
            seconds = self._timeout.total_seconds()
            names = ("timeout", "join_timeout")
            limits = {n: seconds for n in names if not os.environ.get(f"RACKSUM_{n.upper()}")}
            options = ConnectOptions.resolve(
                drawn=drawn_in(default_store() or self._store),
                **{**limits, **self._options.connect},
                rank=self.rank(),
                world=self.size(),
            )
            if not is_generation_given(self._options.connect):
                self._staging.drain()
                agreed = self._agreed(new_generation())
                options = dataclasses.replace(options, generation=agreed)
            self._session = Session(of_group(options, self._name))
            staging_of(self._session, self._staging)
        return self._session

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> RacksumBackend:
        """A group of some of the ranks, for ``split_group``."""
        if self.rank() not in ranks:
            # What is returned must be a backend: torch 2.15 would read through a null pointer.
            raise BadArgument(
                f"rank {self.rank()} is in none of the groups that are split off: give every rank "
                "a group in split_ranks, or use torch.distributed.new_group"
            )
        group = SimpleNamespace(
            # Whoever waits at a store has it for themselves.
            store=store.clone(),
            group_rank=ranks.index(self.rank()),
            group_size=len(ranks),
            timeout=opts._timeout,
            group_id=opts.group_name,
            global_ranks_in_group=opts.global_ranks_in_group,
        )
        # torch copies options that nobody gives, and not what Python has added to them.
        return RacksumBackend(group, opts if isinstance(opts, Options) else self._options)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: what ranks do that are in no group which others split off."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor, dense or sparse, in place; several become what all come to together."""
        if len(alike(tensors)) == 1:
            return self._started([self._reduced(tensors[0], opts)], [tensors[0]])
        whole = combined(tensors, opts.reduceOp.op)
        copy = copying_to(tensors)
        return self._started(
            [self._reduced(whole, opts).then(lambda _: copy(whole))], list(tensors)
        )

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces tensors, each with those of its place at other ranks."""
        return self._started([self._reduced(x, opts) for x in tensors], list(tensors))

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor in place at the root; those of other ranks stay as they are."""
        x = _only(tensors)
        self._check_root(opts.rootRank)
        check_root_tensor(opts.rootTensor, tensors)
        reduced = x if self.rank() == opts.rootRank else x.clone()
        return self._started([self._reduced(reduced, opts)], [reduced])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduces tensors, one for each rank, and gives each its own."""
        output, parts = _only(outputs), _only(inputs)
        self._check_one_each(parts)
        _check_fits(output, parts[self.rank()].numel(), output.dtype)
        for part in parts:
            _check_fits(part, part.numel(), output.dtype)
        begin = sum(part.numel() for part in parts[: self.rank()])
        whole = torch.cat([part.reshape(-1) for part in parts])
        return self._started([self._scattered(output, whole, begin, opts)], [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Reduces a tensor, and gives each rank a part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Reduces tensors, and gives each rank a part of each."""
        pairs = list(zip(outputs, inputs, strict=True))
        for output, whole in pairs:
            _check_fits(whole, self.size() * output.numel(), output.dtype)
        parts = [
            self._scattered(output, whole.reshape(-1).clone(), self.rank() * output.numel(), opts)
            for output, whole in pairs
        ]
        return self._started(parts, list(outputs))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Gives all ranks the root's tensor; several all become the one of them that is named."""
        self._check_root(opts.rootRank)
        check_root_tensor(opts.rootTensor, alike(tensors))
        for x in tensors:
            _check_dense(x)
        x = tensors[opts.rootTensor]
        op = broadcast(self.session, x, opts.rootRank)
        if len(tensors) > 1:
            copy = copying_to([other for other in tensors if other is not x])
            op = op.then(lambda _: copy(x))
        return self._started([op], list(tensors))

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gives all ranks the tensors of all, in a list; several give each list all of them."""
        if len(outputs) != len(alike(inputs)):
            raise BadArgument(f"there are {len(outputs)} lists of outputs for {len(inputs)} inputs")
        if len(inputs) == 1:
            return self._started([self._gathered(outputs[0], inputs[0])], list(outputs[0]))
        for parts in outputs:
            self._check_one_each(parts, len(inputs))
        for part in tree_leaves(outputs):
            _check_fits(part, inputs[0].numel(), inputs[0].dtype)
        # One after the other they are what a list is to have.
        whole = inputs[0].new_empty((self.size() * len(inputs), *inputs[0].shape))
        op = gather_into(self.session, whole, torch.stack(list(inputs)))
        lists = [copying_to(of_place) for of_place in zip(*outputs, strict=True)]

        def copy_out(_: object) -> None:
            for copy, part in zip(lists, whole, strict=True):
                copy(part)

        return self._started([op.then(copy_out)], tree_leaves(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gives all ranks the tensors of all, several of each rank."""
        self._check_one_each(outputs)
        gathered = [
            self._gathered(parts, x)
            for parts, x in zip(zip(*outputs, strict=True), inputs, strict=True)
        ]
        return self._started(gathered, [part for of_rank in outputs for part in of_rank])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Gives all ranks the tensors of all, in one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gives all ranks the tensors of all, several times."""
        pairs = list(zip(outputs, inputs, strict=True))
        for output, x in pairs:
            _check_dense(output)
            _check_fits(output, self.size() * x.numel(), x.dtype)
        return self._started([gather_into(self.session, *pair) for pair in pairs], list(outputs))

    def barrier(self, opts: Any) -> Work:
        """Ends once all ranks have called it, and what this rank has started before has ended."""
        session, nothing = self.session, torch.zeros(1, dtype=torch.int32, device="cpu")
        # Of devices it may say the kind only.
        device = torch.empty(0, device=opts.device or "cpu").device

        def start() -> Ends:
            handle: Ends = session.allreduce(nothing, tag="barrier", async_op=True)
            return handle

        before = [Before(work) for work in list(self._in_flight)]
        if self._staging.takes(device):
            met: Waits = self._staging.stage(device, start, lambda _: None)
        else:
            met = start()
        seconds = opts.timeout.total_seconds()
        return self._started([*before, met], [], seconds if seconds > 0 else None)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        """Gloo's."""
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

    def send(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Gloo's."""
        return _with_future(self._gloo.send(self._of_host(tensors), *args), tensors)

    def recv(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Gloo's."""
        return _with_future(self._gloo.recv(self._of_host(tensors), *args), tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], *args: Any) -> Work:
        """Gloo's."""
        return _with_future(self._gloo.recv_anysource(self._of_host(tensors), *args), tensors)

    def gather(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._through_gloo(self._gloo.gather, outputs, *args)

    def scatter(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._through_gloo(self._gloo.scatter, outputs, *args)

    def alltoall(self, outputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._through_gloo(self._gloo.alltoall, outputs, *args)

    def all_to_all_single(self, output: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._through_gloo(self._gloo.all_to_all_single, output, *args)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limits collectives, if nothing was reduced yet: the limit is the session's."""
        if self._session is None:
            self._timeout = timeout
        else:
            warnings.warn(
                f"racksum: the timeout of {self._name} stays: its ranks have joined", stacklevel=2
            )

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has started, sending and receiving apart."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """They are counted from 0 at all ranks."""

    def shutdown(self) -> None:
        """Leaves the job."""
        if self._session is not None:
            self._session.close()
        self._gloo.shutdown()
        _open.discard(self)

    def abort(self) -> None:
        """Leaves the job: what is in flight fails."""
        self.shutdown()

    def _agreed(self, number: int) -> int:
        """The number of the group's first rank."""
        agreed = torch.tensor([number], device="cpu")
        self._gloo.broadcast(agreed, 0).wait()
        return int(agreed)

    def _started(
        self, parts: Sequence[Waits], result: list[Tensor], seconds: float | None = None
    ) -> Work:
        """A collective in flight, for which later barriers wait."""
        self._sequence += 1
        # Those that have ended are let go, so that nothing piles up where nobody waits.
        for work in list(self._in_flight):
            if not work.has_ended():
                break
        return Work(parts, result, self._in_flight, seconds)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size():
            raise BadArgument(f"the root is a rank from 0 to {self.size() - 1}, and not {root}")

    def _check_one_each(self, parts: Sequence[Any], each: int = 1) -> None:
        if len(parts) != self.size() * each:
            raise BadArgument(
                f"there is one tensor for each of the {self.size()} ranks"
                f"{f' and {each} inputs' if each > 1 else ''}, and not {len(parts)}"
            )

    def _gathered(self, parts: Sequence[Tensor], x: Tensor) -> Ends:
        """Starts gathering the tensors of all ranks in a list."""
        self._check_one_each(parts)
        for part in (x, *parts):
            _check_fits(part, x.numel(), x.dtype)
        whole = x.new_empty((self.size(), *x.shape))

        def copy_out(_: object) -> None:
            for part, of_rank in zip(parts, whole, strict=True):
                part.copy_(of_rank.view_as(part))

        return gather_into(self.session, whole, x).then(writing(copy_out))

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

    def _through_gloo(self, call: Callable[..., Any], outputs: Any, *args: Any) -> Work:
        """A collective of Gloo's, which writes to ``outputs``."""
        return self._started([self._delegated(call, outputs, *args)], tree_leaves(outputs))

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

        return self._staging.stage(device, start, writing(copy_out))

    def _reduced(self, x: Tensor, opts: Any) -> Ends:
        """Starts reducing a tensor in place, whoever can."""
        by = opts.reduceOp.op
        if x.is_sparse and by not in (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM):
            raise BadArgument(f"sparse tensors can be summed and averaged, and not {by.name}")
        if not x.is_sparse:
            _check_dense(x)
        if by == _Op.PREMUL_SUM:
            with torch.inference_mode():
                x.mul_(opts.reduceOp.factor)
            by = _Op.SUM
        if x.is_complex() and by in (_Op.SUM, _Op.AVG):
            x = torch.view_as_real(x)
        if by in _OPERATORS and x.dtype in (*_FLOATS, *_INTEGERS):
            return self._reduced_here(x, _OPERATORS[by])
        if by == _Op.AVG or x.dtype not in (*_FLOATS, *_INTEGERS, *_BYTES):
            raise BadArgument(f"{by.name} is not defined for {x.dtype}")
        delegated = dist.AllreduceOptions()
        delegated.reduceOp = by
        if x.dtype is torch.bool and by in _OF_BOOLEANS:
            x = x.view(torch.uint8)
            delegated.reduceOp = _OF_BOOLEANS[by]
        return self._delegated(self._gloo.allreduce, [x], delegated)

    def _reduced_here(self, x: Tensor, by: str) -> Ends:
        options = self._options
        wire = wire_for(options.wire, x.dtype) if by in ("sum", "avg") else None
        if x.is_sparse:
            return allreduce_sparse(self.session, x, by, wire=wire).then(writing(x.copy_))
        return allreduce(self.session, x, by, wire=wire, block=options.block)

    def _scattered(self, output: Tensor, whole: Tensor, begin: int, opts: Any) -> Ends:
        """Reduces ``whole``, which is of this call alone, and takes this rank's part of it."""
        own = whole[begin : begin + output.numel()]
        take = writing(lambda _: output.copy_(own.view_as(output)))
        return self._reduced(whole, opts).then(take)


#: What torch wraps for TORCH_DISTRIBUTED_DEBUG it does not keep.
_open: set[RacksumBackend] = set()


def register() -> None:
    """Makes the backend known to torch, which calls this where it looks for entry points."""
    dist.Backend.register_backend("racksum", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: object) -> RacksumBackend:
    if options is not None and not isinstance(options, Backend.Options):
        raise BadArgument(
            f"the pg_options of racksum are racksum.torch.Options, and not {type(options).__name__}"
        )
    if isinstance(options, Options):
        return RacksumBackend(group, options)
    if options is not None:
        # Of "cpu:racksum,cuda:nccl" both get the same.
        _log.info("%s has pg_options of %s, which racksum leaves alone", group.group_id, options)
    return RacksumBackend(group, _of_default_group())


def _of_default_group() -> Options:
    """The options of the default group, if it is racksum's: those of groups that are given none."""
    world = dist.group.WORLD
    of_world = (
        backend._options
        for backend in list(_open)
        if world is not None and backend._name == world.group_name
    )
    return next(of_world, Options())


def _with_future(work: dist.Work, tensors: Sequence[Tensor]) -> Work:
    """What Gloo sends or receives, with a future, which Gloo's lacks; no barrier waits for it."""
    return Work([Pending(work)], list(tensors), {})


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise BadArgument(f"one tensor is given at a time, and not {len(tensors)}")
    return tensors[0]


def _check_dense(x: Tensor) -> None:
    if x.layout is not torch.strided or not x.is_contiguous():
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is not dense and contiguous; pass x.contiguous()"
        )
    if x.is_conj() or x.is_neg():
        raise BadArgument(
            f"the tensor of shape {tuple(x.shape)} is a lazy view; pass "
            "x.resolve_conj().resolve_neg()"
        )


def _check_fits(x: Tensor, elements: int, dtype: torch.dtype) -> None:
    if (x.layout, x.numel(), x.dtype) != (torch.strided, elements, dtype):
        raise BadArgument(
            f"a dense tensor of {elements} x {dtype} belongs where one of {x.numel()} x {x.dtype} "
            f"and layout {x.layout} is given"
        )
