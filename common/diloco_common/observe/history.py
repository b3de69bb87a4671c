"""Histories: a process records its events, line by line, so that promises can be checked afterwards.

The lines, in the order in which each process writes them:

    shard     born      role="shard", epoch
              joined    learner, generation
              gone      learner, generation, code
              opened    fragment, round, asked
              accepted  learner, generation, fragment, round, epoch, base, tokens, steps
              declined  the same, outcome, code
              merging   fragment, version, contributions: [learner, generation, round, base, tokens, steps, counted];
                        left_out, the same for those that are not merged (`influence.py`)
              announced fragment, epoch, version, checksum, state, tokens_merged; companion (companions only)
              restored  the same, stored_epoch
    learner   born      role="learner", step, tokens
              stepped   step, tokens
              pushed    shard_epoch, generation, fragment, round, epoch, base, tokens, steps, since
              answered  fragment, round, outcome, code
              carried   shard_epoch, fragment, round, tokens
              applied   fragment, epoch, version, checksum, merged, forgotten, since
              ended

Every line has `t`, in seconds. The `epoch` and `base` of a contribution name its base version. `counted` is how many of
its tokens count as merged, if not all. A shard writes `merging` before it computes a version, and `announced` once the
version is durable, before any learner hears of it. A later epoch of the shard writes `restored` for the version with
which it begins; `stored_epoch` is the epoch in the file name. `state` is a checksum of everything from which the shard
continues; `checksum` is one of the values that learners get. The leader of an island writes for all its ranks. It does
not hold all values, so its `applied` has no checksum.

`since` is a learner's own count of tokens. As far as the learner knows, all work before it is merged. From `applied` on
the learner counts its contribution to round `merged` as merged, because the version holds it, or its contribution to
round `forgotten`, because the shard no longer knows. From `carried` on it counts the contribution as not merged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c


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
        """Close the file. May be repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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
