"""Log lines of the package, and of the Rust worker that it wraps."""

from __future__ import annotations

import logging
import threading
from collections.abc import MutableMapping
from typing import Any

from racksum import _racksum

__all__ = ["forward_logs", "forward_logs_until", "logger"]

#: The interval between two checks for log lines of the worker, in seconds.
_PERIOD = 0.25


class _Named(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"racksum: {msg}", kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Returns the logger of this name. Its lines begin with ``racksum:``.

    The prefix shows where lines come from even if :mod:`logging` is not configured.
    """
    return _Named(logging.getLogger(name), {})


def forward_logs() -> None:
    """Hands the log lines of the worker to :mod:`logging`."""
    for level, name, message in _racksum.take_logs():
        logger(name.replace("racksum_", "racksum.", 1)).log(level, "%s", message)


def forward_logs_until(over: threading.Event) -> None:
    """Calls :func:`forward_logs` every 0.25 seconds until ``over`` is set."""
    while not over.wait(_PERIOD):
        forward_logs()
