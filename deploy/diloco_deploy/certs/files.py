"""Writes the files of an authority: whole or not at all, and keys for their owner alone."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Write a file for its owner alone; a reader sees all of it or what was there before. Raises OSError."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """The same for a file that anybody may read. Raises OSError."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
