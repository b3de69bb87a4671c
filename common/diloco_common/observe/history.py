"""Histories: a process records its events, line by line, so that promises can be checked afterwards.

`HistoryFile` writes to a file, `MemoryHistory` to a list. Both implement `History` of `ports.py`. `histories.py`
defines the lines; `judge.py` decides whether they keep the promises.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c

from diloco_common.observe.histories import Histories, Line, gather


class HistoryFile:
    """The history of one process, in a file. Lines may be written from any thread.

    Each line is one write to a file opened for appending, so it survives SIGKILL. The next process of this name appends
    to the same file.
    """

    def __init__(self, folder: Path, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Append to `folder`/`name`.jsonl. The default clock is the same for all processes of one machine.
        Raises OSError."""
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
        """May be repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class MemoryHistory:
    """The history of one process, in memory. Pass `lines` to `histories.gather`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds. Histories that are judged together need the same clock."""
        self.lines: list[Line] = []
        self._clock = clock

    def write(self, what: str, **facts: Any) -> None:
        """Append one line."""
        self.lines.append({"t": self._clock(), "what": what, **facts})


def read_history(path: Path) -> list[Line]:
    """The lines of a file, in order, without lines that a crash truncated. Raises OSError."""
    found: list[Line] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "t" in entry and "what" in entry:
            found.append(entry)
    return found


def read_histories(folder: Path) -> Histories:
    """All histories in a folder. Raises OSError."""
    return gather((path.stem, read_history(path)) for path in sorted(folder.glob("*.jsonl")))


def fingerprint(*parts: bytes) -> str:
    """CRC-32C over bytes, as 8 hex digits. Equal bytes give equal fingerprints."""
    value = 0
    for part in parts:
        value = google_crc32c.extend(value, part)
    return f"{value:08x}"


def _is_torn(path: Path) -> bool:
    """Whether the last line is incomplete."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
