"""The DDP communication hook: each bucket of gradients is averaged by racksum."""

# DDP looks at the annotations of a hook themselves, so that they are not put off here.
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
from racksum.torch.work import Ends, at_end_of_backward

__all__ = ["HookState", "allreduce_hook"]

_log = logger("racksum.torch")

_FALLBACKS = ("raise", "process_group")

#: What a session ends with whose ranks may all be there.
_GONE = (NoAggregator, OpTimeout, SessionClosed)

#: Seconds by which an op of another rank may end later than it is to.
_MARGIN = 5.0

#: DDP rebuilds its buckets after the first step, so that what is known of one is of no use before.
FIRST_STEADY_ITER = 2


#: What a state has of its process, and a checkpoint does not.
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
    """Settings and memory of :func:`allreduce_hook`. Each model has its own.

    A checkpoint of a rank has its state, pickled. Then ``session`` and ``process_group`` are to be
    given to it anew, and its steps count from 0: a new DDP has buckets of another order at first.
    So the first ``start_iter`` steps are sent whole, and what was left out before is added to those
    after them. A bucket that is not of the same parameters by then, in the order of the first
    step, is refused.

    :param session: The session whose ranks are those of the model's process group.
    :param wire: How gradients travel, if not unchanged: see :meth:`racksum.Session.allreduce`. What
        :class:`~racksum.torch.compress.Rounded` has rounded travels as that. Gradients that are as
        narrow already travel as they are.
    :param block: Elements of a block: blocks of zeros are not sent. By default the compressor's;
        others than those are refused.
    :param compressor: What leaves blocks out, from ``start_iter`` on: one of
        :mod:`racksum.torch.compress`, or any with GRACE's verbs. Sparse buckets are sent whole.
    :param error_feedback: Whether what is left out of a step is added to the next.
    :param memory: What does so, if not :class:`ResidualMemory`.
    :param start_iter: The first step that is compressed, 2 or later.
    :param prioritize: Whether a bucket goes before those that are ready earlier, as far as the
        session has lanes: the first in the highest, each later one in the next lower, and the last,
        which is of the layers that the next step begins with, in lane 0 with those that no lane
        is left for.
    :param fallback: What becomes of a step whose aggregators are all gone: ``"raise"``, or
        ``"process_group"``, by which gradients are averaged from then on, uncompressed; what was
        left out of each bucket before is added to the first of it that goes so. That takes a copy
        of each bucket, and a small all_reduce after it, in which ranks agree that all have its
        result.
    :param process_group: The one to fall back to; by default the default group.
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
            raise BadArgument(f"fallback is one of {', '.join(_FALLBACKS)}, and not {fallback!r}")
        if compressor is not None and start_iter < FIRST_STEADY_ITER:
            raise BadArgument(
                f"start_iter is {FIRST_STEADY_ITER} or more, and not {start_iter}: DDP rebuilds "
                "its buckets after the first step"
            )
        if memory is not None and not error_feedback:
            raise BadArgument("a memory is given, and error_feedback=False says to have none")
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
        # Of each bucket something was left out of, the places and shapes of its parameters.
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
        """Begins with what is of this process."""
        self.session = session
        self.process_group = process_group
        #: Whether the process group averages by now.
        self.fell_back = False
        #: Steps in this process.
        self.iteration = 0
        # Whether it averages in this step.
        self._by_group = False
        # Each parameter's place in the first step, whose order is that of the model.
        self._places: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        # Steps of each parameter that DDP's Python reducer has handed.
        self._steps_of: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()

    def compression_stats(self) -> tuple[float, int, int]:
        """Bytes before and after the compressor, of this rank so far, and their ratio."""
        before, after = self._bytes_before, self._bytes_after
        return (before / after if after else 0.0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        return {name: kept for name, kept in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(kept)


# What checkpoints hold of these are numbers, texts and tensors, so that `torch.load` may make them
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
    """Averages a bucket of gradients over the ranks of the session, be it of a GPU or not."""
    if not isinstance(state, HookState):
        raise BadArgument(
            "the state of allreduce_hook must be racksum.torch.HookState(session), and not a "
            f"{type(state).__name__}"
        )
    if shards or isinstance(bucket, torch.Tensor):
        # FSDP1 hands gradients, and for shards where to put them.
        raise BadArgument(
            "allreduce_hook is for DDP, and FullyShardedDataParallel has called it: shard by "
            "fully_shard and use racksum.torch.set_all_reduce_hook, or give FSDP a process_group "
            "of the backend racksum"
        )
    if isinstance(bucket, tuple):
        return _average_one(state, *bucket)
    future: Future[torch.Tensor] = new_future([bucket.buffer().device])
    if bucket.index() == 0:
        # A rank that has joined others (``Join``) hears of the end of a bucket before the next one
        # is started, and others after all of them: ranks must not part within a step.
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
    """Averages the gradient of one parameter in place: DDP's Python reducer makes no buckets."""
    place = state._places.setdefault(parameter, len(state._places))
    iteration = state._steps_of.get(parameter, 0)
    state._steps_of[parameter] = iteration + 1
    # Ranks agree on each parameter's sum before they go on, so they fall back at the same one.
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
        """Its place among the parameters."""
        return self.place

    def buffer(self) -> torch.Tensor:
        """The gradient, flat if it is dense."""
        return self.gradient

    def parameters(self) -> list[torch.Tensor]:
        """The parameter alone."""
        return [self.parameter]

    def is_last(self) -> bool:
        """True: nothing goes before it, as each is waited for."""
        return True


class _Part(NamedTuple):
    """A bucket in a step."""

    state: HookState
    name: str
    #: With what was left out of it before.
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
            with _telling_refusals(state):
                _check_layout(state, bucket, name)
                gradients = memory.compensate(gradients, name)
        return cls(state, name, gradients, compressor, memory, _lane(state, bucket))

    def start(self, session: Session) -> Ends:
        """Starts to average it, less what the compressor leaves out."""
        state, gradients = self.state, self.gradients
        wire = wire_for(state.wire, gradients.dtype)
        if gradients.is_sparse:
            return allreduce_sparse(session, gradients, "avg", wire=wire, lane=self.lane)
        if self.compressor is not None:
            with session.telling_refusals():
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
        """Averages it whole."""
        if self.memory is not None:
            # Of zeros: of an infinity less itself a memory may keep what is no number.
            nothing = torch.zeros_like(self.gradients)
            self.memory.update(nothing, self.name, Whole(), [nothing], None)
        group = self.state.process_group
        gradients = self.gradients / dist.get_world_size(group)
        dist.all_reduce(gradients, group=group)
        return gradients


def _telling_refusals(state: HookState) -> AbstractContextManager[object]:
    """Tells the other ranks if a bucket is refused here, unless they do not use the session."""
    if state.session is None or state._by_group:
        return nullcontext()
    return state.session.telling_refusals()


def _started(state: HookState, part: _Part) -> Callable[[], torch.Tensor]:
    """Starts to average a bucket; returns what waits for it."""
    if state._by_group:
        return part.averaged_by_group
    if state.session is None:
        raise BadArgument("the state has no session: one that was unpickled is to be given one")
    if state.fallback == "raise":
        return part.start(state.session).wait
    # An op that fails leaves sums in some places and not in others.
    kept = part._replace(gradients=part.gradients.clone())
    failed: Error | None = None
    try:
        handle = part.start(state.session)
    except _GONE as error:
        failed = error

    def finish() -> torch.Tensor:
        nonlocal failed
        try:
            result: torch.Tensor = kept.gradients if failed else handle.wait()
        except _GONE as error:
            failed = error
        try:
            have = _all_have(state, failed is None, kept.gradients.device)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, Error) and not isinstance(error, WaitTimeout):
                # Of a group of racksum's.
                raise failed or error from None
            unknown = Error(f"ranks do not say whether they have {part.name}: {error}")
            raise failed or unknown from error
        if have:
            return result
        if not state.fell_back:
            _log.warning(
                "gradients are averaged by the process group from now on, uncompressed: %s",
                failed or "another rank's session is over",
            )
        state.fell_back = True
        return kept.averaged_by_group()

    return finish


def _all_have(state: HookState, own: bool, device: torch.device) -> bool:
    """Whether all ranks have a result. A group may be of one kind of device only.

    A rank may have failed for a reason of its own, and not ask: others wait no longer for it than
    for an op.
    """
    have = torch.tensor([int(own)], dtype=torch.int32, device=device)
    asked = dist.all_reduce(have, dist.ReduceOp.MIN, group=state.process_group, async_op=True)
    seconds = state.session.options.timeout if state.session is not None else 0.0
    asked.wait(timedelta(seconds=seconds + _MARGIN))
    return bool(have)


def _lane(state: HookState, bucket: Any) -> int:
    if not state.prioritize or state.session is None or bucket.is_last():
        return 0
    lane: int = state.session.lanes - 1 - bucket.index()
    return max(lane, 0)


def _note_places(state: HookState, bucket: Any) -> None:
    """Numbers parameters in the first step: later ones have them in the order of readiness."""
    if state.iteration == 0:
        for parameter in bucket.parameters():
            state._places.setdefault(parameter, len(state._places))


def _check_layout(state: HookState, bucket: Any, name: str) -> None:
    """Refuses to add what was left out of some parameters to others."""
    layout = [(state._places.get(p), tuple(p.shape)) for p in bucket.parameters()]
    before = state._layouts.setdefault(name, layout)
    if layout != before:
        elements = sum(torch.Size(shape).numel() for _, shape in before)
        raise BadArgument(
            f"{name} has {bucket.buffer().numel()} elements, and had {elements} before, not all of "
            "the same parameters: what was left out of them then cannot be added; begin with a "
            "state, or a memory, that is new, and give each model its own"
        )
