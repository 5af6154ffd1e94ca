"""Events of collectives for PyTorch's profiler: one for each call, and one for each wait.

An event ends on the thread on which it begins. If another thread ended it together with the
collective, the profile could end at the same time. torch would then free its records without a
lock, and crash.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

__all__ = ["calling", "waiting"]


def calling(collective: str | None) -> AbstractContextManager[object]:
    """Records an event during the call of a collective, if it has a name and a profiler runs."""
    return _event(collective, "")


def waiting(collective: str | None) -> AbstractContextManager[object]:
    """Records an event during the wait for a collective, if it has a name and a profiler runs."""
    return _event(collective, ":wait")


def _event(collective: str | None, what: str) -> AbstractContextManager[object]:
    if collective is None or not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    return record_function(f"racksum:{collective}{what}")
