"""A session: a rank's part in a job, and the ops that it starts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from racksum import _racksum
from racksum.eager import eager_methods
from racksum.errors import BadArgument, Error, SessionClosed
from racksum.handle import Handle, Outcome
from racksum.log import logger, pass_on, pass_on_until
from racksum.options import (
    MAX_ELEMENTS,
    MAX_LANES,
    ConnectOptions,
    limits_of_group,
    text,
    whole_from,
)
from racksum.shared import tensor_in
from racksum.tensor import check_unmoved, empty_like, memory_of, tag_of
from racksum.threads import end_all

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Handle", "PartOf", "Session", "begin_ops_here", "checked_session", "connect"]

T = TypeVar("T")

_log = logger("racksum")

#: Elements of a block: the unit that is sent or, if it is all zeros, not.
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
    """Joins a job at an aggregator, and returns once all its ranks have.

    What is not given is taken from the environment: ``RACKSUM_`` and the argument's name in
    capitals, and then, where they say it, torchrun's variables.

    :param aggregator: ``HOST:PORT``. ``A+B`` spreads the job over both; ``A,B`` goes on at B when A
        is gone, or about to stop. ``unix:PATH`` is the sidecar of this host, ``racksum worker``.
    :param job: The job's name. Ranks of one name sum with each other. By default torchrun's run id,
        or the address where its ranks meet, unless every host has that.
    :param rank: This rank, from 0; by default torchrun's ``RANK``.
    :param world: How many ranks there are; by default torchrun's ``WORLD_SIZE``.
    :param generation: Which life of the job it is: a restart has a greater one, and ends those
        before it. By default torchrun's ``TORCHELASTIC_RESTART_COUNT``, or 0.
    :param lanes: Priority classes of ops; an op of a lower lane goes first.
    :param pool_slots: Most windows in flight of a lane; 0 leaves it to the aggregator.
    :param multicast: Whether to take results by multicast if the aggregator sends them so.
    :param identity: The identity file to connect with; needed beyond loopback.
    :param insecure: Connect beyond loopback without identities.
    :param data_auth: How datagrams must be authenticated: ``"none"``, ``"mac"`` or ``"aead"``.
    :param wait: Wait while the aggregator has no room for the job, rather than be refused.
    :param rejoin: This rank has closed its session between two ops, and comes back to the job; the
        others start no op in the meantime.
    :param on_rank_loss: ``"abort"`` ends the job when a rank is lost; ``"continue"`` goes on
        without it. All ranks say the same.
    :param join_timeout: Seconds to wait for an aggregator that answers, for room and for the other
        ranks; by default the timeout of torch's default process group, where there is one, and 300
        elsewhere.
    :param timeout: Seconds that an op may take, and a rank that is busy with other things is waited
        for; by default the timeout of torch's default process group, where there is one, and 60
        elsewhere.
    :param mtu: The path's MTU; by default the interface's.
    :param interface: Which of this host's interfaces to use, in the grammar of
        ``NCCL_SOCKET_IFNAME``; by default that variable's, and then ``GLOO_SOCKET_IFNAME``'s.
    :param local_world: How many of the ranks are on this host and have its sidecar; by default
        torchrun's ``LOCAL_WORLD_SIZE``, or all.
    :raises racksum.Error: One of :mod:`racksum.errors`, which says why.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return Session(ConnectOptions.resolve(**{**limits_of_group(_seconds_of_group()), **given}))


class Session:
    """A rank's part in a job. Threads may share it; all ranks start the same ops in the same order.

    As a context manager it leaves the job in the end.
    """

    def __init__(self, options: ConnectOptions, check: Callable[[], None] | None = None) -> None:
        """Joins a job. :func:`connect` makes the options.

        :param check: Called every few moments while it joins; gives up if that raises something.
        """
        _leave_alone()
        self._options = options
        _racksum.keep_logs(min(_log.getEffectiveLevel(), logging.CRITICAL))
        # Joining may take minutes, and what it waits for is to be read meanwhile.
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
        #: Called at the beginning of every op, so that those of a GPU, which another thread starts,
        #: may be started before it.
        self._before_op: Callable[[], None] | None = None
        _open_sessions.add(self)
        _log.info(
            "rank %d of %d joined job %r, generation %d, at %s%s",
            options.rank,
            options.world,
            options.name,
            options.generation,
            options.aggregator,
            ", insecure: whoever answers there is believed"
            if options.insecure and not options.uses_sidecar
            else "",
        )

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._options.rank

    @property
    def world(self) -> int:
        """How many ranks the job has."""
        return self._options.world

    @property
    def job(self) -> str:
        """The job's name."""
        return self._options.job

    @property
    def generation(self) -> int:
        """Which life of the job it is."""
        return self._options.generation

    @property
    def lanes(self) -> int:
        """How many priority classes ops have."""
        return self._options.lanes

    @property
    def options(self) -> ConnectOptions:
        """How it was connected."""
        return self._options

    @property
    def max_ops(self) -> int:
        """How many ops may be in flight."""
        return self._session.max_ops

    @property
    def closed(self) -> bool:
        """Whether there are no more ops: it was closed, the job is over, or this is a fork."""
        return self._closed or self._session.is_forked or self._session.is_over

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
    ) -> Any:
        """Reduces a numpy array or a torch tensor in place with those of all other ranks.

        Ops on the same memory take turns, in the order of the calls. A call that fails at this rank
        is a :class:`racksum.Mismatch` at those that have made it too, and pairs with no other.

        :param x: A contiguous tensor in this host's memory, of float32, float64, float16, bfloat16,
            int32 or int64. Only ops may use it until this one has ended, and nobody may resize its
            storage.
        :param op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``. The average of integers is rounded
            toward zero.
        :param wire: How elements travel, if not unchanged: ``"bf16"``, ``"f16"``, ``"int8"`` (with
            a scale a block) or ``"fixed32"``.
        :param block: Elements of a block, 32 to 1024, a power of two: blocks of zeros are not sent.
        :param lane: The lane; one of a lower number goes first.
        :param tag: What all ranks must give alike, a number or a name; by default the shape.
        :param async_op: Return a :class:`Handle` at once, rather than ``x`` once it is reduced.
        :param part_of: The call of a collective that the op is part of, alike at all ranks.
        :raises racksum.Mismatch: The ranks called it differently; all of them hear of it.
        :raises racksum.PeerLost: A rank is gone. The session is over.
        :raises racksum.OpTimeout: It took longer than the session's ``timeout``.
        """
        with self._turn(part_of) as turn:
            try:
                memory = memory_of(x)
                call = _call(
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
        tag: int | str = 0,
        async_op: bool = False,
        part_of: PartOf | None = None,
    ) -> Any:
        """Reduces a tensor of which only some blocks are given, as if all others were zero in it.

        :param indices: Which blocks of the tensor are given, as int64: numpy or torch. What is
            listed twice is combined, for ``"avg"`` by its sum.
        :param values: Their elements one block after the other; only the tensor's last block may
            have less than ``block``.
        :param elements: How many elements the tensor has.
        :return: The indices of the blocks that some rank has given and that are not all zeros,
            sorted, and their reduced values, flat; or a :class:`Handle` of both.
        """
        with self._turn(part_of) as turn:
            try:
                places, memory = memory_of(indices), memory_of(values)
                if places.dtype != "i64":
                    raise BadArgument(f"the indices of blocks are int64, and not {indices.dtype}")  # type: ignore[attr-defined]
                call = _call(
                    elements=elements,
                    dtype=memory.dtype,
                    wire=wire,
                    op=op,
                    block=block,
                    lane=lane,
                    tag=tag,
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
        """Has an op of nothing in the place of a call that this rank does not make.

        All ranks number their ops alike, so a rank that leaves one out would pair its next with
        what others have called before. Those that did make the call hear :class:`racksum.Mismatch`.
        """
        self._turn(part_of).owe()
        self._tell()

    @contextlib.contextmanager
    def telling_refusals(self, part_of: PartOf | None = None) -> Iterator[_racksum.Turn]:
        """Tells the other ranks if a call fails here, before its op has begun.

        Whoever takes the turn that this gives tells them instead.
        """
        with self._turn(part_of) as turn:
            self.catch_up()
            try:
                yield turn
            except BaseException:
                self._tell_of(turn)
                raise

    def catch_up(self) -> None:
        """Has calls that were interrupted come before those that other threads are given next."""
        if self._session.owes:
            self._take_turn()

    def _turn(self, part_of: PartOf | None) -> _racksum.Turn:
        """The turn of a call. What ends the call before its op has begun leaves the call owed.

        The other ranks are told of it before the next op, at the latest.
        """
        return self._session.turn(part_of or _ONE_OP, _thread.begins_ops)

    def _tell_of(self, turn: _racksum.Turn) -> None:
        """Tells the other ranks at once of a call that has failed here.

        This is done for every exception, Ctrl-C too: the caller may catch it and go on.
        """
        # The call is owed first, since another signal may end the wait for earlier ops.
        turn.owe()
        # A session that is over has no ops to keep in step.
        with contextlib.suppress(Error):
            self._tell()

    def _tell(self) -> None:
        """Tells the other ranks of the calls that are owed, once all earlier ops have begun."""
        self._take_turn()
        self._session.tell()

    def _take_turn(self) -> None:
        """Waits until the ops have begun that were called before, and other threads begin."""
        if self._before_op is not None:
            self._before_op()
        # A thread that begins ops of earlier calls waits for none.
        if not _thread.begins_ops:
            self._session.settle()

    def empty(self, shape: int | Sequence[int], dtype: Any = None) -> Any:
        """A tensor whose memory is shared with the sidecar, so that it is reduced without a copy.

        What it holds at first is not defined. Without a sidecar it is a tensor like any other.

        :param dtype: Of torch, or of numpy; by default ``torch.float32`` where torch was imported,
            or else ``numpy.float32``.
        """
        return tensor_in(self._session.lend, _sides(shape), dtype)

    def empty_like(self, x: T) -> T:
        """A tensor of the shape and the dtype of ``x``, as of :meth:`empty`."""
        return cast("T", self.empty(tuple(x.shape), x.dtype))  # type: ignore[attr-defined]

    def stats(self) -> dict[str, int]:
        """Bytes, datagrams and repairs so far, in UDP payload.

        ``copied_bytes`` are those of tensors that were copied, there and back, to be contiguous.
        Without a sidecar all others are this rank's. Beside one they are those of the stream that
        leaves the host for all its ranks, zeros if the job has no others, and this rank has
        ``sidecar_ops`` that it started, ``sidecar_shared_bytes`` of tensors that were reduced where
        they lie, and ``sidecar_copied_bytes`` that were copied to shared memory and from it. If the
        sidecar does not answer for ten seconds, or is gone, they are what it has said last.
        """
        return {**self._session.stats(), "copied_bytes": self._copied}

    def note_copied(self, nbytes: int) -> None:
        """Counts bytes that were copied since a tensor could not be reduced where it lies."""
        self._copied += nbytes

    def close(self) -> None:
        """Leaves the job: what is in flight fails, but for what a sidecar has of all its ranks.

        Closing twice is the same as once. An exception of a signal's handler, such as that of
        Ctrl-C, ends what it waits for: the session is closed all the same.
        """
        self._closed = True
        try:
            self._session.close()
        finally:
            pass_on()

    def __enter__(self) -> Self:
        # What has ended the job an op says better.
        if self._closed or self._session.is_forked:
            raise SessionClosed("the session is closed; connect anew")
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
    """What is of one thread alone."""

    #: Whether it begins ops that other threads have called, in the order of the calls.
    begins_ops = False


_thread = _Thread()


def begin_ops_here() -> None:
    """Makes this the thread that begins ops which others have called."""
    _thread.begins_ops = True


def checked_session(session: Any) -> Session:
    """A session, where one is wanted."""
    if isinstance(session, Session):
        return session
    raise BadArgument(
        "session is a racksum.Session, as racksum.torch.connect gives, and not "
        f"{type(session).__name__}"
    )


class PartOf(NamedTuple):
    """The call of a collective that an op is part of: ops of different calls never pair."""

    #: As of docs/wire.md.
    collective: str = "op"
    #: The rank that it is to or from.
    root: int = 0
    #: Its number among the calls of its group.
    number: int = 0


#: The part of an op that belongs to no collective.
_ONE_OP = PartOf()


class Call(NamedTuple):
    """What all ranks must call an op with."""

    elements: int
    dtype: str
    wire: str
    op: str
    block: int
    lane: int
    tag: int


#: How each argument of an op is read.
_CHECKS = {
    "elements": whole_from(0, MAX_ELEMENTS),
    "wire": text,
    "op": text,
    "block": whole_from(32, 1024),
    "lane": whole_from(0, MAX_LANES - 1),
    "tag": whole_from(0, 2**64 - 1),
}


def _call(*, dtype: str, wire: str | None, tag: int | str, **given: Any) -> Call:
    """What an op is called with, if it can be."""
    given["wire"] = dtype if wire is None else wire
    given["tag"] = tag_of(text("tag", tag)) if isinstance(tag, str) else tag
    checked = {name: _CHECKS[name](name, value) for name, value in given.items()}
    return Call(dtype=dtype, **checked)


def _sides(shape: Any) -> tuple[int, ...]:
    try:
        sides = tuple(shape)
    except TypeError:
        sides = (shape,)
    check = whole_from(0, MAX_ELEMENTS)
    sides = tuple(check("a side of the shape", side) for side in sides)
    check("the product of the shape", math.prod(sides))
    return sides


def _leave_alone() -> None:
    """Keeps Dynamo from compiling what a session does, once there is a torch that could."""
    if "torch" in sys.modules:
        for cls in (Session, Handle):
            if cls not in _left_alone:
                _left_alone.add(eager_methods(cls))


_left_alone: set[type] = set()


def _seconds_of_group() -> float | None:
    """How long collectives of torch's default process group may take, if there is one."""
    if "torch.distributed" not in sys.modules:
        return None
    from racksum.group_timeout import timeout_of  # noqa: PLC0415 - only who has torch has groups.

    return timeout_of(None)


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Leaves all jobs while the interpreter is still there."""
    for session in list(_open_sessions):
        session.close()
    # They wait for ops, which have ended now.
    end_all()
