"""Log lines of the package, and of the Rust worker below it."""

from __future__ import annotations

import logging
import threading
from collections.abc import MutableMapping
from typing import Any

from racksum import _racksum

__all__ = ["logger", "pass_on", "pass_on_until"]

#: Seconds between two collections of the worker's log lines.
_PERIOD = 0.25


class _Named(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"racksum: {msg}", kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Returns the logger of this name, with lines that begin with ``racksum:``.

    The prefix shows where lines come from even if :mod:`logging` is not configured.
    """
    return _Named(logging.getLogger(name), {})


def pass_on() -> None:
    """Hands the log lines of the worker to :mod:`logging`."""
    for level, name, said in _racksum.take_logs():
        logger(name.replace("racksum_", "racksum.", 1)).log(level, "%s", said)


def pass_on_until(over: threading.Event) -> None:
    """Calls :func:`pass_on` every 0.25 seconds until ``over`` is set."""
    while not over.wait(_PERIOD):
        pass_on()
