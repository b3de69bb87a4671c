"""The clocks of a fragment: how many inner steps lie between two rounds, and how long a round stays open.

A fragment is due when at least K live learners took H inner steps since its last round opened. Steps are counted per
learner. An absolute clock would stop with the fastest learner. No clock
at all would let a fast network drive H towards 1, which ruins learning.

Other kinds than the model are due every so many times as many steps (`Traits.every`).

The first time, a fragment is due after ceil((t + 1) * H / P) steps, where t is its turn (`manifest.turn`). That spreads
the fragments evenly over H and keeps the traffic flat: with P = H = 24 one is due per step; with P = 1 the first round
comes after H steps, as in DiLoCo.

Once a round has its quorum, it stays open for fixed seconds, or adaptive ones, which depend on what learners do on a
commit.

Carry: no learner waits, and none loses work, so waiting only delays the next version. A round waits for everybody who
is expected (`arrivals.py`), but for nobody longer than its patience beyond the usual learner:

    patience = max(patience * H, tau) * step_time + 4 * scatter, within H (or tau) steps

where scatter is by how much steps of the usual learner differ from their average: where they come in bursts, or on a
busy machine, some steps are no time at all. From its quorum on a round never waits longer than `LONGEST` times that,
however late the usual learner is expected.

Overwrite and blend: a learner goes on for tau steps between its snapshot and the new version, and loses what it does
beyond. So waiting may use what the quorum and the merge leave of that (Eq. 3 of the paper), from the quorum on:

    grace = gamma * (tau * step_time - time_to_quorum - time_to_merge_and_publish), within [0, step_time]

Both are at most a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco_common.settings import SyncSettings
from diloco_common.wire.manifest import turn
from diloco_server.core.membership import Member

Quorum = int | Literal["all"]


def first_interval(fragment_id: int, num_fragments: int, sync_every: int) -> int:
    """Inner steps until the first round of a fragment; at least 1, at most H."""
    return -(-(turn(fragment_id, num_fragments) + 1) * sync_every // num_fragments)


def needed(quorum: Quorum, learners: int) -> int:
    """K, or the number of learners that could contribute if that is smaller."""
    return learners if quorum == "all" else min(quorum, learners)


def is_due(live: Iterable[Member], base_steps: Mapping[str, int], interval: int, quorum: Quorum) -> bool:
    """Whether K live learners took `interval` steps since the fragment's last round.

    `base_steps` maps a learner to the inner step it had reported then. A learner that joined later counts from its
    first report.
    """
    members = ready = 0
    for member in live:
        first = member.first_step
        if first is not None:
            members += 1
            base = max(first, base_steps.get(member.learner_id, first))
            ready += member.reported.inner_step - base >= interval
    return ready > 0 and ready >= needed(quorum, members)


GAMMA = 0.8
"""Of Eq. 3: the rest of the slack is left for what the averages do not know."""
LONGEST = 2.5
SCATTER = 4.0
"""As TCP waits for an answer: the mean, and four mean deviations."""
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

    def seconds(self, step_time_s: float, every: int, scatter_s: float = 0.0) -> float:
        """The window in seconds. `step_time_s`, `scatter_s`: the medians of the live learners, so that no straggler
        widens it. `every`: H now."""
        settings = self._settings
        if settings.grace != "adaptive":
            return settings.grace
        if self.waits_for_expected:
            patience_s = max(settings.patience * every, settings.overlap_steps) * step_time_s + SCATTER * scatter_s
            return min(LONGEST * min(patience_s, max(every, settings.overlap_steps) * step_time_s), LONGEST_S)
        spent = (self.to_quorum.value or 0.0) + (self.to_publish.value or 0.0)
        slack = settings.overlap_steps * step_time_s - spent
        return min(max(GAMMA * slack, 0.0), step_time_s, LONGEST_S)

    @staticmethod
    def patience_s(window_s: float) -> float:
        """Of that window: what a learner may be later than the usual one."""
        return window_s / LONGEST
