"""What racksum would do for a model: measured on a few steps, which change nothing.

How times are predicted is told in ``docs/study.md``.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from racksum.errors import BadArgument
from racksum.extras import needed
from racksum.session import DEFAULT_BLOCK
from racksum.torch.compress import BLOCKS
from racksum.torch.steps import Look, Steps, device_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

__all__ = ["Bucket", "Prediction", "Study", "study"]

#: Bytes of an element on the wire, by the name of the wire type; int8 has a scale a block besides.
WIRES = {"f32": 4, "bf16": 2, "int8": 1}
#: Bytes of headers on a full datagram of 1500 bytes, and of payload.
_HEADERS, _PAYLOAD = 28 + 40, 1432
#: Steps before the first that counts: DDP makes its buckets anew after one.
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket of gradients, as DDP makes them."""

    elements: int
    sparse: bool
    #: Seconds from the start of a step until its gradients are there.
    ready: float
    #: Seconds that it takes to find which of its blocks are not zero.
    scan: float
    #: By size of block, the share of blocks that are not zero: of this rank, and of all ranks.
    density: dict[int, float]
    union: dict[int, float]

    def sent(self, wire: str, block: int) -> float:
        """Bytes that this rank sends of it, a step."""
        return _wire_bytes(self.elements * self.density[block], wire, block)

    def received(self, wire: str, block: int) -> float:
        """Bytes that it receives."""
        return _wire_bytes(self.elements * self.union[block], wire, block)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step takes on a link of so many Gbit/s."""

    gbit_per_s: float
    #: Seconds with racksum, at the best wire and size of block, and these.
    racksum: float
    wire: str
    block: int
    #: Seconds with a ring that sends each dense byte of f32.
    ring: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """What racksum would do for a model."""

    world: int
    #: Seconds of a step without communication, and how much of it comes after the gradients.
    compute: float
    after: float
    #: Whether the ranks' blocks were compared, for which all must have the same buckets; if not,
    #: the union is that of blocks which each rank has at random.
    compared: bool
    buckets: list[Bucket]
    links: list[float] = field(default_factory=lambda: [1.0, 10.0, 25.0, 100.0])

    def sent(self, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Bytes that this rank sends a step."""
        return sum(bucket.sent(wire, block) for bucket in self.buckets)

    def received(self, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Bytes that it receives."""
        return sum(bucket.received(wire, block) for bucket in self.buckets)

    def ring_bytes(self) -> float:
        """Bytes that it would send, and receive, in a ring."""
        elements = sum(bucket.elements for bucket in self.buckets)
        return 2 * (self.world - 1) / self.world * elements * WIRES["f32"]

    def step_time(self, gbit_per_s: float, wire: str = "f32", block: int = DEFAULT_BLOCK) -> float:
        """Seconds that a step takes with racksum."""

        def seconds(bucket: Bucket) -> float:
            # A link carries both ways at once, and what was scanned goes while the rest is.
            most = max(bucket.sent(wire, block), bucket.received(wire, block))
            return max(most * 8e-9 / gbit_per_s, bucket.scan)

        return self._overlapped(seconds)

    def ring_time(self, gbit_per_s: float) -> float:
        """Seconds that a step takes with a ring."""
        share = 2 * (self.world - 1) / self.world * WIRES["f32"] * (1 + _HEADERS / _PAYLOAD)
        return self._overlapped(lambda bucket: bucket.elements * share * 8e-9 / gbit_per_s)

    def _overlapped(self, seconds: Callable[[Bucket], float]) -> float:
        """A bucket goes when it is ready and those before it have gone; then comes the rest."""
        free = 0.0
        for bucket in self.buckets:
            free = max(free, bucket.ready) + seconds(bucket)
        return max(free, self.compute - self.after) + self.after

    def predict(self, gbit_per_s: float, wires: Iterable[str] = ("f32",)) -> Prediction:
        """The best that racksum does on a link, of these wires: others than f32 round."""
        choices = [(wire, block) for wire in wires for block in BLOCKS]
        # Of what is as good, the larger block costs less work.
        wire, block = min(choices, key=lambda c: (round(self.step_time(gbit_per_s, *c), 6), -c[1]))
        return Prediction(
            gbit_per_s=gbit_per_s,
            racksum=self.step_time(gbit_per_s, wire, block),
            wire=wire,
            block=block,
            ring=self.ring_time(gbit_per_s),
        )

    def _bests(self, link: float) -> list[Prediction]:
        """The best on a link without rounding, and with, unless f32 is the best of all."""
        both = self.predict(link), self.predict(link, tuple(WIRES))
        return list(dict.fromkeys(both))

    def to_json(self) -> str:
        """All of it, for programs."""
        known = {
            **asdict(self),
            "sent_bytes": self.sent(),
            "received_bytes": self.received(),
            "ring_bytes": self.ring_bytes(),
            "predictions": [asdict(at) for link in self.links for at in self._bests(link)],
        }
        return json.dumps(known, indent=2)

    def __str__(self) -> str:
        """A table of the buckets, and one of the links."""
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
            f"a ring {self.ring_bytes() / 1e6:.2f} MB"
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
        """Writes a picture (PNG) of step times against the link. Needs matplotlib."""
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
        _write_whole(Path(path), picture.getvalue())

    def _ranks(self) -> str:
        return f"{self.world} rank{'' if self.world == 1 else 's'}"


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file, or leaves what was there."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            file.write(content)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


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
    """Runs a few steps, and says what racksum would do for the model.

    Nothing is changed by them: weights, gradients, buffers, the optimizer and torch's random
    numbers are afterwards what they were; those of Python and of numpy are not put back. If there
    is a process group, all its ranks call this together: each makes its steps alone, and then they
    compare. If one of them fails, all do.

    :param model: The model, wrapped by DDP or not.
    :param loader: What gives batches; ``steps`` + 3 are taken: two to warm up, and the last to look
        at its gradients.
    :param loss: The loss of the model on a batch.
    :param optimizer: Whose step is timed as well; not one that needs a closure.
    :param world: How many ranks to predict for; by default those of the group.
    :param group: The ranks whose blocks and times are compared; by default the default group, if
        there is one.
    :param bucket_cap_mb: As of DDP; by default that of the model, if DDP wraps it.
    :param links: Gbit/s of a rank's link, to predict for.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    world = ranks if world is None else world
    net = model.module if isinstance(model, DistributedDataParallel) else model

    def measured() -> tuple[Tensor, list[Look]]:
        _refuse_arguments(loss, steps, world, links)
        _refuse(net, optimizer)
        with _as_it_was(net, optimizer):
            made = Steps(model, loss, optimizer, bucket_cap_mb=bucket_cap_mb)
            looks = _watched(made, loader, steps)
        return made.times(), looks

    if ranks > 1 and group is None:
        group = dist.group.WORLD
    together = ranks > 1 and ranks == world
    times, looks, compared = _together(measured, group) if together else (*measured(), False)
    if compared:
        # All wait for the slowest.
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
            f"loss is a function of the model and a batch, and not {type(loss).__name__}"
        )
    if steps < 1:
        raise BadArgument(f"steps is 1 or more, and not {steps}")
    if world < 1:
        raise BadArgument(f"world is 1 or more, and not {world}")
    for link in links:
        if not 0 < link < math.inf:
            raise BadArgument(f"a link has some Gbit/s, and not {link}")


def _refuse(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses what a study cannot make steps of."""
    if any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
        raise BadArgument("the model has parameters without a shape: run it on a batch first")
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadArgument(
                f"optimizer is a torch.optim.Optimizer, and not {type(optimizer).__name__}"
            )
        if any(_has_optimizer(value) for value in vars(optimizer).values()):
            raise BadArgument(
                f"{type(optimizer).__name__} has an optimizer within, and may keep what cannot be "
                "put back: study without an optimizer"
            )
        try:
            inspect.signature(optimizer.step).bind()
        except TypeError:
            raise BadArgument(
                f"{type(optimizer).__name__} needs a closure to step: study without an optimizer"
            ) from None


def _has_optimizer(value: object) -> bool:
    """Whether this is an optimizer, or a collection with one in it, however deep."""
    due, seen = [value], set[int]()
    while due:
        item = due.pop()
        if isinstance(item, torch.optim.Optimizer):
            return True
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            due += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            due += item
    return False


def _together(
    measured: Callable[[], tuple[Tensor, list[Look]]], group: dist.ProcessGroup | None
) -> tuple[Tensor, list[Look], bool]:
    """What this rank has measured, and whether all ranks have the same buckets.

    If one of them has failed, the others do not wait for it, but fail as well.
    """
    failed: Exception | None = None
    try:
        times, looks = measured()
        said: tuple[str | None, Any] = None, [look.parameters for look in looks]
    except Exception as error:
        failed = error
        said = str(error) or type(error).__name__, None
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, said, group=group)
    if failed is not None:
        raise failed
    for rank, (why, _) in enumerate(of_ranks):
        if why is not None:
            raise BadArgument(f"rank {rank} could not be studied: {why}")
    return times, looks, all(of_rank == said for of_rank in of_ranks)


def _watched(made: Steps, loader: Iterable[Any], steps: int) -> list[Look]:
    """Makes steps on batches, the last of which is looked at."""
    batches = iter(loader)
    try:
        for i in range(_WARM_UP + steps):
            made.step(next(batches), counts=i >= _WARM_UP)
        return made.look(next(batches))
    except StopIteration:
        raise BadArgument(
            f"the loader has no {_WARM_UP + steps + 1} batches: {_WARM_UP} are for warming up, and "
            "one is for looking at its gradients"
        ) from None


def _most(x: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    """The greatest of all ranks, elementwise. A group may be of one kind of device only."""
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


@contextmanager
def _as_it_was(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Puts back what steps change."""
    # What a module holds, too: forward may put other tensors in the places of its buffers.
    held = [places for module in net.modules() for places in (module._parameters, module._buffers)]
    before = [dict(places) for places in held]
    tensors = [*net.parameters(), *net.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [parameter.grad for parameter in net.parameters()]
    try:
        device = device_of(net)
        with (
            torch.random.fork_rng([device] if device.type != "cpu" else None),
            _on_a_copy(optimizer),
        ):
            yield
    finally:
        for places, own in zip(held, before, strict=True):
            places.clear()
            places.update(own)  # type: ignore[arg-type]
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _on_a_copy(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Has an optimizer work on copies of what it keeps.

    What it loads of a ``state_dict`` it gives the types of its parameters.
    """
    if optimizer is None:
        yield
        return
    groups = optimizer.param_groups
    state, kept = dict(optimizer.state), [dict(group) for group in groups]
    # Parameters are no part of it.
    memo = {id(p): p for group in groups for p in group["params"]}
    try:
        optimizer.state.update(copy.deepcopy(state, memo))
        for group in groups:
            group.update(copy.deepcopy(group, memo))
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, own in zip(groups, kept, strict=True):
            group.clear()
            group.update(own)
