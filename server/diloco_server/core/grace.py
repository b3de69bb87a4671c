"""How long a round stays open after its quorum.

Fixed seconds, or adaptive (Eq. 3 of the paper). A learner goes on for tau steps between its snapshot and the new
version, so a round that ends within them delays nobody. Waiting may use what the quorum and the merge leave of that:

    grace = gamma * (tau * step_time - time_to_quorum - time_to_merge_and_publish)

It is clamped to [0, step_time], and to a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.settings import SyncSettings

LONGEST_S = 60.0
"""No adaptive window is longer, whatever step times learners report."""


@dataclass
class MovingAverage:
    """Exponential moving average in seconds; the first value counts in full."""

    alpha: float = 0.1
    value: float | None = None

    def add(self, seconds: float) -> None:
        self.value = seconds if self.value is None else self.value + self.alpha * (seconds - self.value)


class GraceWindow:
    """The current grace window of a shard, in seconds."""

    def __init__(self, settings: SyncSettings) -> None:
        self._settings = settings
        self.to_quorum = MovingAverage()
        self.to_publish = MovingAverage()

    def seconds(self, step_time_s: float) -> float:
        """The window in seconds. `step_time_s`: the median of the live learners, so that no straggler widens it."""
        settings = self._settings
        if settings.grace != "adaptive":
            return settings.grace
        spent = (self.to_quorum.value or 0.0) + (self.to_publish.value or 0.0)
        slack = settings.overlap_steps * step_time_s - spent
        return min(max(settings.grace_gamma * slack, 0.0), step_time_s, LONGEST_S)
