"""Staging of GPU tensors, which a session reduces through pinned host memory.

For each session a thread copies tensors to the host, in the order of the calls. Once a tensor is
computed, the GPU finds and packs the blocks that are not zero, and only these are copied. If most
blocks are not zero, the whole tensor is copied. A second thread copies the sums back. Both threads
overlap with the caller and the GPU. In this module, neither the caller nor the GPU waits for the
other; only these threads and streams wait for events.

Host tensors are reduced in place. To PyTorch the host is a device like any other, so the tests also
send host tensors through this module.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from racksum.call import PartOf
from racksum.errors import BadArgument
from racksum.futures import as_exception
from racksum.handle import Handle, Outcome
from racksum.session import DEFAULT_BLOCK, Session, begin_ops_here
from racksum.tensor import tag_of_shape
from racksum.threads import SerialExecutor

if TYPE_CHECKING:
    from torch import Tensor

    from racksum._racksum import CallTurn

__all__ = [
    "Staging",
    "allreduce",
    "find",
    "pack",
    "so_far",
    "staging_of",
    "to_host",
    "unpack",
]

T = TypeVar("T")

#: The largest share of non-zero blocks at which only these blocks are copied. On the host, a list
#: of blocks needs two more copies than a tensor that is reduced in place.
_MOST_PACKED = 0.75


def allreduce(
    session: Session,
    x: Tensor,
    op: str = "sum",
    *,
    wire: str | None = None,
    block: int = DEFAULT_BLOCK,
    lane: int = 0,
    tag: int | str | None = None,
    part_of: PartOf | None = None,
) -> Handle[Tensor]:
    """Starts reducing a dense tensor in place, on the host or on a GPU.

    The arguments are those of :meth:`racksum.Session.allreduce`.
    """
    staging = staging_of(session)
    options: dict[str, Any] = {
        "wire": wire,
        "block": block,
        "lane": lane,
        "async_op": True,
        "part_of": part_of,
    }
    if not staging.takes(x.device):
        handle: Handle[Tensor] = session.allreduce(x, op, tag=tag, **options)
        return handle
    reporting = partial(session.reporting_refusals, part_of)
    with reporting():
        if not x.is_contiguous():
            raise BadArgument(
                f"the tensor of shape {tuple(x.shape)} is not contiguous; pass x.contiguous()"
            )
        flat = x.detach().view(-1)
        options["tag"] = tag_of_shape(x.shape) if tag is None else tag

    def start() -> Handle[Any]:
        """Starts an op on the blocks or on the whole tensor. Ranks of one op may differ in this."""
        with reporting():
            indices = find(flat, block)
            is_whole = len(indices) * block > _MOST_PACKED * len(flat)
            first, *rest = to_host(flat) if is_whole else to_host(*pack(flat, block, indices))
        handle: Handle[Any]
        if is_whole:
            handle = session.allreduce(first, op, **options)
        else:
            handle = session.allreduce_blocks(first, rest[0], len(flat), op, **options)
        return handle

    def finish(sums: Any) -> Tensor:
        if isinstance(sums, tuple):
            on_device = [part.to(x.device, non_blocking=True) for part in sums]
            unpack(flat, block, *on_device)
        else:
            flat.copy_(sums, non_blocking=True)
        return x

    return staging.stage(x.device, start, finish, reporting)


def find(x: Tensor, block: int) -> Tensor:
    """Returns the indices of the whole blocks of a flat tensor that are not all zeros.

    Reads the tensor once.
    """
    blocks, _ = _cut(x, block)
    if x.is_floating_point():
        # The norm of a block with a NaN is NaN, which is not zero. The norm of -0.0 is zero.
        found = torch.linalg.vector_norm(blocks, torch.inf, dim=1) != 0
    else:
        least, greatest = blocks.aminmax(dim=1)
        found = (least != 0) | (greatest != 0)
    return torch.nonzero(found).flatten()


def pack(x: Tensor, block: int, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices and the values of blocks, as ``Session.allreduce_blocks`` takes them."""
    blocks, rest = _cut(x, block)
    values = blocks.index_select(0, indices).view(-1)
    if len(rest):
        # Always add a short last block. The session itself checks whether it is zero.
        indices = torch.cat([indices, indices.new_full((1,), len(blocks))])
        values = torch.cat([values, rest])
    return indices, values


def unpack(x: Tensor, block: int, indices: Tensor, values: Tensor) -> None:
    """Writes blocks to their places in a flat tensor, and zeros to all other places."""
    blocks, rest = _cut(x, block)
    short = len(values) % block
    whole = len(values) - short
    # This also clears blocks of -0.0. No rank sends them, but all ranks must get the same bits.
    x.zero_()
    blocks.index_copy_(0, indices[: whole // block], values[:whole].view(-1, block))
    if short:
        rest.copy_(values[whole:])


def _cut(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns the whole blocks of a flat tensor, and the elements after them."""
    whole = len(x) - len(x) % block
    return x[:whole].view(-1, block), x[whole:]


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies tensors to the host, and waits for the copies.

    Copies from a GPU are in pinned memory, which torch reuses.
    """
    copies = []
    for x in tensors:
        pinned = x.device.type != "cpu"
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned)
        copies.append(copy.copy_(x, non_blocking=True))
    so_far(tensors[0].device).synchronize()
    return copies


class Staging:
    """Two threads: one copies tensors to the host and starts ops, the other copies sums back."""

    def __init__(self) -> None:
        self._up = SerialExecutor("racksum-up", begin_ops_here)
        self._down = SerialExecutor("racksum-down")
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        # Set once the most recent op has started or failed.
        self._has_started = threading.Event()
        self._has_started.set()

    @staticmethod
    def takes(device: torch.device) -> bool:
        """Returns whether tensors of the device are staged."""
        return device.type != "cpu"

    def stage(
        self,
        device: torch.device,
        start: Callable[[], Handle[Any]],
        finish: Callable[[Any], T],
        reporting: Callable[[], AbstractContextManager[CallTurn | None]] = contextlib.nullcontext,
    ) -> Handle[T]:
        """Starts an op once the device has done all work queued so far on its current stream.

        :param device: The device of the op's tensors.
        :param start: Starts the op. It runs on another thread, with a stream of its own, and tells
            the other ranks itself if it fails.
        :param finish: Makes the result from the op's sums, on another thread and another stream.
        :param reporting: Tells the other ranks if a failure occurs before ``start`` is called.
        """
        # Tensors that were made in inference mode cannot be written to outside of it.
        inference = torch.is_inference_mode_enabled()
        transfer: _Transfer[T] = _Transfer(device)
        has_started = threading.Event()

        @contextlib.contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            module = torch.get_device_module(device)
            # A new thread's current device is the first GPU. Leaving the stream context switches
            # back to that GPU and would initialize it, so set the device.
            module.set_device(device)
            with torch.inference_mode(inference), torch.no_grad(), module.stream(stream):
                yield

        def take_up(turn: CallTurn | None, ready: Any, up: Any, down: Any) -> None:
            if turn is not None and not turn.take():
                # A signal handler has ended the call, and the other ranks will be told.
                return
            with transfer.capturing_errors():
                try:
                    with contextlib.ExitStack() as stack:
                        with reporting():
                            ready.synchronize()
                            stack.enter_context(on_stream(up))
                        op = start()
                finally:
                    has_started.set()
                self._down.do(lambda: take_down(op, down))

        def take_down(op: Handle[Any], down: Any) -> None:
            with transfer.capturing_errors():
                with on_stream(down):
                    result = finish(op.wait())
                    done = so_far(device)
                transfer.end(result, done, op.absent)
                # Keep the tensors alive until the stream has read and written them.
                done.synchronize()

        with reporting() as turn:
            ready, streams = so_far(device), self._streams_of(device)
            before, self._has_started = self._has_started, has_started
            try:
                self._up.do(partial(take_up, turn, ready, *streams))
            except BaseException:
                self._has_started = before
                raise
        return Handle(
            transfer.ended.wait,
            transfer.outcome,
            device=device,
            stage=lambda start, finish: self.stage(device, start, finish),
        )

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        """Returns the streams on which tensors of a device are copied to the host and back."""
        if device not in self._streams:
            module = torch.get_device_module(device)
            self._streams[device] = module.Stream(device), module.Stream(device)
        return self._streams[device]

    def is_current(self) -> bool:
        """Returns whether the current thread is the one that starts ops."""
        return self._up.is_current()

    def is_behind(self) -> bool:
        """Returns whether an op has yet to start on a thread other than the current one."""
        return not self._has_started.is_set() and not self.is_current()

    def drain(self) -> None:
        """Waits until all staged ops have started. Ops on host tensors must start after them."""
        self._up.drain()


class _Transfer(Generic[T]):
    """The result of an op while it is copied to a GPU, or the op's error."""

    def __init__(self, device: torch.device) -> None:
        #: Set once there is a result or an error.
        self.ended = threading.Event()
        self._device = device
        self._end: tuple[T, Any, tuple[int, ...]] | Exception | None = None

    def end(self, result: T, done: Any, absent: tuple[int, ...]) -> None:
        """Sets the result, the event after which it is on the GPU, and the absent ranks."""
        self._end = result, done, absent
        self.ended.set()

    @contextlib.contextmanager
    def capturing_errors(self) -> Iterator[None]:
        """Turns an exception of the block into the error of the op."""
        try:
            yield
        except BaseException as error:
            self._end = as_exception(error)
            self.ended.set()

    def outcome(self) -> Outcome[T]:
        """Returns the outcome of an op that has ended, or raises its error."""
        result, _, absent = self._arrived()
        return Outcome(result, absent, self._reach)

    def _reach(self) -> None:
        """Makes the current stream wait for the copy of the result, or raises the copy's error."""
        result, done, _ = self._arrived()
        stream = torch.get_device_module(self._device).current_stream(self._device)
        done.wait(stream)
        _hold(result, stream)

    def _arrived(self) -> tuple[T, Any, tuple[int, ...]]:
        if self._end is None or isinstance(self._end, Exception):
            raise self._end or RuntimeError("an op has ended without an outcome")
        return self._end


def so_far(device: torch.device) -> Any:
    """Returns an event that follows all work queued on the current stream.

    A thread that waits for the event sleeps and does not spin.
    """
    module = torch.get_device_module(device)
    event = module.Event() if device.type == "cpu" else module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event


def _hold(result: Any, stream: Any) -> None:
    """Keeps a result's memory, which another stream allocated, until ``stream`` is done with it."""
    if not isinstance(result, torch.Tensor) or result.device.type == "cpu":
        return
    parts = [result._indices(), result._values()] if result.is_sparse else [result]
    for part in parts:
        part.record_stream(stream)


def staging_of(session: Session, staging: Staging | None = None) -> Staging:
    """Returns the staging of a session. The first call makes one, unless ``staging`` is given."""
    found = _stagings.get(session)
    if found is None:
        found = _stagings.setdefault(session, staging or Staging())
        session._before_op = found.drain
    return found


_stagings: weakref.WeakKeyDictionary[Session, Staging] = weakref.WeakKeyDictionary()
