"""Torch futures of ops, completed by background threads. Importing this module imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.futures import Future

from racksum.threads import do_waiting

__all__ = ["as_exception", "future_of", "new_future", "own_streams_on"]


def new_future(devices: Iterable[torch.device]) -> Future[Any]:
    """Returns a future of tensors on these devices. Waiting for it synchronizes their streams."""
    return Future(devices=_with_streams(devices))


def future_of(wait: Callable[[], Any], devices: Iterable[torch.device] = ()) -> Future[Any]:
    """Returns a future of an op's result. Another thread completes it.

    :param wait: Waits for the op to end and returns its result.
    :param devices: The devices of the tensors in the result.
    """
    future = new_future(devices)

    def complete() -> None:
        try:
            with own_streams_on(devices):
                future.set_result(wait())
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
    raised = RuntimeError(f"the op ended with {error!r}")
    raised.__cause__ = error
    return raised


@contextlib.contextmanager
def own_streams_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """Runs the block on new GPU streams, so that the caller's streams do not wait for it."""
    with contextlib.ExitStack() as stack:
        for device in _with_streams(devices):
            module = torch.get_device_module(device)
            stack.enter_context(module.device(device))
            stack.enter_context(module.stream(module.Stream(device)))
        yield


def _with_streams(devices: Iterable[torch.device]) -> list[Any]:
    return [device for device in devices if device.type != "cpu"]
