"""Torch futures of ops, which threads complete. Importing this module imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.futures import Future

from racksum.threads import do_waiting

__all__ = ["as_exception", "future_of", "new_future", "own_streams_on"]


class _Ends(Protocol):
    """An op that ends with a result."""

    def wait(self) -> Any: ...


def new_future(devices: Iterable[torch.device]) -> Future[Any]:
    """Returns a future of tensors on these devices. Its waiters wait for the devices' streams."""
    return Future(devices=_with_streams(devices))


def future_of(op: _Ends, devices: Iterable[torch.device] = ()) -> Future[Any]:
    """Returns a future of an op's result, which a thread completes."""
    future = new_future(devices)

    def complete() -> None:
        try:
            with own_streams_on(devices):
                future.set_result(op.wait())
        except BaseException as error:
            future.set_exception(as_exception(error))

    do_waiting(complete)
    return future


def as_exception(error: BaseException) -> Exception:
    """Returns an exception for the waiters of an op that failed on another thread.

    A panic of the extension is not an ``Exception``, so it is wrapped in a ``RuntimeError``.
    """
    if isinstance(error, Exception):
        return error
    raised = RuntimeError(f"ended by {error!r}")
    raised.__cause__ = error
    return raised


@contextlib.contextmanager
def own_streams_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """Runs the block on new streams, so that training streams of GPUs do not wait for it."""
    with contextlib.ExitStack() as stack:
        for device in _with_streams(devices):
            module = torch.get_device_module(device)
            stack.enter_context(module.device(device))
            stack.enter_context(module.stream(module.Stream(device)))
        yield


def _with_streams(devices: Iterable[torch.device]) -> list[Any]:
    return [device for device in devices if device.type != "cpu"]
