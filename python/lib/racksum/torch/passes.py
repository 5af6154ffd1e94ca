"""Timed passes of a model, cut where the buckets of its gradients begin and end.

The simulator that reads a profile computes bucket after bucket. In the forward pass a bucket's
layers wait for its all-reduce, and in the backward pass its all-reduce waits for its gradients. So
the passes are cut at these moments:

- The forward time of a bucket ends when the first layer of a later bucket begins.
- The backward time of a bucket ends when its gradients, and those of all later buckets, are
  complete. DDP starts the all-reduces in this order too.

So layers without parameters count for the bucket of the layer before them, in both passes. What
precedes the first layer counts for the first bucket, and the loss counts for the last.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from racksum.errors import BadArgument, Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    Buckets = Sequence[Sequence[Tensor]]

__all__ = ["Passes", "Watch", "total_of"]


class Watch(Protocol):
    """A clock of the work of a device."""

    def mark(self) -> Any:
        """Returns a mark of the moment at which all work that was started so far is done."""

    def settle(self) -> None:
        """Waits until the device has no work left."""

    def seconds(self, one: Any, other: Any) -> float:
        """Returns the time from one mark to the other, in seconds."""


class Passes:
    """Forward and backward passes of a model, and updates of its parameters.

    :param net: The model.
    :param inputs: A tensor, a tuple or list of positional arguments, or a mapping of keyword
        arguments.
    :param loss: Returns the loss for an output of the model.
    :param names: The parameters whose gradients are reduced, and their names.
    :param watch: The clock.
    """

    def __init__(
        self,
        net: nn.Module,
        inputs: Any,
        loss: Callable[[Any], Tensor],
        names: dict[Tensor, str],
        watch: Watch,
    ) -> None:
        self._net = net
        self._inputs = inputs
        self._loss = loss
        self._names = names
        self._watch = watch
        self._layers: dict[nn.Module, list[Tensor]] = {}

    def order(self) -> list[Tensor]:
        """Runs a pass, and returns the parameters in the order in which gradients are complete.

        The pass also shows which modules are layers, whose beginning later passes record.
        """
        called = _Called(self._net)
        with called.watched():
            arrived = self._run().arrived
        missing = [name for parameter, name in self._names.items() if parameter not in arrived]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadArgument(
                f"backward computes no gradient for parameter {missing[0]!r}{more}, so DDP would "
                "fail; pass inputs or a loss that use it, or freeze it with requires_grad_(False)"
            )
        self._layers = called.layers(self._names)
        return list(arrived)

    def times(self, buckets: Buckets, repeats: int) -> list[tuple[float, float]]:
        """Returns the median seconds of forward and of backward for each bucket.

        Call :meth:`order` first.

        :param buckets: The parameters of each bucket, in the order of the forward pass.
        :param repeats: The number of passes, after one to warm up.
        """
        self._run()
        runs = [self._cut(self._run(), buckets) for _ in range(repeats)]
        return [
            (statistics.median(t[0] for t in of_bucket), statistics.median(t[1] for t in of_bucket))
            for of_bucket in zip(*runs, strict=True)
        ]

    def updates(
        self, buckets: Buckets, optimizer: torch.optim.Optimizer, repeats: int
    ) -> list[float]:
        """Returns the median seconds of the optimizer's step on each bucket alone.

        The steps use the gradients of the last pass, and the parameters of other buckets have none.
        """
        gradients = {parameter: parameter.grad for bucket in buckets for parameter in bucket}
        for parameter, gradient in gradients.items():
            if gradient is None:
                raise BadArgument(
                    f"parameter {self._names[parameter]!r} has no gradient after the last pass; "
                    "remove the hook that clears it, or make each pass use the parameter"
                )
            parameter.grad = None
        seconds: list[list[float]] = [[] for _ in buckets]
        # The first round creates the optimizer's state.
        for _ in range(1 + repeats):
            for bucket, of_bucket in zip(buckets, seconds, strict=True):
                for parameter in bucket:
                    parameter.grad = gradients[parameter]
                self._watch.settle()
                start = self._watch.mark()
                optimizer.step()
                end = self._watch.mark()
                self._watch.settle()
                of_bucket.append(self._watch.seconds(start, end))
                for parameter in bucket:
                    parameter.grad = None
        return [statistics.median(of_bucket[1:]) for of_bucket in seconds]

    def _run(self) -> _Run:
        """Runs a forward and a backward pass."""
        for parameter in self._net.parameters():
            parameter.grad = None
        inputs = self._copied_inputs()
        watch = self._watch
        with ExitStack() as hooks, torch.enable_grad():
            begun: dict[nn.Module, Any] = {}
            arrived: dict[Tensor, Any] = {}

            def begins(layer: nn.Module, _: Any) -> None:
                # Backward calls layers again to recompute their activations.
                if layer not in begun:
                    begun[layer] = watch.mark()

            def arrives(parameter: Tensor) -> None:
                # A gradient that arrives in parts is complete with the last.
                arrived.pop(parameter, None)
                arrived[parameter] = watch.mark()

            for layer in self._layers:
                hooks.callback(layer.register_forward_pre_hook(begins, prepend=True).remove)
            for reduced in self._names:
                register: Any = reduced.register_post_accumulate_grad_hook
                hooks.callback(register(arrives).remove)
            watch.settle()
            start = watch.mark()
            loss = self._loss_of(self._output(inputs))
            middle = watch.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            end = watch.mark()
            watch.settle()
        return _Run(start, begun, middle, arrived, end)

    def _copied_inputs(self) -> Any:
        """Returns copies of the inputs without their graph. The model may write to them."""

        def copied(x: Any) -> Any:
            return x.detach().clone() if isinstance(x, torch.Tensor) else x

        if isinstance(self._inputs, Mapping):
            return {name: tree_map(copied, x) for name, x in self._inputs.items()}
        return tree_map(copied, self._inputs)

    def _output(self, inputs: Any) -> Any:
        try:
            if isinstance(inputs, dict):
                return self._net(**inputs)
            # A named tuple, such as a packed sequence, is a single argument.
            return self._net(*inputs) if type(inputs) in (tuple, list) else self._net(inputs)
        except (Error, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise BadArgument(
                f"the model's forward pass failed on the inputs, {_described(inputs)}: "
                f"{type(error).__name__}: {error}; pass inputs as the model takes them: a tensor, "
                "a tuple of positional arguments, or a dict of keyword arguments, on its device"
            ) from error

    def _loss_of(self, output: Any) -> Tensor:
        loss = self._loss(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise BadArgument(
                f"loss must return a tensor of one element, not {_described(loss)}; reduce it, for "
                "example with .mean()"
            )
        if not loss.requires_grad:
            raise BadArgument("the loss depends on no parameter that requires gradients")
        return loss

    def _cut(self, run: _Run, buckets: Buckets) -> list[tuple[float, float]]:
        """Returns the seconds of forward and of backward for each bucket."""
        place = {parameter: i for i, bucket in enumerate(buckets) for parameter in bucket}
        count, watch = len(buckets), self._watch
        forward = watch.seconds(run.start, run.loss)
        # For each bucket: the moment at which one of its layers begins first.
        first = [forward] * count
        for layer, mark in run.begun.items():
            i = max(place[parameter] for parameter in self._layers[layer])
            first[i] = min(first[i], watch.seconds(run.start, mark))
        last = [0.0] * count
        for parameter, mark in run.arrived.items():
            i = place[parameter]
            last[i] = max(last[i], watch.seconds(run.loss, mark))
        starts = [*accumulate(reversed(first), min)][::-1]
        dones = [*accumulate(reversed(last), max)][::-1]
        starts[0], dones[0] = 0.0, watch.seconds(run.loss, run.end)
        starts.append(forward)
        dones.append(0.0)
        return [(starts[i + 1] - starts[i], dones[i] - dones[i + 1]) for i in range(count)]


def total_of(output: Any) -> Tensor:
    """Returns the loss that a model's output has, or the sum of the output's elements."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    parts = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not parts:
        raise BadArgument(
            f"the model's output, {_described(output)}, has no tensor that requires gradients; "
            "pass loss=, a function of the output that returns the loss"
        )
    return torch.stack([x.sum() for x in parts]).sum()


class _Run(NamedTuple):
    """The marks of a forward and a backward pass."""

    start: Any
    #: For each layer, when it first began.
    begun: dict[nn.Module, Any]
    #: When the loss was computed.
    loss: Any
    #: For each parameter, when its gradient was complete.
    arrived: dict[Tensor, Any]
    end: Any


class _Called:
    """The modules that a pass calls, and the calls inside each of them."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        self._running: list[nn.Module] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Records the calls of modules in the block."""
        with ExitStack() as hooks:
            for module in self._net.modules():
                before = module.register_forward_pre_hook(self._begin, prepend=True)
                after = module.register_forward_hook(self._end, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._inside.setdefault(module, set())
        for outer in self._running:
            self._inside[outer].add(module)
        self._running.append(module)

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def layers(self, parameters: Iterable[Tensor]) -> dict[nn.Module, list[Tensor]]:
        """Returns the innermost modules that use parameters, each with these parameters.

        A module that is never called, such as ``out_proj`` in ``nn.MultiheadAttention``, lends its
        parameters to the module around it. A module that has parameters and calls other layers is
        no layer: nothing shows when it uses its own parameters.
        """
        reduced, modules = set(parameters), dict(self._net.named_modules())
        users: dict[nn.Module, list[Tensor]] = defaultdict(list)
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in reduced]
            if own:
                while modules[name] not in self._inside:
                    name = name.rpartition(".")[0]  # noqa: PLW2901
                users[modules[name]] += own
        return {
            module: own
            for module, own in users.items()
            if not (self._inside[module] - {module}) & users.keys()
        }


def _described(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        shape = "x".join(str(size) for size in x.shape)
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {shape or '()'}"
    if isinstance(x, Mapping):
        return "a dict of " + (", ".join(map(str, x)) or "nothing")
    if type(x) in (tuple, list):
        return f"a {type(x).__name__} of " + (", ".join(map(_described, x)) or "nothing")
    return f"of type {type(x).__name__}"
