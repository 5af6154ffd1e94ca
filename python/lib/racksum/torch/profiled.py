"""Events that PyTorch's profiler shows of collectives: each call, and each wait for one.

An event ends on the thread that it begins on. One that another thread ended, once the collective
has, could meet the end of the profile: torch takes its records apart there without a lock, and
crashes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

__all__ = ["calling", "waiting"]


def calling(collective: str | None) -> AbstractContextManager[object]:
    """An event for as long as a collective is called, if it has a name and is profiled here."""
    return _event(collective, "")


def waiting(collective: str | None) -> AbstractContextManager[object]:
    """An event for as long as a collective is waited for, likewise."""
    return _event(collective, ":wait")


def _event(collective: str | None, what: str) -> AbstractContextManager[object]:
    if collective is None or not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    return record_function(f"racksum:{collective}{what}")
