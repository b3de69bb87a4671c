"""The question: learners with their chips, failures and links, and shard machines; the outcome of their run; and which
questions would take too long. Core times were measured on one core of a server, and are on the safe side.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_common.errors import ConfigError
from diloco_common.formulas import BYTES_PER_S
from diloco_common.settings import SyncSettings
from diloco_planner.chips import ChipTimeline, Failures, Island, island_timeline

LEARNERS = 8
"""Of a run, if neither a flag nor a file says."""


@dataclass(frozen=True)
class Link:
    """The link between one learner and the shards; bits per second."""

    up: float = math.inf
    down: float = math.inf
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class LearnerPlan:
    name: str
    island: Island
    failures: Failures = field(default_factory=Failures)
    step_s: float = 1.0
    """Time of an inner step with all chips."""
    noise: float = 0.0
    """Standard deviation of a step's time, as a share of it."""
    link: Link = field(default_factory=Link)
    begins_s: float = 0.0
    """When it starts."""
    tokens_per_step: int = 1_000_000
    site: str = ""
    """Learners within the same named site have no link that slows them down."""
    is_home: bool = False
    """Whether the shards are at its site."""
    line: ChipTimeline | None = None
    """When it computes; None: to be drawn from the island and its failures."""

    def there_s(self, until: float) -> float:
        """Seconds since it started; 0 if it starts later."""
        return max(0.0, until - self.begins_s)

    @property
    def to_shards(self) -> Link:
        return Link() if self.is_home else self.link

    def chance(self, seed: int = 0) -> random.Random:
        """Randomness for its preemptions, drawn first, and failures: so they are the same in each way of training."""
        return random.Random(f"{seed} {self.name}")

    def drawn(self, until: float, chance: random.Random) -> ChipTimeline:
        """When it computes, from its start until `until`."""
        return self.line or island_timeline(self.island, self.failures, max(1.0, self.there_s(until)), chance)


@dataclass(frozen=True)
class ShardPlan:
    """All shard machines together."""

    count: int | None = None
    """Number of machines; each makes one version after another. None: enough, so that no version waits."""
    merge_bytes_s: float = BYTES_PER_S
    """Bytes of contributions and versions per second per machine: received, merged and sent (docs/performance.md)."""
    disk_bytes_s: float = math.inf
    """Write rate; a version is written before it is announced."""
    restart_every_s: float = math.inf
    """Mean time between failures of any of them."""
    restart_s: float = 60.0


@dataclass
class RunOutcome:
    hours: float
    goodput: float
    uptime: float
    rounds: int
    """Outer steps of all fragments."""
    participants_mean: float
    tokens_trained: float
    tokens_share_merged: float
    """Share of trained tokens that were merged, averaged over fragments; those in flight at the end do not count."""
    gbit_per_learner_up: float
    """Rate while a learner computes."""
    gbit_per_learner_down: float
    late_share: float
    shards_busy: float
    """Share of time in which shard machines merge, or would have to; 0 if their number is not given."""
    evictions: int
    joins: int
    ended_s: float
    """When the budget was merged, or the time was up."""
    events: int
    decided: int
    """Number of fragments that the cores simulated."""
    learners: list[dict[str, float]] = field(default_factory=list)


HOURS_MAX = 3.0
CONTRIBUTIONS_MAX = 60_000
"""Most contributions that a run decides in detail: about a minute of one core."""
LOOK_S, EACH_S = 3e-4, 3e-6
"""Time for a learner at a step boundary, and for each other learner, since all report their progress. The ticks of a
shard within a step take half of it, and to join again takes three."""
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
    joins = many * until / (shards.restart_s + shards.restart_every_s / (shards.count or 1))
    return looks * (LOOK_S + many * EACH_S) + (until / shortest / 2 + 3 * joins) * LOOK_S


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
