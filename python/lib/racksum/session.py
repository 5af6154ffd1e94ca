"""Sessions: the membership of a rank in a job, and the ops that the rank starts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, overload

from racksum import _racksum
from racksum.call import ONE_OP, PartOf, checked_call
from racksum.eager import eager_methods
from racksum.errors import BadArgument, Error, SessionClosed
from racksum.handle import Handle, Outcome
from racksum.log import forward_logs, forward_logs_until, logger
from racksum.options import ConnectOptions
from racksum.shared import sides_of, tensor_in
from racksum.tensor import check_unmoved, empty_like, memory_of
from racksum.threads import end_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import numpy as np
    import torch
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import Self, Unpack

__all__ = ["Session", "begin_ops_here", "checked_session"]

T = TypeVar("T")

_log = logger("racksum")

#: The default number of elements of a block. A block of zeros is not sent.
DEFAULT_BLOCK = 256


class _OpOptions(TypedDict, total=False):
    """The arguments that all overloads of an op share."""

    wire: str | None
    block: int
    lane: int
    tag: int | str | None
    part_of: PartOf | None


class Session:
    """The membership of a rank in a job. :func:`racksum.connect` makes one.

    All ranks must start the same ops in the same order. Threads may share a session. As a context
    manager, a session leaves the job at the end of the block:

    >>> with racksum.connect("127.0.0.1:7177", job="digits", rank=0, world=1) as session:
    ...     session
    <racksum.Session 'digits' rank 0 of 1, open>
    >>> session.closed
    True
    """

    def __init__(self, options: ConnectOptions, check: Callable[[], None] | None = None) -> None:
        """Joins a job, and returns once all its ranks have joined.

        :param options: The checked options; :func:`racksum.connect` makes them from arguments.
        :param check: A function to call repeatedly while joining. If it raises, joining ends with
            that exception.
        """
        _make_eager()
        self._options = options
        _racksum.keep_logs(min(_log.getEffectiveLevel(), logging.CRITICAL))
        # Joining may take minutes, so forward the log lines that say what the session waits for.
        joined = threading.Event()
        threading.Thread(target=forward_logs_until, args=(joined,), daemon=True).start()
        try:
            with options.naming_variables():
                self._session = _racksum.Session.connect(options, check)
        finally:
            joined.set()
            forward_logs()
        self._closed = False
        self._copied = 0
        #: Called before every op. It waits until other threads have started earlier ops.
        self._before_op: Callable[[], None] | None = None
        _open_sessions.add(self)
        _log.info(
            "rank %d of %d joined job %r, generation %d, at %s%s",
            options.rank,
            options.world,
            options.name,
            options.generation,
            options.aggregator,
            ", insecure: the aggregator's identity is not verified"
            if options.insecure and not options.uses_sidecar
            else "",
        )

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._options.rank

    @property
    def world(self) -> int:
        """The number of ranks in the job."""
        return self._options.world

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._options.job

    @property
    def generation(self) -> int:
        """The generation of the job that this session joined."""
        return self._options.generation

    @property
    def lanes(self) -> int:
        """The number of priority classes of ops."""
        return self._options.lanes

    @property
    def options(self) -> ConnectOptions:
        """The options that the session connected with."""
        return self._options

    @property
    def max_ops(self) -> int:
        """The maximum number of ops in flight. A further call waits until one of them has ended."""
        return self._session.max_ops

    @property
    def closed(self) -> bool:
        """True if the session accepts no more ops.

        It is true after :meth:`close`, after the end of the job, and in a process that was forked
        from the one that connected.
        """
        return self._closed or self._session.is_forked or self._session.is_over

    @overload
    def allreduce(
        self, x: T, op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[_OpOptions]
    ) -> T: ...
    @overload
    def allreduce(
        self, x: T, op: str = ..., *, async_op: Literal[True], **options: Unpack[_OpOptions]
    ) -> Handle[T]: ...
    @overload
    def allreduce(
        self, x: T, op: str = ..., *, async_op: bool, **options: Unpack[_OpOptions]
    ) -> T | Handle[T]: ...

    def allreduce(
        self,
        x: T,
        op: str = "sum",
        *,
        wire: str | None = None,
        block: int = DEFAULT_BLOCK,
        lane: int = 0,
        tag: int | str | None = None,
        async_op: bool = False,
        part_of: PartOf | None = None,
    ) -> T | Handle[T]:
        """Reduces a numpy array or a torch tensor in place, across all ranks.

        Ops on the same memory take turns in call order. If a call fails at this rank before its op
        begins, the ranks that made the same call get :class:`racksum.Mismatch`, and the next calls
        of all ranks pair again.

        >>> x = np.array([1.0, 2.0, 3.0], np.float32)
        >>> session.allreduce(x, "avg", wire="bf16").tolist()
        [1.0, 2.0, 3.0]
        >>> handle = session.allreduce(x, async_op=True)
        >>> handle.wait() is x
        True

        :param x: A contiguous tensor in host memory, of any shape. Its dtype is float32, float64,
            float16, bfloat16, int32 or int64. Until the op has ended, only ops may use it, and its
            storage must not be resized.
        :param op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``. The average of integers is rounded
            toward zero.
        :param wire: Type of the elements on the network: ``"bf16"``, ``"f16"``, ``"int8"`` with one
            scale per block, or ``"fixed32"``. By default the tensor's own type.
        :param block: Elements of a block, a power of two from 32 to 1024. Blocks of zeros are not
            sent.
        :param lane: Lane of the op, below the session's ``lanes``. Lower-numbered lanes go first.
        :param tag: A number from 0 to 2**64 - 1, or a string. All ranks must pass the same tag; by
            default it is derived from the shape.
        :param async_op: Whether to return a :class:`Handle` immediately.
        :param part_of: The collective call that the op belongs to; only the backend sets it.
        :return: ``x`` once it is reduced, or a :class:`Handle` of it.
        :raises racksum.BadArgument: An argument is invalid, or the memory of ``x`` was replaced
            during the op.
        :raises racksum.Mismatch: The ranks called the op with different arguments.
        :raises racksum.Overflow: ``fixed32`` cannot carry a value of a tensor.
        :raises racksum.PeerLost: A rank that the op needs is lost. The session is over.
        :raises racksum.OpTimeout: The op took longer than ``timeout``. The session is over.
        :raises racksum.NoAggregator: The aggregator is lost, and no standby took over.
        :raises racksum.SessionClosed: The session was already over.
        """
        with self._turn(part_of) as turn:
            try:
                memory = memory_of(x)
                call = checked_call(
                    elements=memory.elements,
                    dtype=memory.dtype,
                    wire=wire,
                    op=op,
                    block=block,
                    lane=lane,
                    tag=memory.tag if tag is None else tag,
                )
            except BaseException:
                self._report_refusal(turn)
                raise
            self._take_turn()
            started = self._session.submit(turn, call, memory.address, memory.nbytes, memory.owner)

        def make() -> Outcome[T]:
            absent, _ = started.outcome()
            if memory.owner is not x:
                check_unmoved(x, memory.address)
            return Outcome(x, absent)

        handle = Handle(started.wait, make)
        return handle if async_op else handle.wait()

    @overload
    def allreduce_blocks(
        self,
        indices: T,
        values: T,
        elements: int,
        op: str = ...,
        *,
        async_op: Literal[False] = ...,
        **options: Unpack[_OpOptions],
    ) -> tuple[T, T]: ...
    @overload
    def allreduce_blocks(
        self,
        indices: T,
        values: T,
        elements: int,
        op: str = ...,
        *,
        async_op: Literal[True],
        **options: Unpack[_OpOptions],
    ) -> Handle[tuple[T, T]]: ...

    def allreduce_blocks(
        self,
        indices: T,
        values: T,
        elements: int,
        op: str = "sum",
        *,
        wire: str | None = None,
        block: int = DEFAULT_BLOCK,
        lane: int = 0,
        tag: int | str | None = None,
        async_op: bool = False,
        part_of: PartOf | None = None,
    ) -> tuple[T, T] | Handle[tuple[T, T]]:
        """Reduces a tensor of which each rank passes only some blocks; the others count as zeros.

        The other arguments and the errors are those of :meth:`allreduce`. This example passes
        blocks 0 and 7 of a tensor with a million elements:

        >>> blocks, values = np.array([0, 7]), np.ones(2 * 256, np.float32)
        >>> where, sums = session.allreduce_blocks(blocks, values, 1_000_000)
        >>> where.tolist(), sums.shape
        ([0, 7], (512,))

        :param indices: The numbers of the blocks that this rank passes, an int64 array or tensor.
            If a block is listed twice, its values are combined first; ``"avg"`` adds them.
        :param values: The elements of these blocks, block by block: ``block`` elements each, except
            that the tensor's last block may be shorter. An array or tensor of a dtype that
            :meth:`allreduce` takes.
        :param elements: The number of elements of the whole tensor.
        :return: The sorted int64 numbers of the blocks in which some rank passed a non-zero
            element, and their reduced values as a flat tensor; or a :class:`Handle` of both.
        """
        with self._turn(part_of) as turn:
            try:
                places, memory = memory_of(indices), memory_of(values)
                if places.dtype != "i64":
                    raise BadArgument(f"indices must be int64, not {indices.dtype}")  # type: ignore[attr-defined]
                call = checked_call(
                    elements=elements,
                    dtype=memory.dtype,
                    wire=wire,
                    op=op,
                    block=block,
                    lane=lane,
                    tag=0 if tag is None else tag,
                )
            except BaseException:
                self._report_refusal(turn)
                raise
            self._take_turn()
            started = self._session.submit_blocks(
                turn, call, places.address, places.elements, memory.address, memory.nbytes
            )

        def make() -> Outcome[tuple[T, T]]:
            absent, sums = started.outcome()
            sums = cast("_racksum.Sums", sums)
            where = empty_like(indices, sums.count)
            reduced = empty_like(values, sums.nbytes // values.itemsize)  # type: ignore[attr-defined]
            sums.copy_to(memory_of(where).address, memory_of(reduced).address)
            return Outcome((where, reduced), absent)

        handle = Handle(started.wait, make)
        return handle if async_op else handle.wait()

    def refuse(self, part_of: PartOf | None = None) -> None:
        """Tells the other ranks that this rank does not make the next call.

        Ranks pair ops by call order. A rank that skips a call must call this method instead.
        Otherwise its next op would pair with the skipped call. The ranks that made the call get
        :class:`racksum.Mismatch`.

        >>> session.refuse()  # The other ranks reduce something that this rank lacks.
        >>> session.allreduce(np.ones(2, np.float32)).tolist()
        [1.0, 1.0]

        :param part_of: The call that this rank skips, as for :meth:`allreduce`.
        :raises racksum.SessionClosed: This process was forked from the one that connected.
        """
        self._turn(part_of).owe()
        self._send_notices()

    @contextlib.contextmanager
    def reporting_refusals(self, part_of: PartOf | None = None) -> Iterator[_racksum.CallTurn]:
        """Refuses a call if the block raises before the call's op has begun.

        Like :meth:`refuse`, this tells the other ranks that this rank does not make the call. The
        block receives the turn of the call. Code that takes the turn must itself tell the other
        ranks about a failure.

        >>> with session.reporting_refusals():
        ...     x = np.ones(1000, np.float32)  # This may run out of memory.
        >>> session.allreduce(x).sum().item()
        1000.0

        :param part_of: The collective call that the op belongs to, as for :meth:`allreduce`.
        """
        with self._turn(part_of) as turn:
            self.catch_up()
            try:
                yield turn
            except BaseException:
                self._report_refusal(turn)
                raise

    def catch_up(self) -> None:
        """Ensures that notices of interrupted calls precede ops that other threads begin later.

        >>> session.catch_up()  # No call was interrupted, so this does nothing.
        """
        if self._session.owes:
            self._take_turn()

    def _turn(self, part_of: PartOf | None) -> _racksum.CallTurn:
        """Returns the turn of a call, which is a context manager.

        If the block raises before the op begins, the session owes the other ranks a notice, which
        it sends before the next op at the latest.
        """
        return self._session.turn(part_of or ONE_OP, _thread.begins_ops)

    def _report_refusal(self, turn: _racksum.CallTurn) -> None:
        """Tells the other ranks immediately that a call has failed at this rank.

        Call this for every exception, even ``KeyboardInterrupt``: users may catch it and continue.
        """
        # First record that the notice is owed: another signal may end the wait for earlier ops.
        turn.owe()
        # If the session is over, no later op has to pair, so ignore its errors.
        with contextlib.suppress(Error):
            self._send_notices()

    def _send_notices(self) -> None:
        """Sends the owed notices to the other ranks, once all earlier ops have begun."""
        self._take_turn()
        self._session.tell()

    def _take_turn(self) -> None:
        """Waits until other threads have begun the ops of earlier calls.

        After that, owed notices may be sent.
        """
        if self._before_op is not None:
            self._before_op()
        # A thread that begins ops of other threads' calls may still have to begin earlier ones, so
        # it must not wait for them here.
        if not _thread.begins_ops:
            self._session.settle()

    @overload
    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]: ...
    @overload
    def empty(self, shape: int | Sequence[int]) -> torch.Tensor | NDArray[np.float32]: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = None) -> Any:
        """Returns an uninitialized tensor in memory that is shared with the sidecar.

        The sidecar reduces it without a copy. Without a sidecar the tensor has ordinary memory:

        >>> gradients = session.empty((1000, 8), torch.float32)
        >>> gradients.shape
        torch.Size([1000, 8])

        :param shape: A number of elements, or a sequence of dimensions.
        :param dtype: A torch or a numpy dtype. By default ``torch.float32`` if torch was imported,
            or else ``numpy.float32``.
        :return: A torch tensor if ``dtype`` is a torch dtype, or else a numpy array.
        :raises racksum.BadArgument: The shape or the dtype is invalid.
        :raises racksum.Error: The sidecar has no memory left for the tensor. The session remains
            open.
        """
        return tensor_in(self._session.lend, sides_of(shape), dtype)

    def empty_like(self, x: T) -> T:
        """Returns an uninitialized tensor like ``x``, in the memory that :meth:`empty` uses.

        >>> session.empty_like(np.ones((2, 3), np.float64)).dtype
        dtype('float64')

        :param x: A torch tensor or a numpy array. The result is of the same kind.
        :raises racksum.Error: The same errors as :meth:`empty`.
        """
        return cast("T", self.empty(tuple(x.shape), x.dtype))  # type: ignore[attr-defined]

    def stats(self) -> dict[str, int]:
        """Returns the traffic counters, by name. Counters of network bytes count UDP payload.

        ``tx_bytes``, ``rx_bytes``, ``tx_datagrams``, ``rx_datagrams``, ``retransmits``, ``asks``,
        ``probes``, ``rejects``, ``kernel_drops`` and ``send_failures`` count this rank's traffic.
        With a sidecar they count the traffic between the sidecar and the aggregator, for all of the
        job's ranks on this host. They are zero if the job has no ranks on other hosts, and keep
        their last values if the sidecar does not answer for ten seconds.

        ``sidecar_ops`` counts the ops that this rank started at the sidecar,
        ``sidecar_shared_bytes`` the bytes of tensors that were reduced in shared memory, and
        ``sidecar_copied_bytes`` the bytes that were copied to shared memory and back.
        ``copied_bytes`` counts the bytes of copies to contiguous memory and back.

        >>> x = session.allreduce(np.ones(1000, np.float32))
        >>> session.stats()["tx_bytes"] >= 4000
        True

        :raises racksum.SessionClosed: This process was forked from the one that connected.
        """
        return {**self._session.stats(), "copied_bytes": self._copied}

    def note_copied(self, nbytes: int) -> None:
        """Adds ``nbytes`` to ``copied_bytes`` of :meth:`stats`, for copies of a tensor.

        >>> session.note_copied(4096)
        >>> session.stats()["copied_bytes"]
        4096

        :param nbytes: Bytes that were copied.
        """
        self._copied += nbytes

    def close(self) -> None:
        """Leaves the job. Closing a closed session does nothing.

        Ops in flight fail, except those that a sidecar has received from all of the job's ranks on
        its host. Closing waits for these, and for a few seconds while other ranks may lack results.
        It then waits up to two seconds until the aggregators, or the sidecar, know that the rank
        has left. Once they know, the process may end in any way without counting as lost. An
        exception from a signal handler, such as ``KeyboardInterrupt``, ends these waits, but the
        session still closes.

        The interpreter closes all sessions when it exits. A process that skips this, by
        ``os._exit`` or as a forked child of `multiprocessing`, must close its sessions itself.

        >>> session.close()
        >>> session.closed
        True
        """
        try:
            self._leave()
            self._session.wait_until_left()
        finally:
            forward_logs()

    def _leave(self) -> None:
        """Waits until the rank may leave the job, and begins to leave it."""
        self._closed = True
        self._session.leave()

    def __enter__(self) -> Self:
        # If the job is over for another reason, let the next op raise an error that names it.
        if self._closed or self._session.is_forked:
            raise SessionClosed("the session is closed; call connect again")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<racksum.Session {self._options.name!r} rank {self.rank} of {self.world}, {state}>"


class _Thread(threading.local):
    """State of the current thread."""

    #: Whether the thread begins ops that other threads have called, in the order of the calls.
    begins_ops = False


_thread = _Thread()


def begin_ops_here() -> None:
    """Marks the current thread as one that begins ops which other threads have called."""
    _thread.begins_ops = True


def checked_session(session: Any) -> Session:
    """Returns ``session``, or raises :class:`BadArgument` if it is not a session."""
    if isinstance(session, Session):
        return session
    raise BadArgument(
        "session must be a racksum.Session, as racksum.torch.connect returns, not "
        f"{type(session).__name__}"
    )


def _make_eager() -> None:
    """Keeps Dynamo from compiling the methods of sessions and handles, if torch is imported."""
    if "torch" in sys.modules:
        for cls in (Session, Handle):
            if cls not in _eager_classes:
                _eager_classes.add(eager_methods(cls))


_eager_classes: set[type] = set()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Closes all sessions before the interpreter finalizes."""
    sessions = list(_open_sessions)
    # Begin to leave all jobs first, so that the waits for answers overlap.
    for session in sessions:
        session._leave()
    for session in sessions:
        session.close()
    # All ops have ended, so the threads that waited for them can end now.
    end_all()
