"""Staging of GPU tensors, which a session reduces through pinned host memory.

For each session a thread takes tensors to the host, in the order of the calls. Once a tensor is
computed, the GPU finds and packs the blocks that are not zero, and only these cross to the host. A
second thread takes the sums back. Both overlap with the caller and the GPU, which never wait for
each other here; only streams wait, for events.

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
from racksum.errors import BadArgument, WaitTimeout
from racksum.futures import as_exception, future_of
from racksum.session import DEFAULT_BLOCK, Handle, Session, begin_ops_here
from racksum.tensor import tag_of_shape
from racksum.threads import SerialExecutor
from racksum.torch.work import Ends

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

    from racksum._racksum import Turn

__all__ = [
    "Staged",
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

#: The share of non-zero blocks up to which they are packed. On the host, a list of blocks is copied
#: twice more than a tensor that is reduced in place.
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
) -> Handle[Tensor] | Staged[Tensor]:
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
    telling = partial(session.telling_refusals, part_of)
    with telling():
        if not x.is_contiguous():
            raise BadArgument(
                f"the tensor of shape {tuple(x.shape)} is not contiguous; pass x.contiguous()"
            )
        flat = x.detach().view(-1)
        options["tag"] = tag_of_shape(x.shape) if tag is None else tag

    def start() -> Ends:
        """Starts an op on the blocks or on the whole tensor; ranks of one op may differ in that."""
        with telling():
            indices = find(flat, block)
            is_whole = len(indices) * block > _MOST_PACKED * len(flat)
            first, *rest = to_host(flat) if is_whole else to_host(*pack(flat, block, indices))
        if is_whole:
            handle: Ends = session.allreduce(first, op, **options)
        else:
            handle = session.allreduce_blocks(first, rest[0], len(flat), op, **options)
        return handle

    def finish(sums: Any) -> Tensor:
        if isinstance(sums, tuple):
            there = [part.to(x.device, non_blocking=True) for part in sums]
            unpack(flat, block, *there)
        else:
            flat.copy_(sums, non_blocking=True)
        return x

    return staging.stage(x.device, start, finish, telling)


def find(x: Tensor, block: int) -> Tensor:
    """Returns the indices of the whole blocks of a flat tensor that are not all zeros.

    It reads the tensor once.
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
        # Always add a short last block. The session checks itself whether it is zeros.
        indices = torch.cat([indices, indices.new_full((1,), len(blocks))])
        values = torch.cat([values, rest])
    return indices, values


def unpack(x: Tensor, block: int, indices: Tensor, values: Tensor) -> None:
    """Writes blocks to their places in a flat tensor, and zeros to all others."""
    blocks, rest = _cut(x, block)
    short = len(values) % block
    whole = len(values) - short
    # This clears blocks of -0.0 too, which no rank sent, so that all ranks have the same bits.
    x.zero_()
    blocks.index_copy_(0, indices[: whole // block], values[:whole].view(-1, block))
    if short:
        rest.copy_(values[whole:])


def _cut(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns the whole blocks of a flat tensor, and the elements after them."""
    whole = len(x) - len(x) % block
    return x[:whole].view(-1, block), x[whole:]


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies tensors to pinned memory, and waits for the copies. torch reuses the memory."""
    copies = []
    for x in tensors:
        pinned = x.device.type != "cpu"
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned)
        copies.append(copy.copy_(x, non_blocking=True))
    so_far(tensors[0].device).synchronize()
    return copies


class Staging:
    """Two threads: one takes GPU tensors to the host and starts their ops, one brings sums back."""

    def __init__(self) -> None:
        self._up = SerialExecutor("racksum-up", begin_ops_here)
        self._down = SerialExecutor("racksum-down")
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        # Set once the last op has started or failed.
        self._has_started = threading.Event()
        self._has_started.set()

    @staticmethod
    def takes(device: torch.device) -> bool:
        """Returns whether tensors of the device are staged."""
        return device.type != "cpu"

    def stage(
        self,
        device: torch.device,
        start: Callable[[], Ends],
        finish: Callable[[Any], T],
        telling: Callable[[], AbstractContextManager[Turn | None]] = contextlib.nullcontext,
    ) -> Staged[T]:
        """Starts an op once the device has done all work of its current stream so far.

        :param device: The device of the op's tensors.
        :param start: Starts the op. It runs on another thread, with a stream of its own, and tells
            the other ranks itself if it fails.
        :param finish: Makes the result from the op's, on another thread with a stream of its own.
        :param telling: Tells the other ranks of failures before ``start`` is called.
        """
        # Tensors that were made in inference mode cannot be written to outside of it.
        inference = torch.is_inference_mode_enabled()
        staged: Staged[T] = Staged(self, device)
        has_started = threading.Event()

        @contextlib.contextmanager
        def there(stream: Any) -> Iterator[None]:
            module = torch.get_device_module(device)
            # A new thread starts on the first GPU, and leaving the stream would initialize that.
            module.set_device(device)
            with torch.inference_mode(inference), torch.no_grad(), module.stream(stream):
                yield

        def take_up(turn: Turn | None, ready: Any, up: Any, down: Any) -> None:
            if turn is not None and not turn.take():
                # A signal handler has ended the call, and the other ranks will be told.
                return
            with staged.told_of_errors():
                try:
                    with contextlib.ExitStack() as stack:
                        with telling():
                            ready.synchronize()
                            stack.enter_context(there(up))
                        op = start()
                finally:
                    has_started.set()
                self._down.do(lambda: take_down(op, down))

        def take_down(op: Ends, down: Any) -> None:
            with staged.told_of_errors():
                with there(down):
                    result = finish(op.wait())
                    done = so_far(device)
                staged.end(result, done, getattr(op, "absent", ()))
                # Keep the tensors alive until the stream has read and written them.
                done.synchronize()

        with telling() as turn:
            ready, streams = so_far(device), self._streams_of(device)
            before, self._has_started = self._has_started, has_started
            try:
                self._up.do(partial(take_up, turn, ready, *streams))
            except BaseException:
                self._has_started = before
                raise
        return staged

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        """Returns the streams on which tensors of a device go to the host and back."""
        if device not in self._streams:
            module = torch.get_device_module(device)
            self._streams[device] = module.Stream(device), module.Stream(device)
        return self._streams[device]

    def is_current(self) -> bool:
        """Returns whether the current thread is the one that starts ops."""
        return self._up.is_current()

    def is_behind(self) -> bool:
        """Returns whether an op has yet to start, on another thread than the current one."""
        return not self._has_started.is_set() and not self.is_current()

    def drain(self) -> None:
        """Waits until all staged ops have started. Ops on host tensors must start after them."""
        self._up.drain()


class Staged(Generic[T]):
    """An op in flight on GPU tensors, with the methods of :class:`racksum.Handle`."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        self._staging = staging
        self._device = device
        self._ended = threading.Event()
        self._outcome: tuple[T, Any] | Exception | None = None
        #: The ranks whose contributions the result lacks, once there is a result.
        self.absent: tuple[int, ...] = ()

    def done(self) -> bool:
        """Returns whether the op has ended, with a result or an error. Does not wait."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the op to end and returns its result.

        The current stream, but not this thread, waits for the copy of the result to the GPU.

        :param timeout: The most seconds to wait; by default without a limit.
        :raises racksum.WaitTimeout: The op has not ended within ``timeout``. It goes on.
        :raises racksum.Error: The op failed. The class and the message give the cause.
        """
        if not self._ended.wait(timeout):
            raise WaitTimeout(f"the op has not ended after {timeout} s; it goes on, so wait again")
        if self._outcome is None or isinstance(self._outcome, Exception):
            raise self._outcome or RuntimeError("an op has ended without an outcome")
        result, done = self._outcome
        stream = torch.get_device_module(self._device).current_stream(self._device)
        done.wait(stream)
        _hold(result, stream)
        return result

    def then(self, work: Callable[[T], Any]) -> Staged[Any]:
        """Returns an op whose result is ``work`` applied to this one's result, on a thread."""
        return self._staging.stage(self._device, lambda: self, work)

    def get_future(self) -> Future[T]:
        """Returns a :class:`torch.futures.Future` of the result, which a thread completes."""
        return future_of(self, [self._device])

    def end(self, result: T, done: Any, absent: tuple[int, ...]) -> None:
        """Sets the result, and the event of the stream at which it is on the GPU."""
        self.absent = absent
        self._outcome = result, done
        self._ended.set()

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """Turns an exception of the block into the outcome of the op."""
        try:
            yield
        except BaseException as error:
            self._outcome = as_exception(error)
            self._ended.set()


def so_far(device: torch.device) -> Any:
    """Returns an event after all work of the device's current stream. Waiting does not spin."""
    module = torch.get_device_module(device)
    event = module.Event() if device.type == "cpu" else module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event


def _hold(result: Any, stream: Any) -> None:
    """Keeps the memory of a result, which another stream allocated, until ``stream`` is done."""
    if not isinstance(result, torch.Tensor) or result.device.type == "cpu":
        return
    parts = [result._indices(), result._values()] if result.is_sparse else [result]
    for part in parts:
        part.record_stream(stream)


def staging_of(session: Session, staging: Staging | None = None) -> Staging:
    """Returns the staging of a session. The first call sets it, to ``staging`` or a new one."""
    found = _stagings.get(session)
    if found is None:
        found = _stagings.setdefault(session, staging or Staging())
        session._before_op = found.drain
    return found


_stagings: weakref.WeakKeyDictionary[Session, Staging] = weakref.WeakKeyDictionary()
