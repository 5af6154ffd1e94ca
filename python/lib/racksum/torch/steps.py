"""Measured steps of a model under DDP, in a group that contains only this rank.

A step does all the work of a DDP step, including the copies to and from buckets, but causes no
network traffic. The buckets are those that DDP builds after its first step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from racksum import _racksum
from racksum.eager import eager
from racksum.errors import BadArgument
from racksum.futures import new_future
from racksum.session import DEFAULT_BLOCK
from racksum.tensor import memory_of
from racksum.torch.clock import Clock, device_of
from racksum.torch.compress import BLOCKS

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Look", "Steps"]

#: Options of a DDP model that affect its buckets.
_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")

#: The number of timed searches for blocks of zeros, after one search to warm up.
_SCANS = 5


class Look(NamedTuple):
    """An observation of the gradients of a bucket."""

    #: The names of the bucket's parameters, in the bucket's order.
    parameters: list[str]
    elements: int
    sparse: bool
    #: For each size of a block, a uint8 tensor with 1 for each block that is not zero.
    occupied: dict[int, Tensor]
    #: Seconds that an op takes to find these blocks; 0 if it does not search on the host.
    scan: float

    @classmethod
    def at(cls, gradients: Tensor, parameters: list[str]) -> Look:
        """Observes the gradients of a bucket."""
        flat = (gradients.to_dense() if gradients.is_sparse else gradients).detach().reshape(-1)
        on_host = flat.cpu()
        # Sparse gradients are not scanned, and a GPU finds its blocks itself.
        scans = on_host is flat and not gradients.is_sparse
        finest = _scanned(on_host, BLOCKS[0])
        return cls(
            parameters=parameters,
            elements=len(flat),
            sparse=gradients.is_sparse,
            occupied={block: _coarser(finest, block // BLOCKS[0]) for block in BLOCKS},
            scan=_seconds_to_scan(on_host) if scans else 0.0,
        )


class Steps:
    """Measured training steps of a model, each on a batch.

    :param model: The model. If DDP wraps it already, it is wrapped again with the same options.
    :param loss: Returns the loss of the model on a batch.
    :param optimizer: The optimizer to step, if any.
    :param bucket_cap_mb: DDP's option, in MiB; defaults to the value of ``model`` if DDP already
        wraps it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: torch.optim.Optimizer | None,
        *,
        bucket_cap_mb: float | None = None,
    ) -> None:
        options: dict[str, Any] = {}
        if isinstance(model, DistributedDataParallel):
            options = {name: getattr(model, name) for name in _OPTIONS}
            bucket_cap_mb = bucket_cap_mb or model.bucket_bytes_cap / (1 << 20)
            model = model.module
        if not any(p.requires_grad for p in model.parameters()):
            raise BadArgument("no parameter of the model requires gradients; nothing to study")
        self._loss = loss
        self._optimizer = optimizer
        self._clock = Clock(device_of(model))
        self._seen = _Seen(self._clock, {p: name for name, p in model.named_parameters()})
        self._model = DistributedDataParallel(
            model,
            process_group=_alone(device_of(model)),
            bucket_cap_mb=bucket_cap_mb,
            init_sync=False,
            **options,
        )
        self._model.register_comm_hook(self._seen, eager(_see))
        self._times: list[float] = []
        self._afters: list[float] = []
        self._readies: list[list[float]] = []

    def step(self, batch: Any, counts: bool) -> None:
        """Runs a step, and records its times if ``counts`` is true."""
        clock = self._clock
        clock.settle()
        start = clock.mark()
        self._model.zero_grad(set_to_none=True)
        loss = self._loss(self._model, batch)
        if not isinstance(loss, torch.Tensor):
            raise BadArgument(f"loss must return a tensor, not {type(loss).__name__}")
        loss.backward()  # type: ignore[no-untyped-call]
        backward = clock.mark()
        if self._optimizer is not None:
            self._optimizer.step()
        end = clock.mark()
        clock.settle()
        if counts:
            self._times.append(clock.seconds(start, end))
            self._afters.append(clock.seconds(backward, end))
            readies = sorted(self._seen.readies.items())
            self._readies.append([clock.seconds(start, ready) for _, ready in readies])

    def look(self, batch: Any) -> list[Look]:
        """Runs a step, and returns an observation of each bucket, in the order of sending."""
        self._seen.looks = {}
        self.step(batch, counts=False)
        return [look for _, look in sorted(self._seen.looks.items())]

    def times(self) -> Tensor:
        """Returns the medians of the recorded times, in seconds.

        These are the time of a step, the time after backward in a step, and the times from the
        start of a step until each bucket is ready.
        """
        readies = [statistics.median(of_bucket) for of_bucket in zip(*self._readies, strict=True)]
        return torch.tensor(
            [statistics.median(self._times), statistics.median(self._afters), *readies],
            dtype=torch.float64,
        )


class _Seen:
    """The state of the hook, with its observations of a step."""

    def __init__(self, clock: Clock, names: dict[Tensor, str]) -> None:
        self.clock = clock
        self.names = names
        self.readies: dict[int, Any] = {}
        self.looks: dict[int, Look] | None = None


def _see(seen: _Seen, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    gradients = bucket.buffer()
    seen.readies[bucket.index()] = seen.clock.mark()
    if seen.looks is not None:
        names = [seen.names[parameter] for parameter in bucket.parameters()]
        seen.looks[bucket.index()] = Look.at(gradients, names)
    future = new_future([gradients.device])
    future.set_result(gradients)
    return future


# DDP compares the annotations of a hook with types, but postponed annotations are strings.
_see.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": Future[torch.Tensor],
}


def _alone(device: torch.device) -> dist.ProcessGroup:
    """Returns a process group of this process alone."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    group._register_backend(device, gloo, ProcessGroupGloo(store, 0, 1))
    return group


def _scanned(flat: Tensor, block: int) -> Tensor:
    """Returns a uint8 tensor: for each block of a host tensor, 0 if it is all zeros, or else 1."""
    memory = memory_of(flat)
    bits = _racksum.scan(memory.address, memory.nbytes, memory.dtype, block, memory.owner)
    octets = torch.frombuffer(bytearray(bits), dtype=torch.uint8) if bits else torch.empty(0)
    marks = (octets.to(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return marks.flatten()[: -(-len(flat) // block)]


def _seconds_to_scan(flat: Tensor) -> float:
    """Returns the median time, in seconds, that an op takes to find blocks in warm memory."""
    times = []
    for _ in range(1 + _SCANS):
        start = time.perf_counter()
        _scanned(flat, DEFAULT_BLOCK)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _coarser(marks: Tensor, size: int) -> Tensor:
    """Returns the maximum of each group of ``size`` marks."""
    if not len(marks):
        return marks
    padded = torch.nn.functional.pad(marks, (0, -len(marks) % size))
    return padded.view(-1, size).amax(1)
