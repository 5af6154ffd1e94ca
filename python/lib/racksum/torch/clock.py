"""A clock for the work of a device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Clock", "device_of"]


class Clock:
    """Measures time on a device. A GPU lags behind the host, so its own events are timed."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device

    def mark(self) -> Any:
        """Returns a mark of the moment at which all work that was started so far is done."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits until the device has no work left."""
        self._module.synchronize(self._device)

    def seconds(self, one: Any, other: Any) -> float:
        """Returns the time from one mark to the other, in seconds. Call ``settle`` first."""
        if self._device.type == "cpu":
            return float(other - one)
        return float(one.elapsed_time(other)) / 1e3


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter, or the CPU if it has no parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
