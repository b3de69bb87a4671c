"""The most time that a simulation takes on one core. One that takes too long is refused, with the reason.

Times were measured on one core of a server, and are on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_common.errors import ConfigError
from diloco_common.settings import SyncSettings
from diloco_planner.plans import LearnerPlan, ShardPlan

HOURS_MAX = 3.0
CONTRIBUTIONS_MAX = 60_000
"""Most contributions that a run decides in detail: about a minute of one core."""
TICKS_PER_STEP = 8
"""Ticks while a round waits. In production there is one every 20 ms."""
LOOK_S, EACH_S = 3e-4, 3e-6
"""Time for a learner at a step boundary; and for each other learner, since all report their progress."""
TICK_S = 2e-5
"""Time for a tick of the shard while a round waits."""
JOIN_S = 1e-3
"""Time for a learner to join again."""
CHANGES_MAX = 3e6
"""Most events of chips that fail and come back. Each takes a kilobyte."""


def refuse_endless(sync: SyncSettings, learners: Sequence[LearnerPlan], shards: ShardPlan, until: float) -> None:
    """Refuse a simulation that would take too long. Raises ConfigError."""
    refuse_restless(learners, until)
    hours = core_s(sync, learners, shards, until) / 3600
    if hours > HOURS_MAX:
        raise ConfigError(
            f"this simulation would take about {hours:,.0f} hours of one core, and {HOURS_MAX:g} are the most: "
            f"{until / 3600:g} hours of {len(learners)} learners with steps from {min(p.step_s for p in learners):g} s"
            "; ask for fewer --hours or learners, longer steps, no noise, or a larger --h"
        )


def refuse_restless(learners: Sequence[LearnerPlan], until: float) -> None:
    """Refuse chips that fail and return too often. Raises ConfigError."""
    many = changes(learners, until)
    if many > CHANGES_MAX:
        raise ConfigError(
            f"chips would fail or come back {many:.1e} times in {until / 3600:g} hours, and {CHANGES_MAX:.0e} are "
            "the most that are simulated; ask for fewer hours, or longer times: mtbi and loss, slow_every and "
            "slow_for, preempt_every and preempt_for"
        )


def core_s(sync: SyncSettings, learners: Sequence[LearnerPlan], shards: ShardPlan, until: float) -> float:
    """Seconds of one core."""
    shortest, many = min(plan.step_s for plan in learners), len(learners)
    rounds = until / shortest / sync.first_every
    decided = decided_fragments(sync.fragments, rounds * sync.fragments * many)
    stride = 1 if decided == sync.fragments else max(1, sync.first_every // decided)
    looks = sum(until / plan.step_s / (1 if plan.noise else stride) for plan in learners)
    looks += many * until / max(10.0, stride * shortest)  # a learner with nothing to say says so
    ticks = TICKS_PER_STEP * until / shortest
    joins = many * until / (shards.restart_s + shards.restart_every_s / (shards.count or 1))
    return looks * (LOOK_S + many * EACH_S) + ticks * TICK_S + joins * JOIN_S


def changes(learners: Sequence[LearnerPlan], until: float) -> float:
    """The most times that their chips fail or come back."""
    return sum(_changes(plan, until) for plan in learners)


def _changes(plan: LearnerPlan, until: float) -> float:
    chips, f = plan.island.chips, plan.failures
    pauses = (
        (f.loss_s if plan.island.elastic else f.restart_s, f.mtbi_s / chips),
        (f.slow_for_s + f.loss_s, f.slow_every_s / chips),
        (f.preempt_for_s, f.preempt_every_s),
    )
    return sum(2 * until / (pause + gap) for pause, gap in pauses)


def decided_fragments(fragments: int, contributions: float) -> int:
    """How many of P fragments are simulated, if a run has this many contributions."""
    fits = [d for d in range(1, fragments + 1) if fragments % d == 0]
    return max((d for d in fits if contributions * d / fragments <= CONTRIBUTIONS_MAX), default=1)
