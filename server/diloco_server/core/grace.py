"""How long a round stays open once it has its quorum.

Fixed seconds, or adaptive, which depends on what learners do on a commit.

Carry: no learner waits, and none loses work, so waiting only delays the next version. A round waits for everybody who
is expected (`trust/arrivals.py`), but for nobody longer than its patience beyond the usual learner:

    patience = max(patience * H, tau) * step_time

and from its quorum on never longer than `LONGEST` times that, however late the usual learner is expected.

Overwrite and blend: a learner goes on for tau steps between its snapshot and the new version, and loses what it does
beyond. So waiting may use what the quorum and the merge leave of that (Eq. 3 of the paper), from the quorum on:

    grace = gamma * (tau * step_time - time_to_quorum - time_to_merge_and_publish), within [0, step_time]

Both are at most a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.settings import SyncSettings

LONGEST = 2.5
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
        self.waits_for_expected = settings.grace == "adaptive" and settings.on_commit == "carry"
        """Whether rounds wait for those that are expected, and for nobody else."""
        self.to_quorum = MovingAverage()
        self.to_publish = MovingAverage()

    def seconds(self, step_time_s: float) -> float:
        """The window in seconds. `step_time_s`: the median of the live learners, so that no straggler widens it."""
        settings = self._settings
        if settings.grace != "adaptive":
            return settings.grace
        if self.waits_for_expected:
            patience = max(settings.patience * settings.sync_every, settings.overlap_steps)
            return min(LONGEST * patience * step_time_s, LONGEST_S)
        spent = (self.to_quorum.value or 0.0) + (self.to_publish.value or 0.0)
        slack = settings.overlap_steps * step_time_s - spent
        return min(max(settings.grace_gamma * slack, 0.0), step_time_s, LONGEST_S)

    @staticmethod
    def patience_s(window_s: float) -> float:
        """Of that window: what a learner may be later than the usual one."""
        return window_s / LONGEST
