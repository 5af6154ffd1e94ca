"""The ``racksum`` c10d backend: ``init_process_group("racksum")``, or ``"cpu:racksum,cuda:nccl"``.

racksum does reductions and the collectives that can be written as sums
(:mod:`racksum.torch.gathering`). Gloo handles sends, the other collectives, and the operators and
element types that racksum lacks. GPU tensors reach the collectives of both through host memory
(:mod:`racksum.torch.staging`).
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, ProcessGroupGloo
from torch.utils._pytree import tree_leaves

from racksum.eager import eager_methods
from racksum.errors import BadArgument
from racksum.log import logger
from racksum.torch.call_order import Call, Chain, numbered
from racksum.torch.compress import wire_for
from racksum.torch.delegates import DelegatesToGloo
from racksum.torch.departures import Departures, of_this_life
from racksum.torch.extents import OnMemory, extents_of, share_memory
from racksum.torch.gathering import broadcast, gather_into
from racksum.torch.groups import store_of_all
from racksum.torch.membership import Membership
from racksum.torch.options import Options
from racksum.torch.profiled import calling
from racksum.torch.reducible import (
    OF_BOOLEANS,
    OPERATORS,
    check_dense,
    check_fits,
    check_operator,
    check_output,
    check_reducible,
    is_ours,
)
from racksum.torch.several import alike, check_root_tensor, combined, copying_to
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.staging import Staging, allreduce
from racksum.torch.work import Work, copying, count_writes, write, writing_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from racksum.handle import Handle
    from racksum.session import Session
    from racksum.torch.work import Wait

__all__ = ["register"]

_Op: Any = dist.ReduceOp.RedOpType

_log = logger("racksum.torch")


@eager_methods
class RacksumBackend(DelegatesToGloo):
    """A rank of a process group. The first collective that racksum itself does joins the job."""

    supports_splitting = True
    # Without these attributes, torch 2.15 recurses forever.
    supports_coalescing = supports_shrinking = False
    supports_abort_hooks = supports_completion_hooks = False
    supports_reconfigure = supports_window = _supports_time_estimate = False

    def __init__(self, group: Any, options: Options) -> None:
        super().__init__(group.group_rank, group.group_size)
        self._options = options.of_group(group)
        self._name = group.group_id
        self._staging = Staging()
        self._chain = Chain()
        self._in_flight: dict[Work, None] = {}
        self._on_memory = OnMemory(self._in_flight)
        self._calling = threading.Lock()
        self._sequence = 0
        departures = Departures(store_of_all(group.store), self._name, self.rank(), self.size())
        store = of_this_life(group.store, "gloo")
        self._gloo: Any = ProcessGroupGloo(store, self.rank(), self.size(), group.timeout)
        self._membership = Membership(
            group,
            self._options,
            self._gloo,
            self._chain,
            self._staging,
            departures=departures,
        )
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name.
        """Returns ``racksum``."""
        return "racksum"

    @property
    def options(self) -> Options:
        """The options of the group."""
        return self._options

    @property
    def session(self) -> Session:
        """The session of this rank. The first op that needs it joins the job."""
        return self._membership.session

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> RacksumBackend:
        """Creates a group of some of the ranks, for ``split_group``."""
        if self.rank() not in ranks:
            # If this returned no backend, torch 2.15 would dereference a null pointer.
            raise BadArgument(
                f"rank {self.rank()} is in none of the groups that split_group makes; list every "
                "rank in split_ranks, or use torch.distributed.new_group"
            )
        group = SimpleNamespace(
            # A rank that waits at a store blocks its connection, so open another for the group.
            store=store.clone(),
            group_rank=ranks.index(self.rank()),
            group_size=len(ranks),
            timeout=opts._timeout,
            group_id=opts.group_name,
            global_ranks_in_group=opts.global_ranks_in_group,
        )
        # Without pg_options, torch passes this group's options without the Python attributes.
        return RacksumBackend(group, opts if isinstance(opts, Options) else self._options)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. torch calls this at ranks that are in none of the new groups."""

    @numbered("all_reduce")
    def allreduce(self, call: Call, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor in place. Several tensors are combined first, and all get the result."""
        for x in alike(tensors):
            check_reducible(x, opts)

        def begin() -> list[Handle[Any]]:
            if len(tensors) == 1:
                return [self._reduced(call, tensors[0], opts)]
            whole = combined(tensors, opts.reduceOp.op)
            # Autograd does not count Gloo's writes to dense tensors, so bypass its counter here.
            copy = copying_to([x if x.is_sparse else x.data for x in tensors])
            return [self._reduced(call, whole, opts).then(lambda _: copy(whole))]

        work = self._run(call, tensors, begin, list(tensors))
        # For an average, Gloo divides only the first tensor, so autograd counts one write.
        _count_division(tensors[0], opts)
        return work

    allreduce_sparse = allreduce

    @numbered("all_reduce_coalesced", ops=lambda tensors, _: len(tensors))
    def allreduce_coalesced(self, call: Call, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces tensors in place, each with the other ranks' tensors at the same position."""
        for x in tensors:
            check_reducible(x, opts)

        def begin() -> list[Handle[Any]]:
            if not share_memory(tensors):
                return [self._reduced(call, x, opts) for x in tensors]
            # As with Gloo, reduce the values that the tensors have now, and write results in order.
            copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
            self.session.note_copied(2 * sum(copy.nbytes for copy in copies))
            return [
                self._reduced(call, copy, opts).then(copying(copy, x))
                for x, copy in zip(tensors, copies, strict=True)
            ]

        work = self._run(call, tensors, begin, list(tensors))
        count_writes(tensors)
        return work

    @numbered("reduce")
    def reduce(self, call: Call, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduces a tensor in place at the root. Other ranks keep their tensors."""
        x = _only(tensors)
        self._check_root(opts.rootRank)
        check_root_tensor(opts.rootTensor, tensors)
        check_reducible(x, opts)
        call.root = opts.rootRank

        def begin() -> list[Handle[Any]]:
            own = x if self.rank() == opts.rootRank else x.clone()
            return [self._reduced(call, own, opts)]

        work = self._run(call, [x], begin, [x])
        _count_division(x, opts)
        return work

    @numbered("reduce_scatter")
    def reduce_scatter(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduces each tensor of a list, and gives each rank the result at its position."""
        output, parts = _only(outputs), _only(inputs)
        self._check_one_each(parts)
        check_output(output, parts[self.rank()].numel(), output.dtype)
        for part in parts:
            check_fits(part, part.numel(), output.dtype)
            check_operator(part, opts)
        first = sum(part.numel() for part in parts[: self.rank()])

        def begin() -> list[Handle[Any]]:
            whole = torch.cat([part.reshape(-1) for part in parts])
            return [self._scattered(call, output, whole, first, opts)]

        work = self._run(call, [output, *parts], begin, [output])
        _count_division(output, opts)
        return work

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Reduces a tensor and gives each rank its part."""
        work: Work = self.reduce_scatter_single_coalesced([output], [input], opts)
        return work

    @numbered("reduce_scatter", ops=lambda outputs, *_: len(outputs))
    def reduce_scatter_single_coalesced(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Reduces several tensors and gives each rank its part of each."""
        pairs = list(zip(outputs, inputs, strict=True))
        for output, whole in pairs:
            check_dense(output)
            check_fits(whole, self.size() * output.numel(), output.dtype)
            check_operator(whole, opts)

        def begin() -> list[Handle[Any]]:
            own = self.rank()
            return [
                self._scattered(call, output, whole.reshape(-1).clone(), own * output.numel(), opts)
                for output, whole in pairs
            ]

        return self._run(call, [*outputs, *inputs], begin, list(outputs))

    @numbered("broadcast")
    def broadcast(self, call: Call, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Copies the root's ``rootTensor`` to all tensors of the call at all ranks."""
        self._check_root(opts.rootRank)
        check_root_tensor(opts.rootTensor, alike(tensors))
        for x in tensors:
            check_dense(x)
        call.root = opts.rootRank
        named = tensors[opts.rootTensor]
        others = [x for x in tensors if x is not named]

        def begin() -> list[Handle[Any]]:
            op = self._in_one_piece(named, lambda it: broadcast(self.session, it, call.part()))
            copy = copying_to(others)
            return [op.then(lambda _: copy(named)) if others else op]

        return self._run(call, tensors, begin, list(tensors))

    @numbered("all_gather")
    def allgather(
        self,
        call: Call,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        """Gathers the tensors of all ranks into each of the lists."""
        if len(outputs) != len(alike(inputs)):
            raise BadArgument(
                f"got {len(outputs)} lists of outputs for {len(inputs)} inputs; pass one list for "
                "each input"
            )
        self._check_gathered(outputs, inputs)
        result = tree_leaves(outputs)
        begin = lambda: [self._gathered(call, outputs, inputs)]  # noqa: E731
        return self._run(call, [*inputs, *result], begin, result)

    @numbered("all_gather", ops=lambda _, inputs, *__: len(inputs))
    def allgather_coalesced(
        self,
        call: Call,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        """Gathers several tensors of each rank into lists, one list for each rank."""
        self._check_one_each(outputs)
        gathered = list(zip(zip(*outputs, strict=True), inputs, strict=True))
        for parts, x in gathered:
            self._check_gathered([parts], [x])
        result = [part for of_rank in outputs for part in of_rank]
        begin = lambda: [self._gathered(call, [parts], [x]) for parts, x in gathered]  # noqa: E731
        return self._run(call, [*inputs, *result], begin, result)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002
        """Gathers the tensors of all ranks into one tensor."""
        work: Work = self.all_gather_single_coalesced([output], [input], opts)
        return work

    @numbered("all_gather", ops=lambda outputs, *_: len(outputs))
    def all_gather_single_coalesced(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gathers several tensors of all ranks, each into one tensor."""
        pairs = list(zip(outputs, inputs, strict=True))
        for output, x in pairs:
            check_output(output, self.size() * x.numel(), x.dtype)

        def begin() -> list[Handle[Any]]:
            return [self._gathered_into(call, *pair) for pair in pairs]

        work = self._run(call, [*outputs, *inputs], begin, list(outputs))
        # Gloo writes each rank's part separately, so autograd counts one write per rank.
        count_writes([output for output in outputs for _ in range(self.size())])
        return work

    @numbered("barrier")
    def barrier(self, call: Call, opts: Any) -> Work:
        """Starts a barrier. It ends once all ranks have called it and earlier works have ended."""
        nothing = torch.zeros(1, dtype=torch.int32, device="cpu")
        # `opts.device` may lack the index of a GPU; the device of a tensor has it.
        marker = torch.empty(0, device=opts.device or "cpu")
        device = marker.device

        def begin() -> list[Handle[Any]]:
            # Joining waits for staged ops, so join before this op is staged.
            session, part_of = self.session, call.part()

            def start() -> Handle[Any]:
                return session.allreduce(nothing, part_of=part_of, async_op=True)

            if not self._staging.takes(device):
                return [start()]
            reporting = partial(session.reporting_refusals, part_of)
            return [self._staging.stage(device, start, lambda _: None, reporting)]

        seconds = opts.timeout.total_seconds()
        limit = seconds if seconds > 0 else None
        return self._run(call, [marker], begin, [], limit, after=list(self._in_flight))

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of collectives. Once the rank has joined, this only warns."""
        self._membership.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        """Returns the number of collectives that this rank has started. Sends do not count."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: all ranks count from 0."""

    def shutdown(self) -> None:
        """Waits for the rank's collectives, and leaves the job.

        In the default group, also waits briefly for the other ranks to leave.
        """
        self._membership.check_process()
        for work in list(self._in_flight):
            # Ignore the error: a caller that waits for the work gets it.
            with suppress(Exception):
                work.wait_for(None)
        self._leave()
        world = dist.group.WORLD
        if world is not None and world.group_name == self._name:
            self._membership.meet()
        self._gloo.shutdown()

    def abort(self) -> None:
        """Leaves the job immediately. Collectives in flight fail."""
        self._leave()
        self._gloo.shutdown()

    def _leave(self) -> None:
        self._membership.leave()
        _open.discard(self)

    def _new_call(self, collective: str, ops: int) -> Call:
        self._membership.check_process()
        self._sequence += 1
        return Call(collective, self._sequence, ops)

    def _catch_up(self) -> None:
        """Ensures that notices of interrupted calls precede the calls that the chain gets next."""
        session = self._membership._session
        if session is not None:
            session.catch_up()

    def _refuse(self, call: Call) -> None:
        """Tells the other ranks, in the call's turn, which of its ops this rank does not begin."""
        parts = call.rest()
        if not parts:
            return

        def refuse() -> Sequence[Wait]:
            interrupted: BaseException | None = None
            for part_of in parts:
                try:
                    self._membership.refuse(part_of)
                except BaseException as error:
                    # The session now owes a notice of this part. The notices of later parts follow.
                    interrupted = error
            if interrupted is not None:
                raise interrupted
            return []

        if self._would_wait(len(parts)):
            self._chain.defer([], refuse, [])
        else:
            refuse()

    def _run(
        self,
        call: Call,
        touched: Sequence[Tensor],
        begin: Callable[[], Sequence[Handle[Any]]],
        result: list[Tensor],
        seconds: float | None = None,
        *,
        joins: bool = True,
        after: Sequence[Work] = (),
    ) -> Work:
        """Starts a collective and returns its work, for which later barriers wait.

        :param touched: The tensors that the collective reads or writes. The collective begins once
            earlier ones on the same memory have ended.
        :param joins: Whether the collective needs the session. The first such collective joins the
            job on another thread, because other ranks may first have to finish a collective of
            another group. A later one begins on that thread if there is no room for its ops.
        :param after: Earlier works that a wait for this collective also waits for.
        """
        self._drop_ended_works()
        extents = extents_of(touched)
        earlier = self._on_memory.works(extents)
        # Gloo records profiler events of its own.
        shown = call.collective if joins else None

        def begin_all() -> list[Wait]:
            return [*(work.wait_for for work in after), *(op.wait for op in begin())]

        with calling(shown):
            if earlier or self._must_defer(call, touched, joins=joins):
                refuse = partial(self._refuse, call)
                waits: list[Wait] = [self._chain.defer(earlier, begin_all, touched, refuse).wait]
            else:
                waits = begin_all()
        work = Work(waits, result, self._in_flight, seconds, shown=shown)
        self._on_memory.add(work, extents)
        return work

    def _drop_ended_works(self) -> None:
        """Drops ended works up to the oldest in flight, because callers may never wait for them."""
        for work in list(self._in_flight):
            if not work.has_ended():
                break

    def _must_defer(self, call: Call, touched: Sequence[Tensor], *, joins: bool) -> bool:
        """Returns whether the ops of a call would block the caller if they began on its thread."""
        if joins and not self._membership.has_joined:
            return True
        # Ops on GPU tensors begin on another thread.
        on_host = not any(self._staging.takes(x.device) for x in touched)
        return self._would_wait(call.left, on_host=on_host)

    def _would_wait(self, ops: int, *, on_host: bool = True) -> bool:
        """Returns whether beginning this many ops would make the caller wait."""
        if self._chain.is_current():
            return False
        if self._chain.is_behind():
            return True
        return on_host and (self._staging.is_behind() or not self._membership.would_begin(ops))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size():
            raise BadArgument(f"the root must be a rank from 0 to {self.size() - 1}, not {root}")

    def _check_one_each(self, parts: Sequence[Any], each: int = 1) -> None:
        if len(parts) != self.size() * each:
            raise BadArgument(
                f"a list must hold one tensor for each of the {self.size()} ranks"
                f"{f' and each of the {each} inputs' if each > 1 else ''}, not {len(parts)}"
            )

    def _check_gathered(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        x = inputs[0]
        for parts in outputs:
            self._check_one_each(parts, len(inputs))
        check_fits(x, x.numel(), x.dtype)
        for part in tree_leaves(outputs):
            check_output(part, x.numel(), x.dtype)

    def _gathered(
        self, call: Call, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Handle[Any]:
        """Starts gathering the tensors of all ranks into lists."""
        # `whole` holds the tensors of a list, one after another.
        whole = inputs[0].new_empty((self.size() * len(inputs), *inputs[0].shape))
        own = inputs[0] if len(inputs) == 1 else torch.stack(list(inputs))
        copies = [copying_to(of_place) for of_place in zip(*outputs, strict=True)]

        def copy_out(_: object) -> None:
            for copy, part in zip(copies, whole, strict=True):
                copy(part)

        return gather_into(self.session, whole, own, call.part()).then(copy_out)

    def _gathered_into(self, call: Call, output: Tensor, x: Tensor) -> Handle[Any]:
        """Starts gathering the tensors of all ranks into one tensor."""
        gather = lambda it: gather_into(self.session, it, x, call.part())  # noqa: E731
        return self._in_one_piece(output, gather)

    def _in_one_piece(self, x: Tensor, start: Callable[[Tensor], Handle[Any]]) -> Handle[Any]:
        """Starts an op on a tensor, or on a contiguous copy of it, which is then copied back."""
        if x.is_contiguous():
            return start(x)
        copy = x.detach().contiguous()
        self.session.note_copied(2 * copy.nbytes)
        return start(copy).then(copying(copy, x))

    def _reduced(self, call: Call, x: Tensor, opts: Any) -> Handle[Any]:
        """Starts reducing a tensor in place, by racksum or by Gloo."""
        if x.is_sparse:
            return self._reduced_here(call, x, opts)
        return self._in_one_piece(x, lambda it: self._reduced_here(call, it, opts))

    def _reduced_here(self, call: Call, x: Tensor, opts: Any) -> Handle[Any]:
        by, options = opts.reduceOp.op, self._options
        if by == _Op.PREMUL_SUM:
            with writing_to(x):
                x.mul_(opts.reduceOp.factor)
            by = _Op.SUM
        if x.is_complex() and by in (_Op.SUM, _Op.AVG):
            x = torch.view_as_real(x)
        if not is_ours(x, by):
            # Gloo does this op and the session does not, so count it as begun.
            call.part()
            return self._reduced_by_gloo(x, by)
        wire = wire_for(options.wire, x.dtype) if by in (_Op.SUM, _Op.AVG) else None
        # Join before taking the part, so that `_refuse` still finds the part if joining fails.
        session = self.session
        named: dict[str, Any] = {"wire": wire, "part_of": call.part()}
        if x.is_sparse:
            reduced = allreduce_sparse(session, x, OPERATORS[by], **named)
            return reduced.then(lambda sums: write(x, sums))
        return allreduce(session, x, OPERATORS[by], block=options.block, **named)

    def _reduced_by_gloo(self, x: Tensor, by: Any) -> Handle[Any]:
        delegated = dist.AllreduceOptions()
        delegated.reduceOp = by
        if x.dtype is torch.bool and by in OF_BOOLEANS:
            x = x.view(torch.uint8)
            delegated.reduceOp = OF_BOOLEANS[by]
        return self._delegated(self._gloo.allreduce, [x], delegated)

    def _scattered(
        self, call: Call, output: Tensor, whole: Tensor, begin: int, opts: Any
    ) -> Handle[Any]:
        """Reduces ``whole``, which the call owns, and writes this rank's part to ``output``."""
        own = whole[begin : begin + output.numel()]
        return self._reduced(call, whole, opts).then(lambda _: write(output, own.view_as(output)))


#: The open backends. This set keeps them alive, because torch does not if TORCH_DISTRIBUTED_DEBUG
#: makes it wrap them.
_open: set[RacksumBackend] = set()


def register() -> None:
    """Registers the backend with torch, which calls this as an entry point of the package."""
    dist.Backend.register_backend("racksum", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: object) -> RacksumBackend:
    if options is not None and not isinstance(options, Backend.Options):
        raise BadArgument(f"pg_options must be racksum.torch.Options, not {type(options).__name__}")
    if isinstance(options, Options):
        return RacksumBackend(group, options)
    if options is not None:
        # Both backends of "cpu:racksum,cuda:nccl" get the same options.
        _log.info("%s: racksum ignores pg_options of other backends: %s", group.group_id, options)
    return RacksumBackend(group, _of_default_group())


def _of_default_group() -> Options:
    """Returns the options of a group without any: those of the default group if it uses racksum."""
    world = dist.group.WORLD
    of_world = (
        backend._options
        for backend in list(_open)
        if world is not None and backend._name == world.group_name
    )
    return next(of_world, Options())


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise BadArgument(f"pass one tensor at a time, not {len(tensors)}")
    return tensors[0]


def _count_division(x: Tensor, opts: Any) -> None:
    """Counts a write to an averaged tensor, because Gloo divides it with an operator of torch."""
    if opts.reduceOp.op == _Op.AVG and not x.is_sparse:
        count_writes([x])
