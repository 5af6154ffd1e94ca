"""What the package logs, and what the worker below it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import MutableMapping
from typing import Any

from racksum import _racksum

__all__ = ["logger", "pass_on", "pass_on_until"]

#: Seconds between two looks for what the worker has logged.
_PERIOD = 0.25


class _Named(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"racksum: {msg}", kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of this name, whose lines begin with the package's.

    They say whose they are also where nobody has set up :mod:`logging`.
    """
    return _Named(logging.getLogger(name), {})


def pass_on() -> None:
    """Hands what the worker has logged to :mod:`logging`."""
    for level, name, said in _racksum.take_logs():
        logger(name.replace("racksum_", "racksum.", 1)).log(level, "%s", said)


def pass_on_until(over: threading.Event) -> None:
    """Does so again and again."""
    while not over.wait(_PERIOD):
        pass_on()
