"""The timing of a fragment: how many inner steps lie between two rounds, and how long a round stays open.

A fragment is due when at least K live learners took H inner steps since its last round opened. Steps are counted per
learner. An absolute clock would stop with the fastest learner; with no clock, a fast network would drive H towards 1,
which ruins learning. Fragments other than the model are due after a multiple of these steps (`Traits.every`).

The first time, a fragment is due after ceil((t + 1) * H / P) steps, where t is its turn (`manifest.turn`). That spreads
the fragments evenly over H and keeps the traffic flat: with P = H = 24 one is due per step; with P = 1 the first round
comes after H steps, as in DiLoCo.

Once a round has its quorum, it stays open for a fixed or an adaptive time. No learner waits or loses work meanwhile:
waiting only delays the next version. An adaptive round waits for every learner that is expected (`arrivals.py`), but at
most its patience beyond the usual learner:

    patience = max(PATIENCE * H, tau) * step_time + 4 * scatter, within H (or tau) steps

where scatter is the deviation of the usual learner's steps from their average: on a busy machine, or where steps come
in bursts, some take no time at all. From its quorum on, a round never waits longer than `LONGEST` times that, nor for
more than a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco_common.settings import OVERLAP_STEPS, PATIENCE
from diloco_common.wire.manifest import turn
from diloco_server.core.membership import Member

Quorum = int | Literal["all"]


def first_interval(fragment_id: int, num_fragments: int, sync_every: int) -> int:
    """Inner steps until the first round of a fragment; at least 1, at most H."""
    return -(-(turn(fragment_id, num_fragments) + 1) * sync_every // num_fragments)


def needed(quorum: Quorum, learners: int) -> int:
    """K, or the number of learners if that is smaller."""
    return learners if quorum == "all" else min(quorum, learners)


def is_due(live: Iterable[Member], base_steps: Mapping[str, int], interval: int, quorum: Quorum) -> bool:
    """Whether K live learners took `interval` steps since the fragment's last round.

    `base_steps`: learner -> the inner step it had reported then. Later joiners count from their first report.
    """
    members = ready = 0
    for member in live:
        first = member.first_step
        if first is not None:
            members += 1
            base = max(first, base_steps.get(member.learner_id, first))
            ready += member.reported.inner_step - base >= interval
    return ready > 0 and ready >= needed(quorum, members)


LONGEST = 2.5
SCATTER = 4.0
"""Mean deviations beyond the mean, as in TCP's retransmission timeout."""
LONGEST_S = 60.0
"""No adaptive window is longer, whatever step times learners report."""


@dataclass
class MovingAverage:
    """Exponential moving average in seconds; the first value counts in full."""

    alpha: float = 0.1
    value: float | None = None

    def add(self, seconds: float) -> None:
        self.value = seconds if self.value is None else self.value + self.alpha * (seconds - self.value)


def adaptive_s(step_time_s: float, every: int, scatter_s: float = 0.0) -> float:
    """How long a round stays open after its quorum, in seconds. `step_time_s`, `scatter_s`: medians of the live
    learners, so that no straggler widens it. `every`: the current H."""
    patience_s = max(PATIENCE * every, OVERLAP_STEPS) * step_time_s + SCATTER * scatter_s
    return min(LONGEST * min(patience_s, max(every, OVERLAP_STEPS) * step_time_s), LONGEST_S)
