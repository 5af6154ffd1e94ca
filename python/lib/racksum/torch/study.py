"""Studies, which measure a few steps and predict the time and traffic that racksum would save.

``docs/study.md`` explains the formulas. In the examples of this module ``found`` is a study for two
ranks. A step takes 100 ms, and the model has one bucket of a million elements. One block in ten is
not zero, and these blocks differ between the ranks.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from racksum.errors import BadArgument
from racksum.extras import needed
from racksum.files import write_whole
from racksum.session import DEFAULT_BLOCK
from racksum.torch.clock import device_of
from racksum.torch.compress import BLOCKS
from racksum.torch.restore import as_it_was, refuse
from racksum.torch.steps import Look, Steps

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Bucket", "Prediction", "Study", "study"]

#: Bytes per element on the wire, by wire type. For int8, each block also has a scale.
WIRES = {"f32": 4, "bf16": 2, "int8": 1}
#: Bytes of headers and of payload in a full IP packet of 1500 bytes.
_HEADERS, _PAYLOAD = 28 + 40, 1432
#: The number of steps before the first timed step. DDP rebuilds its buckets after the first step.
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket of gradients, as DDP makes it.

    >>> bucket = found.buckets[0]
    >>> bucket.elements, bucket.density[256], bucket.union[256]
    (1000000, 0.1, 0.2)
    """

    #: The number of elements.
    elements: int
    #: True if the bucket's gradient is a sparse tensor.
    sparse: bool
    #: Seconds from the start of a step until the bucket's gradients are computed.
    ready: float
    #: Seconds that an op takes to find the bucket's blocks that are not zero.
    scan: float
    #: For each size of a block, the share of this rank's blocks that are not zero.
    density: dict[int, float]
    #: For each size of a block, the share of blocks that are not zero at some rank.
    union: dict[int, float]

    def sent(self, wire: str, block: int) -> float:
        """Returns the bytes of the bucket that this rank sends per step, including headers.

        >>> round(found.buckets[0].sent("f32", 256))
        418994

        :param wire: ``"f32"``, ``"bf16"`` or ``"int8"``.
        :param block: Elements of a block, a power of two from 32 to 1024.
        """
        return _wire_bytes(self.elements * self.density[block], wire, block)

    def received(self, wire: str, block: int) -> float:
        """Returns the bytes of the bucket that this rank receives per step, including headers.

        The parameters are those of :meth:`sent`.

        >>> round(found.buckets[0].received("f32", 256))
        837989
        """
        return _wire_bytes(self.elements * self.union[block], wire, block)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted times of a step on a link.

    >>> at = found.predict(0.1)
    >>> print(f"{at.ring:.3f} s with a ring, {at.racksum:.3f} s with racksum")
    0.395 s with a ring, 0.127 s with racksum
    """

    #: The speed of a rank's link, in Gbit/s.
    gbit_per_s: float
    #: The duration of a step with racksum, in seconds, for the best wire type and block size.
    racksum: float
    #: The best wire type.
    wire: str
    #: The best size of a block, in elements.
    block: int
    #: The duration of a step, in seconds, with a ring that sends all elements as f32.
    ring: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """The measurements of :func:`study`, and predictions for the model with racksum.

    ``print(study)`` shows a table. Sizes of a block are in elements: 32, 64, 128, 256, 512 or 1024.

    >>> print(str(found).splitlines()[0])
    2 ranks, 100.0 ms of compute a step, blocks of 256
    """

    #: The number of ranks that predictions are for.
    world: int
    #: The duration of a step without communication, in seconds.
    compute: float
    #: The time after backward in a step, in seconds: the time of the optimizer, if one was passed.
    after: float
    #: True if the blocks of the ranks were compared. Otherwise, for example because ranks have
    #: different buckets, unions are estimates for blocks at random places.
    compared: bool
    #: The buckets of gradients, in the order of sending.
    buckets: list[Bucket]
    #: Speeds of links to predict for, in Gbit/s.
    links: list[float] = field(default_factory=lambda: [1.0, 10.0, 25.0, 100.0])

    def sent(self, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Returns the bytes that this rank sends per step, including headers.

        >>> round(found.sent("bf16"))
        209497

        :param wire: ``"f32"``, ``"bf16"`` or ``"int8"``.
        :param block: Elements of a block, a power of two from 32 to 1024.
        """
        return sum(bucket.sent(wire, block) for bucket in self.buckets)

    def received(self, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Returns the bytes that this rank receives per step, including headers.

        The parameters are those of :meth:`sent`.

        >>> round(found.received("bf16"))
        418994
        """
        return sum(bucket.received(wire, block) for bucket in self.buckets)

    def ring_bytes(self) -> float:
        """Returns the bytes that this rank would send, and also receive, per step in a ring.

        >>> found.ring_bytes()  # without headers
        4000000.0
        """
        elements = sum(bucket.elements for bucket in self.buckets)
        return 2 * (self.world - 1) / self.world * elements * WIRES["f32"]

    def step_time(self, gbit_per_s: float, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Returns the duration of a step with racksum, in seconds, on a link of ``gbit_per_s``.

        >>> round(found.step_time(0.1), 3)
        0.127

        :param gbit_per_s: The speed of a rank's link in each direction, in Gbit/s.
        :param wire: ``"f32"``, ``"bf16"`` or ``"int8"``.
        :param block: Elements of a block, a power of two from 32 to 1024.
        """

        def seconds(bucket: Bucket) -> float:
            # A link carries both directions simultaneously, and sending overlaps with the scan.
            most = max(bucket.sent(wire, block), bucket.received(wire, block))
            return max(most * 8e-9 / gbit_per_s, bucket.scan)

        return self._overlapped(seconds)

    def ring_time(self, gbit_per_s: float) -> float:
        """Returns the duration of a step with a ring, in seconds, on a link of ``gbit_per_s``.

        >>> round(found.ring_time(0.1), 3)
        0.395

        :param gbit_per_s: The speed of a rank's link in each direction, in Gbit/s.
        """
        share = 2 * (self.world - 1) / self.world * WIRES["f32"] * (1 + _HEADERS / _PAYLOAD)
        return self._overlapped(lambda bucket: bucket.elements * share * 8e-9 / gbit_per_s)

    def _overlapped(self, seconds: Callable[[Bucket], float]) -> float:
        """Returns the duration of a step, in seconds.

        The transfer of a bucket starts once the bucket is ready and the link is free.
        """
        free = 0.0
        for bucket in self.buckets:
            free = max(free, bucket.ready) + seconds(bucket)
        return max(free, self.compute - self.after) + self.after

    def predict(self, gbit_per_s: float, wires: Iterable[str] = ("f32",)) -> Prediction:
        """Returns the best prediction for a link, over these wire types and all sizes of a block.

        >>> best = found.predict(0.1, ["f32", "bf16"])
        >>> best.wire, round(best.racksum, 3)
        ('bf16', 0.1)

        :param gbit_per_s: The speed of a rank's link in each direction, in Gbit/s.
        :param wires: Wire types to try: ``"f32"``, ``"bf16"``, ``"int8"``. All except f32
            round values.
        """
        choices = [(wire, block) for wire in wires for block in BLOCKS]
        # Among equally fast choices, prefer the larger block, which costs less work.
        wire, block = min(choices, key=lambda c: (round(self.step_time(gbit_per_s, *c), 6), -c[1]))
        return Prediction(
            gbit_per_s=gbit_per_s,
            racksum=self.step_time(gbit_per_s, wire, block),
            wire=wire,
            block=block,
            ring=self.ring_time(gbit_per_s),
        )

    def _bests(self, link: float) -> list[Prediction]:
        """Returns the best prediction without rounding, and the best of all if it differs."""
        both = self.predict(link), self.predict(link, tuple(WIRES))
        return list(dict.fromkeys(both))

    def to_json(self) -> str:
        """Returns the measurements and the predictions as JSON.

        >>> known = json.loads(found.to_json())
        >>> known["world"], known["ring_bytes"]
        (2, 4000000.0)
        """
        known = {
            **asdict(self),
            "sent_bytes": self.sent(),
            "received_bytes": self.received(),
            "ring_bytes": self.ring_bytes(),
            "predictions": [asdict(at) for link in self.links for at in self._bests(link)],
        }
        return json.dumps(known, indent=2)

    def __str__(self) -> str:
        """Returns a table of the buckets and a table of the links."""
        union = "union" if self.compared else "union if at random"
        lines = [
            f"{self._ranks()}, {self.compute * 1e3:.1f} ms of compute a step, blocks of "
            f"{DEFAULT_BLOCK}",
            f"{'bucket':>8}{'MB':>10}{'ready':>10}{'density':>10}  {union}",
        ]
        for i, bucket in enumerate(self.buckets):
            lines.append(
                f"{i:>8}{bucket.elements * 4 / 1e6:>10.2f}{bucket.ready * 1e3:>7.1f} ms"
                f"{bucket.density[DEFAULT_BLOCK]:>10.2%}  {bucket.union[DEFAULT_BLOCK]:.2%}"
                + ("  sparse" if bucket.sparse else "")
            )
        lines.append(
            f"a step sends {self.sent() / 1e6:.2f} MB and receives {self.received() / 1e6:.2f} MB; "
            f"a ring sends and receives {self.ring_bytes() / 1e6:.2f} MB"
        )
        lines.append(f"{'Gbit/s':>8}{'ring':>12}{'racksum':>12}{'faster':>8}  best")
        for link in self.links:
            for at in self._bests(link):
                lines.append(
                    f"{link:>8g}{at.ring * 1e3:>9.1f} ms{at.racksum * 1e3:>9.1f} ms"
                    f"{at.ring / at.racksum:>7.2f}x  {at.wire}, blocks of {at.block}"
                )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Writes a PNG plot of step times over link speeds.

        >>> found.plot("times.png")
        >>> Path("times.png").read_bytes()[1:4]
        b'PNG'

        :param path: The file to write.
        :raises ModuleNotFoundError: matplotlib is not installed.
        :raises OSError: The file cannot be written. An existing file stays unchanged.
        """
        figure = needed("matplotlib.figure", "Study.plot").Figure(
            figsize=(7, 4), layout="constrained"
        )
        axes = figure.subplots()
        links = [0.5 * 2 ** (i / 4) for i in range(37)]
        axes.loglog(links, [self.ring_time(link) * 1e3 for link in links], label="ring, f32")
        for wire in WIRES:
            times = [self.predict(link, [wire]).racksum * 1e3 for link in links]
            axes.loglog(links, times, label=f"racksum, {wire}")
        axes.axhline(self.compute * 1e3, color="grey", linestyle=":", label="compute")
        axes.set(xlabel="Gbit/s", ylabel="ms a step", title=self._ranks())
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        write_whole(Path(path), picture.getvalue())

    def _ranks(self) -> str:
        return f"{self.world} rank{'' if self.world == 1 else 's'}"


def study(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 5,
    world: int | None = None,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    links: Sequence[float] = (1.0, 10.0, 25.0, 100.0),
) -> Study:
    """Runs a few training steps and predicts the times of a step with racksum and with a ring.

    >>> model, loader = torch.nn.Linear(256, 1, bias=False), [torch.ones(4, 256)] * 8
    >>> found = racksum.torch.study(model, loader, lambda model, batch: model(batch).sum(), world=2)
    >>> found.world, [bucket.elements for bucket in found.buckets]
    (2, [256])

    After the steps, weights, gradients, buffers, the optimizer and torch's random state are
    restored. The random state of Python and numpy is not, nor is ``loader``.

    If there is a process group, all its ranks must call this together. Each rank runs its steps
    alone, and then the ranks compare their blocks. If one rank fails, all fail.

    :param model: The model, wrapped by DDP or not.
    :param loader: An iterable of batches. ``steps`` + 3 are taken: two to warm up, ``steps`` to
        time, and one whose gradients are examined.
    :param loss: A function of the model and a batch that returns the loss, a tensor.
    :param optimizer: An optimizer whose step is timed too. Its step must not need a closure.
    :param steps: Number of timed steps, 1 or more.
    :param world: Number of ranks to predict for; by default the group's, or 1 without a group.
    :param group: The ranks whose blocks and times are compared; by default the default group, if
        there is one.
    :param bucket_cap_mb: DDP's option, in MiB; defaults to the value of ``model`` if DDP already
        wraps it.
    :param links: Speeds of a rank's link to predict for, in Gbit/s.
    :return: The measurements, which ``print`` shows as a table.
    :raises racksum.BadArgument: An argument is invalid, the model or the optimizer cannot be
        studied, or another rank failed.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    world = ranks if world is None else world
    net = model.module if isinstance(model, DistributedDataParallel) else model

    def measured() -> tuple[Tensor, list[Look]]:
        _refuse_arguments(loss, steps, world, links)
        refuse(net, optimizer)
        with as_it_was(net, optimizer):
            made = Steps(model, loss, optimizer, bucket_cap_mb=bucket_cap_mb)
            looks = _watched(made, loader, steps)
        return made.times(), looks

    if ranks > 1 and group is None:
        group = dist.group.WORLD
    together = ranks > 1 and ranks == world
    times, looks, compared = _together(measured, group) if together else (*measured(), False)
    if compared:
        # All ranks wait for the slowest, so use the longest times.
        times = _most(times, device_of(net), group)
    compute, after, *readies = times.tolist()
    return Study(
        world=world,
        compute=compute,
        after=after,
        compared=compared,
        buckets=[
            _bucket(look, ready, device_of(net), group if compared else None, world)
            for look, ready in zip(looks, readies, strict=True)
        ],
        links=list(links),
    )


def _refuse_arguments(loss: object, steps: int, world: int, links: Sequence[float]) -> None:
    if not callable(loss):
        raise BadArgument(
            f"loss must be a function of the model and a batch, not {type(loss).__name__}"
        )
    if steps < 1:
        raise BadArgument(f"steps must be 1 or more, not {steps}")
    if world < 1:
        raise BadArgument(f"world must be 1 or more, not {world}")
    for link in links:
        if not 0 < link < math.inf:
            raise BadArgument(f"links must be finite and above 0 Gbit/s, not {link}")


def _together(
    measured: Callable[[], tuple[Tensor, list[Look]]], group: dist.ProcessGroup | None
) -> tuple[Tensor, list[Look], bool]:
    """Returns the measurements of this rank, and whether all ranks have the same buckets.

    If a rank failed, the others do not wait for it and raise too.
    """
    failed: Exception | None = None
    try:
        times, looks = measured()
        own: tuple[str | None, Any] = None, [look.parameters for look in looks]
    except Exception as error:
        failed = error
        own = str(error) or type(error).__name__, None
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    if failed is not None:
        raise failed
    for rank, (why, _) in enumerate(of_ranks):
        if why is not None:
            raise BadArgument(f"the study failed at rank {rank}: {why}")
    return times, looks, all(of_rank == own for of_rank in of_ranks)


def _watched(made: Steps, loader: Iterable[Any], steps: int) -> list[Look]:
    """Runs steps on batches, and returns the observations of the last step."""
    batches = iter(loader)
    try:
        for i in range(_WARM_UP + steps):
            made.step(next(batches), counts=i >= _WARM_UP)
        return made.look(next(batches))
    except StopIteration:
        raise BadArgument(
            f"the loader has fewer than {_WARM_UP + steps + 1} batches: {steps} to time, "
            f"{_WARM_UP} to warm up, and one whose gradients are examined; pass a longer loader, "
            "or fewer steps"
        ) from None


def _most(x: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the elementwise maximum over all ranks, on the host.

    :param device: The device to reduce on. The group may support only this type of device.
    """
    x = x.to(device)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x.cpu()


def _bucket(
    look: Look, ready: float, device: torch.device, group: dist.ProcessGroup | None, world: int
) -> Bucket:
    density, union = {}, {}
    for block, occupied in look.occupied.items():
        density[block] = occupied.float().mean().item() if len(occupied) else 0.0
        if group is None:
            union[block] = 1 - (1 - density[block]) ** world
        else:
            together = _most(occupied, device, group).float()
            union[block] = together.mean().item() if len(together) else 0.0
    return Bucket(
        elements=look.elements,
        sparse=look.sparse,
        ready=ready,
        scan=look.scan,
        density=density,
        union=union,
    )


def _wire_bytes(elements: float, wire: str, block: int) -> float:
    scale = 4 / block if wire == "int8" else 0.0
    return elements * (WIRES[wire] + scale) * (1 + _HEADERS / _PAYLOAD)
