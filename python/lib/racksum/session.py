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
from racksum.log import logger, pass_on, pass_on_until
from racksum.options import (
    ConnectOptions,
    limits_of_group,
)
from racksum.shared import sides_of, tensor_in
from racksum.tensor import check_unmoved, empty_like, memory_of
from racksum.threads import end_all

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import numpy as np
    import torch
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import Self, Unpack

__all__ = ["Handle", "Session", "begin_ops_here", "checked_session", "connect"]

T = TypeVar("T")

_log = logger("racksum")

#: The default number of elements of a block. A block of zeros is not sent.
DEFAULT_BLOCK = 256


def connect(
    aggregator: str | None = None,
    *,
    job: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    generation: int | None = None,
    lanes: int | None = None,
    pool_slots: int | None = None,
    multicast: bool | None = None,
    identity: str | os.PathLike[str] | None = None,
    insecure: bool | None = None,
    data_auth: str | None = None,
    wait: bool | None = None,
    rejoin: bool | None = None,
    on_rank_loss: str | None = None,
    join_timeout: float | None = None,
    timeout: float | None = None,
    mtu: int | None = None,
    interface: str | None = None,
    local_world: int | None = None,
) -> Session:
    """Joins a job at an aggregator and returns a session once all ranks of the job have joined.

    An option that is not given comes from the environment: from ``RACKSUM_`` and its name in
    capitals, then from the variables of torchrun that are named below.

    Example, for one of two ranks::

        session = racksum.connect(
            "10.0.0.1:7177", job="digits", rank=0, world=2, identity="node-0.pem"
        )

    :param aggregator: Address of the aggregator, ``HOST:PORT``. ``A+B`` spreads the job over both
        aggregators. ``A,B`` makes B a standby: the job moves there when A is gone or about to stop.
        ``unix:PATH`` is the socket of this host's sidecar, ``racksum worker``.
    :param job: Name of the job, 1 to 128 bytes. Ranks with the same name sum with each other. By
        default torchrun's run id, or else ``MASTER_ADDR`` and ``MASTER_PORT``, unless that address
        is a loopback address.
    :param rank: Number of this rank, from 0. By default torchrun's ``RANK``.
    :param world: Number of ranks, 1 to 256. By default torchrun's ``WORLD_SIZE``.
    :param generation: The life of the job, a number from 0. A restart has a greater one and ends
        those before it. By default torchrun's ``TORCHELASTIC_RESTART_COUNT``, or 0.
    :param lanes: Number of priority classes of ops, 1 to 8; by default 1. Ops of a lower lane go
        first.
    :param pool_slots: The most windows of a lane in flight at a shard; 0, the default, leaves the
        limit to the aggregator.
    :param multicast: Whether to receive results by multicast if the aggregator offers it; by
        default True.
    :param identity: Path of the identity file to connect with. Needed beyond loopback, unless
        ``insecure`` is set.
    :param insecure: Whether to connect beyond loopback without identities; by default False.
    :param data_auth: How datagrams must be authenticated: ``"none"``, ``"mac"`` or ``"aead"``. By
        default the aggregator decides.
    :param wait: Whether to wait while the aggregator has no room for the job; by default False,
        which raises :class:`Refused` at once.
    :param rejoin: Whether this rank closed its session between two ops and now returns to the job;
        by default False. The other ranks must not start an op in the meantime.
    :param on_rank_loss: ``"abort"``, the default, ends the job when a rank is lost.
        ``"continue"`` goes on without the rank. All ranks must pass the same value.
    :param join_timeout: Seconds to wait for an answer of the aggregator, for room and for the other
        ranks. By default the timeout of torch's default process group, or 300 without one.
    :param timeout: Seconds that an op may take, including the wait for ranks that have not called
        it yet. By default the timeout of torch's default process group, or 60 without one.
    :param mtu: MTU of the path in bytes, 1280 to 65536. By default that of the interface.
    :param interface: Interfaces of this host to use, in the grammar of ``NCCL_SOCKET_IFNAME``. By
        default ``NCCL_SOCKET_IFNAME``, then ``GLOO_SOCKET_IFNAME``.
    :param local_world: Number of ranks of the job that are on this host and use its sidecar. By
        default torchrun's ``LOCAL_WORLD_SIZE``, or else ``world``.
    :raises racksum.BadArgument: An option is invalid, or required and not set.
    :raises racksum.NoAggregator: The aggregator or the sidecar cannot be joined.
    :raises racksum.Refused: The aggregator or the sidecar refuses the rank.
    :raises racksum.JoinTimeout: Not all ranks joined within ``join_timeout``.
    :raises racksum.PeerLost: A rank was lost while the others joined.
    :raises racksum.Error: Joining failed for another reason.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return Session(ConnectOptions.resolve(**{**limits_of_group(_seconds_of_group()), **given}))


class _OpOptions(TypedDict, total=False):
    """The arguments of an op that all its overloads share."""

    wire: str | None
    block: int
    lane: int
    tag: int | str | None
    part_of: PartOf | None


class Session:
    """The membership of a rank in a job. :func:`connect` makes one.

    All ranks must start the same ops in the same order. Threads may share a session. As a context
    manager, a session leaves the job at the end of the block::

        with racksum.connect("127.0.0.1:7177", job="demo", rank=0, world=1) as session:
            session.allreduce(numpy.ones(4, numpy.float32))
    """

    def __init__(self, options: ConnectOptions, check: Callable[[], None] | None = None) -> None:
        """Joins a job, and returns once all its ranks have joined.

        :param options: The checked options; :func:`connect` makes them from arguments.
        :param check: A function to call repeatedly while joining. If it raises, joining ends with
            that exception.
        """
        _leave_alone()
        self._options = options
        _racksum.keep_logs(min(_log.getEffectiveLevel(), logging.CRITICAL))
        # Joining may take minutes. Its log lines say what it waits for, so pass them on meanwhile.
        joined = threading.Event()
        threading.Thread(target=pass_on_until, args=(joined,), daemon=True).start()
        try:
            with options.naming_variables():
                self._session = _racksum.Session.connect(options, check)
        finally:
            joined.set()
            pass_on()
        self._closed = False
        self._copied = 0
        #: Called at the beginning of every op: waits until other threads have started earlier ops.
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
        """The life of the job that this session belongs to."""
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
        """The most ops that may be in flight. A further call waits for room."""
        return self._session.max_ops

    @property
    def closed(self) -> bool:
        """True if the session takes no more ops: it is closed or forked, or the job is over."""
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
        """Reduces a numpy array or a torch tensor in place with those of all other ranks.

        Ops on the same memory take turns in the order of the calls. If a call fails at this rank
        before its op begins, the ranks that made the same call get :class:`racksum.Mismatch`, and
        the next calls of all ranks pair again.

        Example::

            session.allreduce(gradients, "avg", wire="bf16")  # in place
            handle = session.allreduce(x, async_op=True)
            handle.wait()  # x holds the sum

        :param x: A contiguous tensor of any shape in host memory, of float32, float64, float16,
            bfloat16, int32 or int64. Until the op has ended, only ops may use it, and its storage
            must not be resized.
        :param op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``. The average of integers is rounded
            toward zero.
        :param wire: Type of the elements on the network: ``"bf16"``, ``"f16"``, ``"int8"`` with one
            scale a block, or ``"fixed32"``. By default the tensor's own.
        :param block: Elements of a block, a power of two from 32 to 1024. Blocks of zeros are not
            sent.
        :param lane: Lane of the op, below the session's ``lanes``. Ops of a lower lane go first.
        :param tag: A number from 0 to 2**64 - 1, or a string. All ranks must pass the same; by
            default it stands for the shape.
        :param async_op: Whether to return a :class:`Handle` at once.
        :param part_of: The call of a collective that the op belongs to, which the backend sets.
        :return: ``x`` once it is reduced, or a :class:`Handle` of it.
        :raises racksum.BadArgument: An argument is invalid, or ``x`` got other memory meanwhile.
        :raises racksum.Mismatch: The ranks called the op with different arguments.
        :raises racksum.Overflow: ``fixed32`` cannot carry a value of a tensor.
        :raises racksum.PeerLost: A rank is gone. The session is over.
        :raises racksum.OpTimeout: The op took longer than ``timeout``. The session is over.
        :raises racksum.NoAggregator: The aggregator is gone, and no standby took over.
        :raises racksum.SessionClosed: The session was over already.
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
                self._tell_of(turn)
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
        """Reduces a tensor of which each rank passes only some blocks; all others count as zeros.

        The arguments that are not listed here are those of :meth:`allreduce`, as are the errors.

        Example, for blocks 0 and 7 of a million elements::

            where, sums = session.allreduce_blocks(
                numpy.array([0, 7]), numpy.ones(2 * 256, numpy.float32), 1_000_000
            )

        :param indices: The numbers of the blocks that this rank passes, an int64 array or tensor. A
            block that is listed twice is combined first, for ``"avg"`` by its sum.
        :param values: The elements of these blocks, one block after the other: ``block`` elements
            each, except that the tensor's last block may be shorter.
        :param elements: The number of elements of the whole tensor.
        :return: The sorted numbers of the blocks that some rank passed and that were not all zeros
            there, int64, and their reduced values, flat; or a :class:`Handle` of both.
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
                self._tell_of(turn)
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

        Ranks pair ops by their order. A rank that leaves a call out must call this in its place, or
        its next op would pair with the one it left out. The ranks that made the call get
        :class:`racksum.Mismatch`.

        :param part_of: The call of a collective that is left out, as of :meth:`allreduce`.
        """
        self._turn(part_of).owe()
        self._tell()

    @contextlib.contextmanager
    def telling_refusals(self, part_of: PartOf | None = None) -> Iterator[_racksum.Turn]:
        """Tells the other ranks if the block raises before the op of a call has begun.

        The block receives the turn of the call. Code that takes the turn must tell them itself.
        """
        with self._turn(part_of) as turn:
            self.catch_up()
            try:
                yield turn
            except BaseException:
                self._tell_of(turn)
                raise

    def catch_up(self) -> None:
        """Puts the notices of interrupted calls before the calls that other threads begin next."""
        if self._session.owes:
            self._take_turn()

    def _turn(self, part_of: PartOf | None) -> _racksum.Turn:
        """Returns the turn of a call, a context manager.

        If the block raises before the op begins, the session owes the other ranks a notice, which
        it sends before the next op at the latest.
        """
        return self._session.turn(part_of or ONE_OP, _thread.begins_ops)

    def _tell_of(self, turn: _racksum.Turn) -> None:
        """Tells the other ranks at once of a call that has failed here.

        Callers do so for every exception, even Ctrl-C, because users may catch it and go on.
        """
        # First note that the notice is owed: another signal may end the wait for earlier ops.
        turn.owe()
        # If the session is over, no ops follow that would have to pair.
        with contextlib.suppress(Error):
            self._tell()

    def _tell(self) -> None:
        """Sends the owed notices to the other ranks, once all earlier ops have begun."""
        self._take_turn()
        self._session.tell()

    def _take_turn(self) -> None:
        """Waits until other threads have begun the ops of earlier calls; makes notices due."""
        if self._before_op is not None:
            self._before_op()
        # A thread that begins ops of earlier calls must not wait for itself.
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

        The sidecar reduces it without a copy. Without a sidecar the tensor has ordinary memory::

            gradients = session.empty(25_000_000)

        :param shape: A number of elements, or a sequence of dimensions.
        :param dtype: A torch or a numpy dtype. By default ``torch.float32`` if torch was imported,
            or else ``numpy.float32``.
        :return: A torch tensor or a numpy array, by the kind of ``dtype``.
        :raises racksum.BadArgument: The shape or the dtype is invalid.
        :raises racksum.Error: The sidecar has no memory left for the tensor. The session goes on.
        """
        return tensor_in(self._session.lend, sides_of(shape), dtype)

    def empty_like(self, x: T) -> T:
        """Returns an uninitialized tensor of the shape and the dtype of ``x``, as :meth:`empty`."""
        return cast("T", self.empty(tuple(x.shape), x.dtype))  # type: ignore[attr-defined]

    def stats(self) -> dict[str, int]:
        """Returns counters of the traffic so far, by name; bytes are UDP payload.

        ``tx_bytes``, ``rx_bytes``, ``tx_datagrams``, ``rx_datagrams``, ``retransmits``, ``asks``,
        ``probes``, ``rejects``, ``kernel_drops`` and ``send_failures`` count this rank's traffic.
        With a sidecar they count what leaves the host for all its ranks: zeros if the job has no
        ranks elsewhere, and the last known values if the sidecar does not answer for ten seconds.

        ``sidecar_ops`` counts the ops that this rank started at the sidecar,
        ``sidecar_shared_bytes`` the bytes of tensors that were reduced in shared memory, and
        ``sidecar_copied_bytes`` the bytes that were copied to shared memory and back.
        ``copied_bytes`` counts bytes of tensors that were copied to be contiguous, and back.
        """
        return {**self._session.stats(), "copied_bytes": self._copied}

    def note_copied(self, nbytes: int) -> None:
        """Adds to ``copied_bytes`` of :meth:`stats`: a tensor could not be reduced in place."""
        self._copied += nbytes

    def close(self) -> None:
        """Leaves the job. Closing a closed session does nothing.

        Ops in flight fail, except those that a sidecar has received from all its ranks. An
        exception from a signal handler, such as Ctrl-C, ends the wait for these; the session is
        still closed.
        """
        self._closed = True
        try:
            self._session.close()
        finally:
            pass_on()

    def __enter__(self) -> Self:
        # If the job is over for another reason, the next op raises an error that names the reason.
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


def _leave_alone() -> None:
    """Keeps Dynamo from compiling the methods of sessions and handles, once torch is imported."""
    if "torch" in sys.modules:
        for cls in (Session, Handle):
            if cls not in _left_alone:
                _left_alone.add(eager_methods(cls))


_left_alone: set[type] = set()


def _seconds_of_group() -> float | None:
    """Returns the timeout of torch's default process group in seconds, or None without a group."""
    if "torch.distributed" not in sys.modules:
        return None
    from racksum.group_timeout import timeout_of  # noqa: PLC0415 - this imports torch.

    return timeout_of(None)


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Closes all sessions before the interpreter finalizes."""
    for session in list(_open_sessions):
        session.close()
    # The threads wait for ops, which have all ended now.
    end_all()
