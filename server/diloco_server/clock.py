"""The time by which a shard judges others: only while it is awake itself.

A process that was frozen for longer than a lease (SIGSTOP, a suspended machine) would else find, at its first look,
that every learner has been silent, before it reads what they had been sending all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Monotonic seconds. A gap between two calls counts as `longest_s` at most: the shard asks many times a second."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._asked_at = clock()
        self._asleep_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._asleep_s += max(0.0, now - self._asked_at - self._longest_s)
        self._asked_at = now
        return now - self._asleep_s
