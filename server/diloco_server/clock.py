"""The time by which a shard judges others: only while it is awake itself.

A process may be frozen for longer than a lease (SIGSTOP, a suspended machine). Without this, it would then look at the
time before it reads what its learners sent meanwhile, and take all of them for silent.
"""

from __future__ import annotations

from diloco_common.ports import Clock


class AwakeClock:
    """Monotonic seconds. A gap between two calls counts as `longest_s` at most: the shard asks many times a second."""

    def __init__(self, longest_s: float, clock: Clock) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._asked_at = clock()
        self._asleep_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._asleep_s += max(0.0, now - self._asked_at - self._longest_s)
        self._asked_at = now
        return now - self._asleep_s
