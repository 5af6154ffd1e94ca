"""Layer profiles, from which the simulator knows how a model computes and what it reduces.

In the examples of this module ``profiled`` is a profile of a model with two buckets.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from racksum.errors import BadArgument
from racksum.files import check_writable, write_whole
from racksum.torch.clock import Clock, device_of
from racksum.torch.passes import Passes, total_of
from racksum.torch.restore import as_it_was, refuse
from racksum.torch.roofline import Estimate, Roofline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Profile", "ProfiledTensor", "profile"]

#: Bytes in DDP's MB.
_MB = 1 << 20
#: DDP's default bucket size, in its MB. DDP also defines the default size of the first bucket.
_BUCKET_MB = 25
#: The limits of the simulator: sizes of an element, numbers of tensors and of elements of one, and
#: microseconds, 150 days.
_ELEMENT_BYTES = (1, 2, 4, 8)
_MOST_TENSORS = 1 << 16
_MOST_ELEMENTS = 1 << 40
_LONGEST_US = 150 * 86_400 * 1e6


@dataclass(frozen=True, kw_only=True)
class ProfiledTensor:
    """A tensor that one all-reduce sums, a bucket of DDP, and the times of the layers in it.

    >>> front = profiled.tensors[0]
    >>> front.name, front.elements, front.forward_us
    ('embed.weight .. block.0.bias', 1000000, 120.5)
    """

    #: The names of its first and its last parameter, in the order of the forward pass.
    name: str
    #: The number of elements.
    elements: int
    #: Bytes of an element.
    element_bytes: int
    #: Microseconds of the forward pass.
    forward_us: float
    #: Microseconds of the backward pass.
    backward_us: float
    #: Microseconds of the optimizer's step.
    update_us: float

    def __post_init__(self) -> None:
        if not self.name:
            raise BadArgument("a tensor's name is empty; name it")
        if not 1 <= self.elements <= _MOST_ELEMENTS:
            raise BadArgument(
                f"tensor {self.name!r} has {self.elements} elements; it needs 1 to {_MOST_ELEMENTS}"
            )
        if self.element_bytes not in _ELEMENT_BYTES:
            raise BadArgument(
                f"tensor {self.name!r} has elements of {self.element_bytes} bytes; they must have "
                "1, 2, 4 or 8"
            )
        for name in ("forward_us", "backward_us", "update_us"):
            time = getattr(self, name)
            if not 0 <= time <= _LONGEST_US:
                raise BadArgument(
                    f"{name} of tensor {self.name!r} is {time}; times must be from 0 to "
                    f"{_LONGEST_US:g} (150 days); measure again, or estimate with other rates"
                )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A layer profile, which :func:`profile` makes. ``print`` shows it as a table.

    >>> print(str(profiled).splitlines()[0])
    Net on cpu, measured: 2 tensors, 4.80 MB, 1.12 ms of compute
    """

    #: The name of the model.
    name: str
    #: The device that the times are of.
    device: str
    #: The origin of the times.
    times: Literal["measured", "estimated"]
    #: The tensors that are reduced, in the order of the forward pass.
    tensors: list[ProfiledTensor]
    #: A comment for the file: what the times were obtained with.
    comment: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise BadArgument("the profile's name is empty; name the model", ("name",))
        if self.times not in ("measured", "estimated"):
            raise BadArgument(f"times must be measured or estimated, not {self.times!r}")
        if not self.tensors:
            raise BadArgument("the profile has no tensors; it needs one or more", ("tensors",))
        if len(self.tensors) > _MOST_TENSORS:
            raise BadArgument(
                f"the profile has {len(self.tensors)} tensors; the limit is {_MOST_TENSORS}, so "
                "make larger buckets",
                ("tensors",),
            )
        name, count = Counter(tensor.name for tensor in self.tensors).most_common(1)[0]
        if count > 1:
            raise BadArgument(f"{count} tensors are called {name!r}; give each its own name")

    def to_toml(self) -> str:
        """Returns the profile as TOML, the format that the simulator reads.

        >>> print(profiled.to_toml().partition("element_bytes")[0])
        # Medians of 5 repeats, updates by SGD.
        name = "Net"
        device = "cpu"
        times = "measured"
        <BLANKLINE>
        [[tensors]]
        name = "embed.weight .. block.0.bias"
        elements = 1000000
        <BLANKLINE>
        """
        lines = [f"# {_quoted(line)[1:-1]}" for line in self.comment.splitlines()]
        lines += [f"{key} = {_quoted(getattr(self, key))}" for key in ("name", "device", "times")]
        for tensor in self.tensors:
            lines += ["", "[[tensors]]"]
            lines += [f"{f.name} = {_value(getattr(tensor, f.name))}" for f in fields(tensor)]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the profile to a file, as TOML.

        >>> profiled.save("net.toml")
        >>> Path("net.toml").read_text() == profiled.to_toml()
        True

        :param path: The file to write.
        :raises OSError: The file cannot be written. An existing file stays unchanged.
        """
        with _explained(path):
            write_whole(Path(path), self.to_toml().encode())

    def __str__(self) -> str:
        """Returns a line about the model, and a table of the tensors."""
        compute = sum(tensor.forward_us + tensor.backward_us for tensor in self.tensors)
        size = sum(tensor.elements * tensor.element_bytes for tensor in self.tensors)
        count = len(self.tensors)
        return "\n".join(
            [
                f"{self.name} on {self.device}, {self.times}: {count} "
                f"tensor{'' if count == 1 else 's'}, {size / 1e6:.2f} MB, {compute / 1e3:.2f} ms "
                "of compute",
                f"{'MB':>10}{'forward':>13}{'backward':>13}{'update':>13}  tensor",
                *(
                    f"{tensor.elements * tensor.element_bytes / 1e6:>10.2f}"
                    f"{tensor.forward_us / 1e3:>10.3f} ms{tensor.backward_us / 1e3:>10.3f} ms"
                    f"{tensor.update_us / 1e3:>10.3f} ms  {tensor.name}"
                    for tensor in self.tensors
                ),
            ]
        )


def profile(
    model: nn.Module,
    inputs: Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    path: str | Path | None = None,
    name: str | None = None,
    bucket_mb: float | None = None,
    first_bucket_mb: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int = 5,
    estimate: Estimate | None = None,
) -> Profile:
    """Times a model's passes, bucket by bucket, and returns a layer profile for the simulator.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> made = racksum.torch.profile(model, torch.ones(16, 8), path="mlp.toml", name="mlp")
    >>> [(tensor.name, tensor.elements) for tensor in made.tensors]
    [('0.weight .. 2.bias', 46)]

    The buckets are those that DDP uses from its second step on. Parameters that are shared between
    layers count once, and frozen ones do not count. A sparse gradient counts all its elements.

    The forward time of a bucket runs until the first layer of the next bucket begins, and its
    backward time until all its gradients are complete. So the times of layers without parameters
    count for the layer before them, and the time of the loss counts for the last bucket. The update
    time is that of a step in which only this bucket has gradients.

    The model runs in its present mode, so call ``model.train()`` first. Weights, gradients,
    buffers, the optimizer and torch's random state are restored. No aggregator is needed. With
    several ranks, each makes a profile of its own; pass ``path`` at one of them.

    :param model: The model, wrapped by DDP or not.
    :param inputs: Inputs of the model on its device: a tensor, a tuple or list of positional
        arguments, or a dict of keyword arguments.
    :param loss: A function of the model's output that returns the loss. By default the loss is the
        output's ``loss`` if it has one, or else the sum of its elements.
    :param path: The file to write the profile to, if any.
    :param name: The name of the model in the profile; by default its class.
    :param bucket_mb: DDP's ``bucket_cap_mb``, in MiB; defaults to the value of ``model`` if DDP
        already wraps it, or else to 25.
    :param first_bucket_mb: The size of the bucket that is reduced first. As in DDP, it defaults to
        1 MiB, or to ``bucket_mb`` if that is passed.
    :param optimizer: The optimizer whose updates are timed; by default plain SGD. Its step must not
        need a closure.
    :param repeats: Number of timed passes, 1 or more. The profile has their medians.
    :param estimate: The rates of a device. Times are then estimated for it from the FLOPs and bytes
        of each operation, and the model may be on any device, also ``meta``.
    :return: The profile.
    :raises racksum.BadArgument: An argument is invalid, the model cannot be timed, or it does not
        accept the inputs.
    :raises OSError: The file cannot be written. An existing file stays unchanged.
    """
    _refuse_arguments(loss, repeats, estimate)
    net = model.module if isinstance(model, DistributedDataParallel) else model
    _refuse_model(net)
    refuse(net, optimizer)
    names, sparse = _reduced(net)
    limits = _limits(model, bucket_mb, first_bucket_mb)
    optimizer = optimizer or torch.optim.SGD(list(names), lr=1e-3)
    _refuse_optimizer(optimizer, names)
    device = device_of(net)
    if estimate is None:
        _refuse_devices(names, device)
    if path is not None:
        with _explained(path):
            check_writable(Path(path))
    clock = Clock(device) if estimate is None else Roofline(estimate)
    with as_it_was(net, optimizer), clock if isinstance(clock, Roofline) else nullcontext():
        passes = Passes(net, inputs, loss or total_of, names, clock)
        buckets = _buckets(passes.order(), limits, sparse)
        # Estimates are the same each time.
        rounds = repeats if estimate is None else 1
        times = passes.times(buckets, rounds)
        updates = passes.updates(buckets, optimizer, rounds)
    made = Profile(
        name=type(net).__name__ if name is None else name,
        device=_name_of(device) if estimate is None else estimate.device,
        times="measured" if estimate is None else "estimated",
        tensors=[
            _tensor(bucket, names, *both, update)
            for bucket, both, update in zip(buckets, times, updates, strict=True)
        ],
        comment=_comment(optimizer, repeats, estimate),
    )
    if path is not None:
        made.save(path)
    return made


def _refuse_arguments(loss: object, repeats: object, estimate: object) -> None:
    if loss is not None and not callable(loss):
        raise BadArgument(
            f"loss must be a function of the model's output, not {type(loss).__name__}", ("loss",)
        )
    if not isinstance(repeats, int) or repeats < 1:
        raise BadArgument(
            f"repeats must be a whole number of 1 or more, not {repeats!r}", ("repeats",)
        )
    if estimate is not None and not isinstance(estimate, Estimate):
        raise BadArgument(
            f"estimate must be a racksum.torch.Estimate, not {type(estimate).__name__}",
            ("estimate",),
        )


def _refuse_model(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise BadArgument(f"model must be a torch.nn.Module, not {type(net).__name__}", ("model",))
    for name, module in net.named_modules():
        which = f"layer {name!r}" if name else "the model"
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            raise BadArgument(
                f"{which} is compiled, so its layers cannot be timed one by one; pass the model "
                "as it was before it was compiled",
                ("model",),
            )
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters(False)):
            raise BadArgument(
                f"the parameters of {which} are sharded, which DDP does not reduce; pass the model "
                "as it was before it was sharded",
                ("model",),
            )


def _reduced(net: nn.Module) -> tuple[dict[Tensor, str], set[Tensor]]:
    """Returns the parameters that DDP reduces with their names, and those with sparse gradients."""
    ignored = getattr(net, "_ddp_params_and_buffers_to_ignore", ())
    names: dict[Tensor, str] = {}
    sparse: set[Tensor] = set()
    for path, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # DDP names the parameters of the model itself with a dot too.
            whole = f"{path}.{name}"
            counts = parameter.requires_grad and parameter.numel() and whole not in ignored
            if counts and parameter not in names:
                names[parameter] = whole.removeprefix(".")
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                    sparse.add(parameter)
    if not names:
        raise BadArgument(
            "no parameter of the model requires gradients, so DDP would reduce nothing; pass a "
            "model with trainable parameters",
            ("model",),
        )
    return names, sparse


def _refuse_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, name in names.items():
        if parameter not in held:
            raise BadArgument(
                f"the optimizer does not update parameter {name!r} of the model; pass an optimizer "
                "of this model's parameters, or freeze this one with requires_grad_(False)",
                ("optimizer",),
            )


def _refuse_devices(names: dict[Tensor, str], device: torch.device) -> None:
    """Raises :class:`BadArgument` if one clock cannot time a model whose first device this is."""
    for parameter, name in names.items():
        if parameter.device != device:
            raise BadArgument(
                f"parameter {name!r} is on {parameter.device}, but the model begins on {device}; "
                "move the model to one device, or pass estimate=",
                ("model",),
            )
    if device.type == "meta":
        raise BadArgument(
            "the model is on the meta device, which computes nothing; pass estimate=, or move the "
            "model to another device",
            ("model",),
        )


def _limits(model: nn.Module, bucket_mb: float | None, first_mb: float | None) -> list[int]:
    """Returns the sizes of the first bucket and of later ones, in bytes, as DDP chooses them."""
    for name, size in (("bucket_mb", bucket_mb), ("first_bucket_mb", first_mb)):
        if size is not None and not 0 < size < math.inf:
            raise BadArgument(f"{name} must be finite and above 0, not {size}", (name,))
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    if isinstance(model, DistributedDataParallel):
        if model.find_unused_parameters and not model.static_graph:
            raise BadArgument(
                "DDP wraps the model with find_unused_parameters=True, so its buckets do not "
                "follow the backward pass; pass model.module",
                ("model",),
            )
        if bucket_mb is None and first_mb is None and model.bucket_bytes_cap_list:
            return list(model.bucket_bytes_cap_list)
        size = model.bucket_bytes_cap
        first = first if model.bucket_bytes_cap_default else size
    else:
        size = _BUCKET_MB * _MB
    if bucket_mb is not None:
        first = size = int(bucket_mb * _MB)
    return [first if first_mb is None else int(first_mb * _MB), size]


def _buckets(order: list[Tensor], limits: list[int], sparse: set[Tensor]) -> list[list[Tensor]]:
    """Returns the buckets that DDP makes, in the order of the forward pass.

    :param order: The parameters in the order in which their gradients are complete.
    """
    indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        order, limits, [parameter in sparse for parameter in order], list(range(len(order)))
    )
    return [[order[i] for i in reversed(bucket)] for bucket in reversed(indices)]


def _tensor(
    bucket: list[Tensor],
    names: dict[Tensor, str],
    forward: float,
    backward: float,
    update: float,
) -> ProfiledTensor:
    """Returns the tensor of a bucket, whose times are in seconds."""
    return ProfiledTensor(
        name=" .. ".join(dict.fromkeys((names[bucket[0]], names[bucket[-1]]))),
        elements=sum(parameter.numel() for parameter in bucket),
        element_bytes=bucket[0].element_size(),
        forward_us=_micros(forward),
        backward_us=_micros(backward),
        update_us=_micros(update),
    )


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    module = torch.get_device_module(device)
    # Some backends have no names for their devices.
    return str(getattr(module, "get_device_name", lambda it: it.type)(device))


def _comment(optimizer: torch.optim.Optimizer, repeats: int, estimate: Estimate | None) -> str:
    updates = f"updates by {type(optimizer).__name__}, torch {torch.__version__}."
    if estimate is None:
        return f"Medians of {repeats} repeat{'' if repeats == 1 else 's'}, {updates}"
    return (
        f"Not measured, but estimated for {estimate.flops_per_s:g} FLOP/s and "
        f"{estimate.bytes_per_s:g} byte/s, {updates}"
    )


def _micros(seconds: float) -> float:
    """Returns microseconds, rounded to the simulator's picoseconds."""
    return round(seconds * 1e6, 6)


def _quoted(text: str) -> str:
    """Returns a TOML string. JSON escapes all that TOML must, except DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return _quoted(value)
    # The numbers of numpy are represented otherwise.
    return str(int(value)) if isinstance(value, Integral) else repr(float(value))


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Makes errors of a file name the path that the user passed, and say what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the profile: {error.strerror}; pass a path in a folder that you can "
            "write to",
            str(path),
        ) from error
