"""The DDP communication hook, with which racksum averages each bucket of gradients."""

# DDP compares the annotations of a hook with types, so this module does not postpone annotations.
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from racksum.eager import eager
from racksum.errors import BadArgument, Error, NoAggregator, OpTimeout, SessionClosed, WaitTimeout
from racksum.futures import new_future
from racksum.handle import Handle
from racksum.log import logger
from racksum.session import Session, checked_session
from racksum.torch.compress import (
    BlockRandomK,
    BlockThreshold,
    BlockTopK,
    BlockTopKRatio,
    Compressor,
    Memory,
    ResidualMemory,
    Rounded,
    Whole,
    block_of,
    checked_wire,
    wire_for,
)
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.staging import allreduce
from racksum.torch.work import at_end_of_backward

__all__ = ["HookState", "allreduce_hook"]

_log = logger("racksum.torch")

_FALLBACKS = ("raise", "process_group")

#: Errors that end a session although all its ranks may be alive.
_SESSION_ERRORS = (NoAggregator, OpTimeout, SessionClosed)

#: Seconds by which an op of another rank may overrun its timeout.
_MARGIN = 5.0

#: The first step with final buckets. DDP rebuilds them after its first step, so residuals of the
#: earlier buckets would be useless.
FIRST_STEADY_ITER = 2


#: Attributes of a state that belong to the process, so checkpoints leave them out.
_OF_PROCESS = (
    "session",
    "process_group",
    "fell_back",
    "iteration",
    "_by_group",
    "_places",
    "_steps_of",
)


class HookState:
    """The settings and the residuals of :func:`allreduce_hook`. Each model needs its own state.

    >>> torch.distributed.init_process_group("gloo")
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> state = racksum.torch.HookState(session, wire="bf16")
    >>> model.register_comm_hook(state, racksum.torch.allreduce_hook)

    A state can be pickled into a checkpoint of its rank. After loading, set ``session`` and
    ``process_group`` again. The steps of a loaded state are counted from 0, because a new DDP has
    other buckets at first. The first ``start_iter`` steps are sent whole, and the residuals are
    added to the step after them. If the parameters of a bucket then differ from those of its
    residual, :func:`allreduce_hook` raises :class:`racksum.BadArgument`.

    :param session: The session of the ranks of the model's process group. Pass None only if
        ``session`` is set later.
    :param wire: Type of gradients on the network, as for :meth:`racksum.Session.allreduce`. By
        default their own, or the type that :class:`~racksum.torch.compress.Rounded` rounds to.
        Narrower gradients are sent unchanged, and so are 16-bit gradients if the wire type has 16
        bits.
    :param block: Elements of a block, a power of two from 32 to 1024. Blocks of zeros are not sent.
        By default the compressor's, or 256. It must not differ from the compressor's.
    :param compressor: A compressor that leaves out blocks, starting with step ``start_iter``: one
        of :mod:`racksum.torch.compress`, or any with GRACE's methods. Sparse buckets are always
        sent whole.
    :param error_feedback: Whether to add what a step leaves out to the next step; by default True.
    :param memory: Custom residual memory; the default is ``ResidualMemory``.
    :param start_iter: The first step that is compressed, counted from 0: 2 or later, by default 2.
    :param prioritize: Whether later buckets overtake earlier ones, as far as the session's lanes
        permit; by default False. The first bucket gets the highest lane, and each later one gets
        the next lower lane, down to lane 0. The last bucket always gets lane 0, because the next
        step uses its layers first.
    :param fallback: What to do when the session is over although its ranks may be alive, for
        example because all aggregators are lost. ``"raise"``, the default, raises the error.
        ``"process_group"`` then averages uncompressed gradients over the process group, and adds
        the residual of each bucket once. It costs a copy of each bucket in every step. It also
        costs a small all_reduce per bucket, by which the ranks learn whether all have the result.
    :param process_group: The group to fall back to; by default the default group.
    :raises racksum.BadArgument: An argument is invalid, or two arguments contradict each other.
    """

    def __init__(
        self,
        session: Session | None,
        *,
        wire: str | None = None,
        block: int | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool = True,
        memory: Memory | None = None,
        start_iter: int = FIRST_STEADY_ITER,
        prioritize: bool = False,
        fallback: str = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if fallback not in _FALLBACKS:
            raise BadArgument(f"fallback must be one of {', '.join(_FALLBACKS)}, not {fallback!r}")
        if compressor is not None and start_iter < FIRST_STEADY_ITER:
            raise BadArgument(
                f"start_iter must be {FIRST_STEADY_ITER} or more, not {start_iter}, because DDP "
                "rebuilds its buckets after the first step"
            )
        if memory is not None and not error_feedback:
            raise BadArgument(
                "memory cannot be used with error_feedback=False; leave one of the two out"
            )
        self._begin(None if session is None else checked_session(session), process_group)
        self.wire = checked_wire(wire, compressor)
        self.block = block_of(block, compressor)
        self.compressor = compressor
        self.memory = memory or (ResidualMemory() if compressor and error_feedback else None)
        self.start_iter = start_iter
        self.prioritize = prioritize
        self.fallback = fallback
        self._bytes_before = 0
        self._bytes_after = 0
        # For each bucket with a residual, the places and shapes of its parameters.
        self._layouts: dict[str, list[tuple[int | None, tuple[int, ...]]]] = {}
        _log.info(
            "hook: wire=%s block=%d compressor=%s memory=%s start_iter=%d fallback=%s, %r",
            self.wire,
            self.block,
            type(compressor).__name__,
            type(self.memory).__name__,
            start_iter,
            fallback,
            session,
        )

    def _begin(
        self, session: Session | None = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Sets the attributes that belong to this process."""
        self.session = session
        self.process_group = process_group
        #: Whether the hook has fallen back to the process group.
        self.fell_back = False
        #: The number of steps that this process has done.
        self.iteration = 0
        # Whether the process group averages the gradients of the current step.
        self._by_group = False
        # The place of each parameter in the order of the first step, which is the model's order.
        self._places: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        # The number of steps of each parameter, used only with DDP's Python reducer.
        self._steps_of: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns this rank's compression ratio so far, and the bytes before and after compression.

        The ratio is the bytes before divided by the bytes after, or 0.0 before the first compressed
        step.

        >>> torch.distributed.init_process_group("gloo")
        >>> net = torch.nn.Linear(64, 1, bias=False)
        >>> model = torch.nn.parallel.DistributedDataParallel(net)
        >>> state = racksum.torch.HookState(session, compressor=BlockTopK(1, block=32))
        >>> model.register_comm_hook(state, racksum.torch.allreduce_hook)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 64)).sum().backward()
        >>> state.compression_stats()  # The third step sends one block of two.
        (2.0, 256, 128)
        """
        before, after = self._bytes_before, self._bytes_after
        return (before / after if after else 0.0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        return {name: kept for name, kept in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(kept)


# In checkpoints these classes hold only numbers, strings and tensors. So `torch.load` may load them
# with `weights_only=True`, its default.
torch.serialization.add_safe_globals(
    [
        HookState,
        ResidualMemory,
        BlockRandomK,
        BlockThreshold,
        BlockTopK,
        BlockTopKRatio,
        Rounded,
    ]
)


@eager
def allreduce_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    *shards: torch.Tensor,
) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks of the session; a DDP communication hook.

    >>> torch.distributed.init_process_group("gloo")
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> model.register_comm_hook(racksum.torch.HookState(session), racksum.torch.allreduce_hook)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.module.bias.grad.tolist()
    [1.0, 1.0]

    Errors of the ops are raised at the end of backward, with their types.

    :param state: The settings and residuals of the model.
    :param bucket: A bucket of DDP, dense or sparse, on the host or on a GPU.
    :return: A future of the averaged gradients.
    :raises racksum.BadArgument: ``state`` is not a :class:`HookState` with a session, or the caller
        is not DDP.
    """
    if not isinstance(state, HookState):
        raise BadArgument(
            "the state of allreduce_hook must be racksum.torch.HookState(session), not a "
            f"{type(state).__name__}"
        )
    if shards or isinstance(bucket, torch.Tensor):
        # FSDP1 passes a tensor of gradients and, if it shards them, a tensor for the result too.
        raise BadArgument(
            "allreduce_hook is for DDP, but FullyShardedDataParallel called it; shard with "
            "fully_shard and use racksum.torch.set_all_reduce_hook, or give FSDP a process_group "
            "of the racksum backend"
        )
    if isinstance(bucket, tuple):
        return _average_one(state, *bucket)
    future: Future[torch.Tensor] = new_future([bucket.buffer().device])
    if bucket.index() == 0:
        # Under ``Join``, a rank without data learns a bucket's result before it starts the next
        # bucket, and other ranks learn it after they have started all buckets. So ranks may fall
        # back only between steps.
        state._by_group = state.fell_back
    average = _started(state, _Part.of(state, bucket, state.iteration))
    if bucket.is_last():
        state.iteration += 1

    def finish() -> None:
        future.set_result(average())

    if not at_end_of_backward(finish):
        finish()
    return future


def _average_one(
    state: HookState, gradient: torch.Tensor, parameter: torch.Tensor
) -> Future[torch.Tensor]:
    """Averages one parameter's gradient in place. DDP's Python reducer has no buckets."""
    place = state._places.setdefault(parameter, len(state._places))
    iteration = state._steps_of.get(parameter, 0)
    state._steps_of[parameter] = iteration + 1
    # Ranks agree on each parameter's result before the next one, so all fall back together.
    state._by_group = state.fell_back
    one = _One(place, gradient if gradient.is_sparse else gradient.flatten(), parameter)
    average = _started(state, _Part.of(state, one, iteration))()
    if not gradient.is_sparse:
        average = average.view_as(gradient)
    with torch.no_grad():
        gradient.copy_(average)
    future = new_future([gradient.device])
    future.set_result(gradient)
    return future


class _One(NamedTuple):
    """The gradient of one parameter, as a bucket of its own."""

    place: int
    gradient: torch.Tensor
    parameter: torch.Tensor

    def index(self) -> int:  # type: ignore[override]
        """Returns the parameter's place among all parameters."""
        return self.place

    def buffer(self) -> torch.Tensor:
        """Returns the gradient, which is flat if it is dense."""
        return self.gradient

    def parameters(self) -> list[torch.Tensor]:
        """Returns the one parameter."""
        return [self.parameter]

    def is_last(self) -> bool:
        """Returns true, which selects lane 0.

        Each gradient is waited for, so none overtakes another.
        """
        return True


class _Part(NamedTuple):
    """A bucket of gradients in one step."""

    state: HookState
    name: str
    #: The gradients, with the residual of earlier steps.
    gradients: torch.Tensor
    compressor: Compressor | None
    memory: Memory | None
    lane: int

    @classmethod
    def of(cls, state: HookState, bucket: Any, iteration: int) -> "_Part":
        name, gradients = f"bucket {bucket.index()}", bucket.buffer()
        is_compressed = iteration >= state.start_iter and not gradients.is_sparse
        compressor = state.compressor if is_compressed else None
        memory = state.memory if compressor is not None else None
        if state.memory is not None:
            _note_places(state, bucket)
        if memory is not None:
            with _reporting_refusals(state):
                _check_layout(state, bucket, name)
                gradients = memory.compensate(gradients, name)
        return cls(state, name, gradients, compressor, memory, _lane(state, bucket))

    def start(self, session: Session) -> Handle[torch.Tensor]:
        """Starts averaging the bucket, without the parts that the compressor leaves out."""
        state, gradients = self.state, self.gradients
        wire = wire_for(state.wire, gradients.dtype)
        if gradients.is_sparse:
            return allreduce_sparse(session, gradients, "avg", wire=wire, lane=self.lane)
        if self.compressor is not None:
            with session.reporting_refusals():
                gradients = self._compressed(self.compressor)
            if isinstance(self.compressor, Rounded):
                wire = wire_for(self.compressor.wire, gradients.dtype)
        return allreduce(session, gradients, "avg", wire=wire, block=state.block, lane=self.lane)

    def _compressed(self, compressor: Compressor) -> torch.Tensor:
        tensors, ctx = compressor.compress(self.gradients, self.name)
        if self.memory is not None:
            self.memory.update(self.gradients, self.name, compressor, tensors, ctx)
        self.state._bytes_before += self.gradients.nbytes
        self.state._bytes_after += sum(tensor.nbytes for tensor in tensors)
        return compressor.decompress(tensors, ctx)

    def averaged_by_group(self) -> torch.Tensor:
        """Averages the whole bucket over the process group."""
        if self.memory is not None:
            # Clear the residual with zeros: inf - inf would leave NaN in it.
            nothing = torch.zeros_like(self.gradients)
            self.memory.update(nothing, self.name, Whole(), [nothing], None)
        group = self.state.process_group
        gradients = self.gradients / dist.get_world_size(group)
        dist.all_reduce(gradients, group=group)
        return gradients


def _reporting_refusals(state: HookState) -> AbstractContextManager[object]:
    """Tells the other ranks if the block raises, unless they average over the process group."""
    if state.session is None or state._by_group:
        return nullcontext()
    return state.session.reporting_refusals()


def _started(state: HookState, part: _Part) -> Callable[[], torch.Tensor]:
    """Starts averaging a bucket, and returns a function that waits for the average."""
    if state._by_group:
        return part.averaged_by_group
    if state.session is None:
        raise BadArgument("the state has no session; set state.session after loading a checkpoint")
    if state.fallback == "raise":
        return part.start(state.session).wait
    # A failed op leaves sums in some places of the tensor, so keep a copy of the gradients.
    kept = part._replace(gradients=part.gradients.clone())
    failed: Error | None = None
    try:
        handle = part.start(state.session)
    except _SESSION_ERRORS as error:
        failed = error

    def finish() -> torch.Tensor:
        nonlocal failed
        try:
            result: torch.Tensor = kept.gradients if failed else handle.wait()
        except _SESSION_ERRORS as error:
            failed = error
        try:
            have = _all_have(state, failed is None, kept.gradients.device)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, Error) and not isinstance(error, WaitTimeout):
                # The process group is on the racksum backend, whose error says enough.
                raise failed or error from None
            unknown = Error(f"cannot find out whether all ranks averaged {part.name}: {error}")
            raise failed or unknown from error
        if have:
            return result
        if not state.fell_back:
            _log.warning(
                "falling back: from now on the process group averages uncompressed gradients: %s",
                failed or "the session of another rank is over",
            )
        state.fell_back = True
        return kept.averaged_by_group()

    return finish


def _all_have(state: HookState, own: bool, device: torch.device) -> bool:
    """Returns whether all ranks have a result. They find this out over the process group.

    A rank that failed for another reason does not take part. The others wait for it as long as for
    an op.

    :param device: The bucket's device. The group may support only this type of device.
    """
    have = torch.tensor([int(own)], dtype=torch.int32, device=device)
    agreement = dist.all_reduce(have, dist.ReduceOp.MIN, group=state.process_group, async_op=True)
    seconds = state.session.options.timeout if state.session is not None else 0.0
    agreement.wait(timedelta(seconds=seconds + _MARGIN))
    return bool(have)


def _lane(state: HookState, bucket: Any) -> int:
    if not state.prioritize or state.session is None or bucket.is_last():
        return 0
    lane: int = state.session.lanes - 1 - bucket.index()
    return max(lane, 0)


def _note_places(state: HookState, bucket: Any) -> None:
    """Numbers the parameters in the first step. In later steps DDP orders them by readiness."""
    if state.iteration == 0:
        for parameter in bucket.parameters():
            state._places.setdefault(parameter, len(state._places))


def _check_layout(state: HookState, bucket: Any, name: str) -> None:
    """Raises :class:`BadArgument` if a bucket's residual belongs to other parameters."""
    layout = [(state._places.get(p), tuple(p.shape)) for p in bucket.parameters()]
    before = state._layouts.setdefault(name, layout)
    if layout != before:
        elements = sum(torch.Size(shape).numel() for _, shape in before)
        raise BadArgument(
            f"{name} has {bucket.buffer().numel()} elements, but its residual has {elements}, "
            "which belong to other parameters; use a new HookState or memory for each model"
        )
