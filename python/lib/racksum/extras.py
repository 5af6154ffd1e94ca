"""Optional packages, which only some parts of racksum need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FLOORS", "needed"]

#: For each package, the extra of racksum that installs it, and the oldest version that racksum is
#: tested with.
FLOORS = {"torch": ("torch", "2.15"), "numpy": ("numpy", "1.24"), "matplotlib": ("plot", "3.8")}


def needed(module: str, by: str) -> Any:
    """Imports and returns an optional module.

    :param by: The part of racksum that needs the module, as error messages name it.
    :raises ModuleNotFoundError: The package is not installed. The message says how to install it.
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
