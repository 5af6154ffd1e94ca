"""What the package logs says whose it is, also where nobody has set up :mod:`logging`."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

__all__ = ["logger"]


class _Named(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"racksum: {msg}", kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of this name, whose lines begin with the package's."""
    return _Named(logging.getLogger(name), {})
