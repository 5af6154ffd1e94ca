"""The DDP communication hook: each bucket of gradients is averaged by racksum."""

# DDP looks at the annotations of a hook themselves, so that they are not put off here.
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from racksum.errors import BadArgument
from racksum.session import DEFAULT_BLOCK, Handle, Session
from racksum.torch.compress import Compressor, Memory, ResidualMemory
from racksum.torch.sparse import allreduce_sparse
from racksum.torch.work import at_end_of_backward

__all__ = ["State", "allreduce_hook"]

_log = logging.getLogger("racksum.torch")

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
    ) -> None:
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
        self.iteration = 0
        self._bytes_before = 0
        self._bytes_after = 0
        _log.info(
            "allreduce_hook: wire=%s block=%d compressor=%s memory=%s start_iter=%d, %r",
            wire,
            block,
            type(compressor).__name__,
            type(self.memory).__name__,
            start_iter,
            session,
        )

    def compression_stats(self) -> tuple[float, int, int]:
        """Bytes before and after the compressor, of this rank so far, and their ratio."""
        before, after = self._bytes_before, self._bytes_after
        return (before / after if after else 0.0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        """All but the session, which is of this process."""
        return {**self.__dict__, "session": None}


def allreduce_hook(
    state: State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks of the session."""
    if state.session is None:
        raise BadArgument("the state has no session: one that was unpickled is to be given one")
    future: Future[torch.Tensor] = Future()
    handle = _start(state, state.session, bucket)
    if bucket.is_last():
        state.iteration += 1

    def finish() -> None:
        future.set_result(handle.wait())

    if not at_end_of_backward(finish):
        finish()
    return future


def _start(
    state: State,
    session: Session,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Handle[torch.Tensor]:
    gradients = bucket.buffer()
    if gradients.is_sparse:
        return allreduce_sparse(session, gradients, "avg", wire=state.wire)
    if state.compressor is not None and state.iteration >= state.start_iter:
        gradients = _compressed(state, state.compressor, gradients, f"bucket {bucket.index()}")
    handle: Handle[torch.Tensor] = session.allreduce(
        gradients, "avg", wire=state.wire, block=state.block, async_op=True
    )
    return handle


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
