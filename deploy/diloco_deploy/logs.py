"""Shows the log files of a cluster on this machine, and what is added to them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_common.errors import ConfigError, DataError, did_you_mean

LOOK_S = 0.3


def show_logs(
    folder: Path, members: Sequence[str], lines: int, *, follow: bool, wait: Callable[[float], None] = time.sleep
) -> int:
    """Print the last lines of each member's log, then with `follow` what comes. Raises ConfigError, DataError."""
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found:
        raise DataError(f"{folder}: there are no logs; give the --folder of a cluster that `diloco up` runs, or ran")
    for name in members:
        if name not in found:
            raise ConfigError(f"{name} has no log in {folder}: there are {', '.join(found)}{did_you_mean(name, found)}")
    shown = {name: found[name] for name in members or found}
    ends = {name: _show_end(name, path, lines, len(shown) > 1) for name, path in shown.items()}
    while follow:
        wait(LOOK_S)
        if not members:  # also of workers that have come since
            shown |= {path.stem: path for path in sorted(folder.glob("*.log"))}
        for name, path in shown.items():
            ends[name] = _show_rest(name, path, ends.get(name, 0), len(shown) > 1)
    return 0


def _show_end(name: str, path: Path, lines: int, named: bool) -> int:
    """Returns the size of what was looked at."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=lines):
            _print(name, line, named)
        return file.tell()


def _show_rest(name: str, path: Path, start: int, named: bool) -> int:
    try:
        size = path.stat().st_size
    except OSError:
        return 0  # begun anew
    if size == start:
        return start
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(start if size > start else 0)
        for line in file:
            _print(name, line, named)
        return file.tell()


def _print(name: str, line: str, named: bool) -> None:
    print(f"{name}: {line.rstrip()}" if named else line.rstrip(), flush=True)
