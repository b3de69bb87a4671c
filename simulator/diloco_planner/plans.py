"""The question: learners with their chips, failures and links, and shard machines. Also the outcome of a run, and a
check that refuses questions that would take too much memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_common.errors import ConfigError
from diloco_common.formulas import BYTES_PER_S
from diloco_planner.chips import ChipTimeline, Failures, Island, island_timeline

LEARNERS = 8
"""Number of learners of a run, if neither a flag nor a file gives it."""


@dataclass(frozen=True)
class Link:
    """The link between one learner and the shards. Rates are in bits per second."""

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
    tokens_per_step: int = 1_000_000
    site: str = ""
    """Between learners of the same named site, no link slows anybody down."""
    is_home: bool = False
    """Whether the shards are at its site."""

    @property
    def to_shards(self) -> Link:
        return Link() if self.is_home else self.link

    def chance(self, seed: int = 0) -> random.Random:
        """Randomness for its preemptions, drawn first, and then its failures: the same in each way of training."""
        return random.Random(f"{seed} {self.name}")

    def drawn(self, until: float, chance: random.Random) -> ChipTimeline:
        """When it computes, until `until`."""
        return island_timeline(self.island, self.failures, until, chance)


@dataclass(frozen=True)
class ShardPlan:
    """All shard machines together."""

    count: int | None = None
    """Number of machines; each makes one version after another. None: so many that no version waits."""
    merge_bytes_s: float = BYTES_PER_S
    """Bytes of contributions and versions that a machine can receive, merge and send a second (docs/performance.md)."""
    disk_bytes_s: float = math.inf
    """Write rate; a version is written before it is announced."""


@dataclass
class RunOutcome:
    hours: float
    goodput: float
    uptime: float
    rounds: int
    """Outer steps of all fragments."""
    participants_mean: float
    tokens_share_merged: float
    """Share of trained tokens that were merged, averaged over fragments; those in flight at the end do not count."""
    gbit_per_learner_up: float
    """Rate while a learner computes."""
    gbit_per_learner_down: float
    late_share: float
    shards_busy: float
    """Share of time in which shard machines merge, or would have to merge. 0: their number is not given."""
    evictions: int
    joins: int
    events: int
    decided: int
    """Number of fragments that the cores simulated."""


CONTRIBUTIONS_MAX = 60_000
"""Maximum number of contributions that a run simulates in detail, which takes one core about a minute."""
CHANGES_MAX = 3e6
"""Maximum number of times that chips fail or come back. Each takes a kilobyte."""


def refuse_restless(learners: Sequence[LearnerPlan], until: float) -> None:
    """Refuse chips that fail and return too often. Raises ConfigError."""
    many = changes(learners, until)
    if many > CHANGES_MAX:
        raise ConfigError(
            f"chips would fail or come back {many:.1e} times in {until / 3600:g} hours, and at most {CHANGES_MAX:.0e} "
            "such events can be simulated; ask for fewer hours, or for longer times: mtbi and loss, preempt_every and "
            "preempt_for"
        )


def changes(learners: Sequence[LearnerPlan], until: float) -> float:
    """The maximum number of times that their chips fail or come back."""
    return sum(_changes(plan, until) for plan in learners)


def _changes(plan: LearnerPlan, until: float) -> float:
    chips, f = plan.island.chips, plan.failures
    pauses = (
        (f.loss_s if plan.island.elastic else f.restart_s, f.mtbi_s / chips),
        (f.preempt_for_s, f.preempt_every_s),
    )
    return sum(2 * until / (pause + gap) for pause, gap in pauses)


def decided_fragments(fragments: int, contributions: float) -> int:
    """How many of the P fragments are simulated if a run has this many contributions."""
    fits = [d for d in range(1, fragments + 1) if fragments % d == 0]
    return max((d for d in fits if contributions * d / fragments <= CONTRIBUTIONS_MAX), default=1)
