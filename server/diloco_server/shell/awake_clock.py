"""The time of a shard."""

from __future__ import annotations

from diloco_common.ports import Clock


class AwakeClock:
    """Monotonic seconds of a shard, but only those during which the shard itself is awake.

    A process may be frozen for longer than a lease (SIGSTOP, a suspended machine). On waking, it may look at the time
    before it reads the messages of its learners. With a plain clock, it would then take all of them for silent.

    A gap between two calls counts as at most `longest_s`: the shard asks many times a second.
    """

    def __init__(self, longest_s: float, clock: Clock) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._asked_at = clock()
        self._asleep_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        asleep_s, self._asked_at = now - self._asked_at - self._longest_s, now
        if asleep_s > 0:
            self._asleep_s += asleep_s
        return now - self._asleep_s
