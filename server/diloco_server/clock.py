"""The clock of a shard. It counts only the time during which the shard itself is awake.

A process may be frozen for longer than a lease (SIGSTOP, a suspended machine). On waking, it may look at the time
before it reads the messages of its learners. With a plain clock, it would then take all of them for silent. Learners
train on meanwhile, so whoever judges what they bring has to know of it: `on_waking`.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_common.ports import Clock


class AwakeClock:
    """Monotonic seconds. A gap between two calls counts as at most `longest_s`: the shard asks many times a second."""

    def __init__(self, longest_s: float, clock: Clock, on_waking: Callable[[float, float], None]) -> None:
        """`on_waking` is called with the seconds that do not count, and with the first answer after them."""
        self._longest_s = longest_s
        self._clock = clock
        self._on_waking = on_waking
        self._asked_at = clock()
        self._asleep_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        asleep_s, self._asked_at = now - self._asked_at - self._longest_s, now
        if asleep_s > 0:
            self._asleep_s += asleep_s
            self._on_waking(asleep_s, now - self._asleep_s)
        return now - self._asleep_s
