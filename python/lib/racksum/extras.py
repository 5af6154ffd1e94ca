"""Packages that only parts of racksum need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FLOORS", "needed"]

#: The extra of racksum that installs each, and the first version that racksum is tested with.
FLOORS = {"torch": ("torch", "2.15"), "numpy": ("numpy", "1.24"), "matplotlib": ("plot", "3.8")}


def needed(module: str, by: str) -> Any:
    """Imports a module that ``by`` needs.

    :raises ModuleNotFoundError: Its package is not installed: a sentence that says how to do that.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        extra, floor = FLOORS[package]
        raise ModuleNotFoundError(
            f"{by} needs {package} {floor} or newer, which is not installed; install {package}, or "
            f"racksum[{extra}]",
            name=package,
        ) from None
    return importlib.import_module(module)
