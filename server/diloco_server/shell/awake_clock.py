"""A clock that stops while the process is frozen."""

from __future__ import annotations

from diloco_common.ports import Clock


class AwakeClock:
    """Monotonic seconds during which the process was awake.

    A process may be frozen for longer than a lease (SIGSTOP, a suspended machine). When it wakes, it may check the time
    before it reads its learners' messages, and a plain clock would make all of them look silent.

    A gap between two calls counts as at most `longest_s`; the shard calls this many times a second.
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
