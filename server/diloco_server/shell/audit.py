"""The audit log: joins, leaves, seeds, refusals and revocations, as JSON lines in a file of the process.

    {"time": "2026-11-22T14:00:00.123Z", "what": "Join", "outcome": "OK", "who": "diloco://run/learner/a",
     "serial": "7a01...", "peer": "ipv4:10.0.0.7"}

`outcome` is OK or a stable code. `who` comes with a serial if a certificate proved it; otherwise it is what the call
claimed. `repeated` counts similar lines that were left out before this last one. Payloads, tokens and keys are never
written. Accepted contributions are not logged: there may be hundreds per second, and the metrics count them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from diloco_common.errors import ConfigError
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import SAY_EVERY_S

FILES_KEPT = 5
"""Full files kept beside the current one; NAME.jsonl.1 is the newest."""
REPEATED_MAX = 512
"""Different refusals counted separately at a time, and as many successful calls; the rest share one line of each kind.
So no caller can fill the disk, or hide actions behind refusals."""
TEXT_MAX = 200

_Key: TypeAlias = tuple[str, ...]
_SAME = ("what", "outcome", "who", "peer")
"""Lines with these fields in common are counted together."""


class Audit:
    """Receives the calls of a process. This one discards them."""

    def note(self, what: str, outcome: str, caller: Identity | None = None, **facts: object) -> None:
        pass


@dataclass(slots=True)
class _Repeated:
    began: float
    line: dict[str, Any]
    more: int = 0


class AuditLog(Audit):
    """The audit log of one process. Owned by one thread."""

    def __init__(
        self,
        folder: Path,
        name: str,
        wall_clock: Callable[[], float] = time.time,
        *,
        file_bytes_max: int = 16 << 20,
    ) -> None:
        """Append to `folder`/`name`.jsonl, which only its owner can read. Raises ConfigError."""
        self._path = folder / f"{name}.jsonl"
        self._wall_clock = wall_clock
        self._file_bytes_max = file_bytes_max
        self._refused: dict[_Key, _Repeated] = {}
        self._done: dict[_Key, _Repeated] = {}
        self.failing = ""
        """Why the last line could not be written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"security.audit: {self._path}: cannot be written: {error.strerror}") from None

    def note(self, what: str, outcome: str, caller: Identity | None = None, **facts: object) -> None:
        """Append one line, or count it if it repeats one. A disk failure does not end the call."""
        now = self._wall_clock()
        line = _line(what, outcome, caller, facts)
        self._close_windows(now)
        if caller is None and outcome == "OK":  # not a call, but an action of the operator
            self._write(now, line)
            return
        repeated, told_apart = (self._done, (*_SAME, "fragment")) if outcome == "OK" else (self._refused, _SAME)
        key = tuple(str(line.get(name)) for name in told_apart)
        if key not in repeated and len(repeated) >= REPEATED_MAX:
            line, key = {"what": "many", "outcome": outcome}, ("", outcome)
        if (known := repeated.get(key)) is not None:
            known.line = line
            known.more += 1
        else:
            repeated[key] = _Repeated(now, line)
            self._write(now, line)

    def close(self) -> None:
        """Calls after the first do nothing."""
        if self._file >= 0:
            self._close_windows(float("inf"))
            os.close(self._file)
            self._file = -1

    def _close_windows(self, now: float) -> None:
        for repeated in (self._refused, self._done):
            while repeated:
                key, one = next(iter(repeated.items()))  # the oldest
                if 0 <= now - one.began < SAY_EVERY_S:
                    break
                del repeated[key]
                if one.more:
                    self._write(min(now, one.began + SAY_EVERY_S), {**one.line, "repeated": one.more})

    def _write(self, now: float, line: dict[str, Any]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        text = json.dumps({"time": f"{stamp}.{int(now % 1 * 1000):03d}Z", **line}, separators=(",", ":"))
        try:
            if os.fstat(self._file).st_size + len(text) + 1 > self._file_bytes_max:
                self._rotate()
            os.write(self._file, text.encode() + b"\n")  # ASCII: json escapes the rest
            self.failing = ""
        except OSError as error:
            self.failing = str(error.strerror or error)

    def _rotate(self) -> None:
        """Raises OSError."""
        for number in range(FILES_KEPT - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            if older.exists():
                older.replace(self._path.with_name(f"{self._path.name}.{number + 1}"))
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        os.close(self._file)
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _line(what: str, outcome: str, caller: Identity | None, facts: dict[str, object]) -> dict[str, Any]:
    line: dict[str, Any] = {"what": what, "outcome": outcome}
    if caller is not None:
        if caller.proof is not None:
            line["who"], line["serial"] = caller.proof.subject.uri, caller.proof.serial
        else:
            line["who"] = caller.learner_id[:TEXT_MAX]
        line["peer"] = caller.peer
        if caller.generation:
            line["generation"] = caller.generation
    return line | {name: _short(value) for name, value in facts.items()}


def _short(value: object) -> object:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value if isinstance(value, int | float) or value is None else str(value)[:TEXT_MAX]
