"""Lines of one kind that come too often: pure, time comes in as a number.

Callers can make a process say something as often as they like. A full disk is worse than a line that is only counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

WINDOW_S = 10.0
EVENTS_MAX = 1000
"""Lines of one kind in a window; of warnings and errors fewer."""
WARNINGS_MAX = 20
KINDS_MAX = 256
"""Kinds that are counted at once. What is beyond is counted as one."""

Kind: TypeAlias = tuple[str, int, str, str]
"""Logger, level, what is said, stable code."""


@dataclass(frozen=True, slots=True)
class Over:
    """A window has ended in which lines were only counted."""

    kind: Kind
    count: int
    seconds: float


@dataclass(slots=True)
class _Window:
    began: float
    said: int = 0
    counted: int = 0


class Repeats:
    """Decides which lines are written."""

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}  # in the order in which they began

    def heard(self, kind: Kind, now: float) -> tuple[bool, Sequence[Over]]:
        """Whether to write a line of this kind, and what to say before of windows that have ended."""
        over = self._ended(now)
        if kind not in self._windows and len(self._windows) >= KINDS_MAX:
            kind = (kind[0], logging.WARNING, "lines of other kinds", "")
        window = self._windows.setdefault(kind, _Window(now))
        if window.said < (WARNINGS_MAX if kind[1] >= logging.WARNING else EVENTS_MAX):
            window.said += 1
            return True, over
        window.counted += 1
        return False, over

    def all(self) -> Sequence[Over]:
        """What is left to say at the end."""
        windows, self._windows = self._windows, {}
        return [Over(kind, window.counted, WINDOW_S) for kind, window in windows.items() if window.counted]

    def _ended(self, now: float) -> Sequence[Over]:
        over = []
        for kind, window in list(self._windows.items()):
            if 0 <= now - window.began < WINDOW_S:  # or the wall clock was put back
                break
            del self._windows[kind]
            if window.counted:
                over.append(Over(kind, window.counted, now - window.began))
        return over
