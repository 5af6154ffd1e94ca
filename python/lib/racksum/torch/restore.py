"""Restores a model, its optimizer and torch's random state after steps that measure them."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from racksum.errors import BadArgument
from racksum.torch.clock import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["as_it_was", "refuse"]


@contextmanager
def as_it_was(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restores the state that the steps in the block change."""
    # Restore the references of modules too, because forward may replace a buffer with a new tensor.
    held = [places for module in net.modules() for places in (module._parameters, module._buffers)]
    before = [dict(places) for places in held]
    tensors = [*net.parameters(), *net.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [parameter.grad for parameter in net.parameters()]
    try:
        device = device_of(net)
        with (
            torch.random.fork_rng(None if device.type in ("cpu", "meta") else [device]),
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
    """Makes an optimizer work on copies of its state, and restores the originals.

    A ``state_dict`` would not do: an optimizer converts the state that it loads to the dtypes of
    its parameters.
    """
    if optimizer is None:
        yield
        return
    groups = optimizer.param_groups
    state, kept = dict(optimizer.state), [dict(group) for group in groups]
    # Do not copy the parameters.
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


def refuse(net: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises :class:`BadArgument` if a model cannot be stepped, or an optimizer not restored."""
    if any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
        raise BadArgument("the model has lazy parameters without a shape; run it on a batch first")
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadArgument(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if any(_has_optimizer(value) for value in vars(optimizer).values()):
            raise BadArgument(
                f"{type(optimizer).__name__} contains another optimizer and may have state that "
                "cannot be restored; pass no optimizer"
            )
        try:
            inspect.signature(optimizer.step).bind()
        except TypeError:
            raise BadArgument(
                f"{type(optimizer).__name__} needs a closure to step; pass no optimizer"
            ) from None


def _has_optimizer(value: object) -> bool:
    """Returns whether a value is an optimizer, or a collection that contains one at any depth."""
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
