"""The DDP communication hook: each bucket of gradients is averaged by racksum."""

# DDP looks at the annotations of a hook themselves, so that they are not put off here.
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from racksum.errors import BadArgument, Error, NoAggregator, OpTimeout, SessionClosed
from racksum.session import DEFAULT_BLOCK, Session
from racksum.torch.compress import Compressor, Memory, ResidualMemory
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.staging import allreduce
from racksum.torch.work import Ends, at_end_of_backward, new_future

__all__ = ["State", "allreduce_hook"]

_log = logging.getLogger("racksum.torch")

_FALLBACKS = ("raise", "process_group")

#: What a session ends with whose ranks are all there.
_GONE = (NoAggregator, OpTimeout, SessionClosed)

#: DDP rebuilds its buckets after the first step, so that what is known of one is of no use before.
FIRST_STEADY_ITER = 2


class State:
    """What :func:`allreduce_hook` needs, and keeps from step to step.

    It can be pickled, without its session, and has what a checkpoint needs; each rank saves its
    own.

    :param session: The session whose ranks are those of the model's process group.
    :param wire: How gradients travel, if not unchanged: see :meth:`racksum.Session.allreduce`.
    :param block: Elements of a block: blocks of zeros are not sent.
    :param compressor: What leaves blocks out, from ``start_iter`` on: one of
        :mod:`racksum.torch.compress`, or any with GRACE's verbs. Sparse buckets are sent whole.
    :param error_feedback: Whether what is left out of a step is added to the next.
    :param memory: What does so, if not :class:`ResidualMemory`.
    :param start_iter: The first step that is compressed, 2 or later.
    :param prioritize: Whether a bucket goes before those that are ready earlier: the last one,
        which is of the layers that the next step begins with, in lane 0. For a session with
        several lanes.
    :param fallback: What becomes of a step whose aggregators are all gone: ``"raise"``, or
        ``"process_group"``, by which gradients are averaged from then on. That takes a copy of each
        bucket, and a small all_reduce after it, in which ranks agree that all have its result.
    :param process_group: The one to fall back to; by default the default group.
    """

    def __init__(
        self,
        session: Session | None,
        *,
        wire: str | None = None,
        block: int = DEFAULT_BLOCK,
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
        self.session = session
        self.wire = wire
        self.block = block
        self.compressor = compressor
        self.memory = memory or (ResidualMemory() if compressor and error_feedback else None)
        self.start_iter = start_iter
        self.prioritize = prioritize
        self.fallback = fallback
        self.process_group = process_group
        #: Whether the process group averages by now.
        self.fell_back = False
        self.iteration = 0
        self._bytes_before = 0
        self._bytes_after = 0
        _log.info(
            "hook: wire=%s block=%d compressor=%s memory=%s start_iter=%d fallback=%s, %r",
            wire,
            block,
            type(compressor).__name__,
            type(self.memory).__name__,
            start_iter,
            fallback,
            session,
        )

    def compression_stats(self) -> tuple[float, int, int]:
        """Bytes before and after the compressor, of this rank so far, and their ratio."""
        before, after = self._bytes_before, self._bytes_after
        return (before / after if after else 0.0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        """All but the session and the group, which are of this process."""
        return {**self.__dict__, "session": None, "process_group": None}


def allreduce_hook(
    state: State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks of the session, be it of a GPU or not."""
    future: Future[torch.Tensor] = new_future([bucket.buffer().device])
    average = _started(state, bucket)
    if bucket.is_last():
        state.iteration += 1

    def finish() -> None:
        future.set_result(average())

    if not at_end_of_backward(finish):
        finish()
    return future


def _started(
    state: State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Callable[[], torch.Tensor]:
    """Starts to average a bucket; returns what waits for it."""
    if state.fell_back:
        gradients = bucket.buffer()
        return lambda: _averaged_by_group(state, gradients)
    if state.session is None:
        raise BadArgument("the state has no session: one that was unpickled is to be given one")
    if state.fallback == "raise":
        return _start(state, state.session, bucket).wait
    # An op that fails leaves sums in some places and not in others.
    kept = bucket.buffer().clone()
    failed: Error | None = None
    try:
        handle = _start(state, state.session, bucket)
    except _GONE as error:
        failed = error

    def finish() -> torch.Tensor:
        nonlocal failed
        try:
            result: torch.Tensor = kept if failed else handle.wait()
        except _GONE as error:
            failed = error
        if _all_have(state, failed is None, kept.device):
            return result
        _log.warning(
            "gradients are averaged by the process group from now on: %s",
            failed or "another rank's session is over",
        )
        state.fell_back = True
        return _averaged_by_group(state, kept)

    return finish


def _all_have(state: State, own: bool, device: torch.device) -> bool:
    """Whether all ranks have a result. A group may be of one kind of device only."""
    have = torch.tensor([int(own)], dtype=torch.int32, device=device)
    dist.all_reduce(have, dist.ReduceOp.MIN, group=state.process_group)
    return bool(have)


def _averaged_by_group(state: State, gradients: torch.Tensor) -> torch.Tensor:
    gradients = gradients / dist.get_world_size(state.process_group)
    dist.all_reduce(gradients, group=state.process_group)
    return gradients


def _start(
    state: State,
    session: Session,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Ends:
    gradients = bucket.buffer()
    if gradients.is_sparse:
        return allreduce_sparse(session, gradients, "avg", wire=state.wire)
    if state.compressor is not None and state.iteration >= state.start_iter:
        gradients = _compressed(state, state.compressor, gradients, f"bucket {bucket.index()}")
    return allreduce(
        session,
        gradients,
        "avg",
        wire=state.wire,
        block=state.block,
        lane=max(session.lanes - 1 - bucket.index(), 0) if state.prioritize else 0,
    )


def _compressed(
    state: State, compressor: Compressor, gradients: torch.Tensor, name: str
) -> torch.Tensor:
    """What the compressor leaves of gradients, and of what it left out before."""
    if state.memory is not None:
        gradients = state.memory.compensate(gradients, name)
    tensors, ctx = compressor.compress(gradients, name)
    if state.memory is not None:
        state.memory.update(gradients, name, compressor, tensors, ctx)
    state._bytes_before += gradients.nbytes
    state._bytes_after += sum(tensor.nbytes for tensor in tensors)
    return compressor.decompress(tensors, ctx)
