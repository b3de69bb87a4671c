"""Counts Ctrl-C and similar signals: the first one ends the run in order, the second one at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Counts the signals that ask us to end: Ctrl-C, SIGTERM, and the hangup of the terminal."""

    def __init__(self) -> None:
        self.count = 0
        self._wake = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not longer than until the next interrupt."""
        self._wake.wait(seconds)
        self._wake.clear()
