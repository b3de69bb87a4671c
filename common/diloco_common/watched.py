"""Files that other programs change while this process runs: certificates, deny-lists, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Of each file: when it changed, its size, which file it is. None: there is none."""


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Differs once one of the files was written, exchanged or removed. Links are followed."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
