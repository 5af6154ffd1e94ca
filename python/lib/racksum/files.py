"""Files that are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_writable", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file as a whole, or leaves an existing file unchanged."""
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raises :class:`OSError` if :func:`write_whole` could not write a file, and writes nothing."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = _beside(path)
    with open(temporary, "xb"):
        pass
    temporary.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
