"""Timeouts of torch's process groups. Importing this module imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["timeout_of"]


def timeout_of(group: ProcessGroup | None) -> float | None:
    """Returns the timeout of a group in seconds, or None if it is unknown.

    :param group: The group; None for the default group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = cast("ProcessGroup", group or dist.group.WORLD)
    limits = [_timeout_of_backend(group._get_backend(device)) for device in group._device_types]
    return min((limit for limit in limits if limit is not None), default=None)


def _timeout_of_backend(backend: Any) -> float | None:
    # In debug mode torch wraps its own backends.
    backend = getattr(backend, "wrapped_pg", backend)
    try:
        limit = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return float(limit.total_seconds())
