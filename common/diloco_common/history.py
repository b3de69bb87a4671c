"""Histories: what happened to one process, as JSON lines, so that promises can be checked afterwards.

Written where `run.history` names a folder, and nowhere else; `diloco chaos` reads them. A line is one write to a file
that is opened for appending, so it outlives SIGKILL; the lives of a process follow each other in one file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c


class History:
    """The history of one process. Lines may be written from any thread."""

    def __init__(self, folder: Path, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Append to `folder`/`name`.jsonl. Times are monotonic, and comparable among processes of one machine.

        Raises OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.jsonl"
        self._clock = clock
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if _is_torn(path):
            os.write(self._file, b"\n")

    def write(self, what: str, **facts: Any) -> None:
        """Append one line: {"t": seconds, "what": what, ...facts}."""
        line = json.dumps({"t": round(self._clock(), 4), "what": what, **facts}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Repeating it is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a history, in order. A torn line, as a crash may leave it, is left out. Raises OSError."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "t" in entry and "what" in entry:
            found.append(entry)
    return found


def fingerprint(values: bytes) -> str:
    """CRC-32C of the bytes of a version, 8 hex digits: equal for everyone who holds the same bytes."""
    return f"{google_crc32c.value(values):08x}"


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
