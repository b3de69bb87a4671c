"""What is asked: learners with their chips, failures and links, and machines of shards. What a run of them came to."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from diloco_common.formulas import BYTES_PER_S
from diloco_planner.chips import ChipTimeline, Failures, Island, island_timeline


@dataclass(frozen=True)
class Link:
    """Between one learner and the shards; bits per second."""

    up: float = math.inf
    down: float = math.inf
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class LearnerPlan:
    """One learner of the run."""

    name: str
    island: Island
    failures: Failures = field(default_factory=Failures)
    step_s: float = 1.0
    """Of its inner step, with all chips."""
    noise: float = 0.0
    """Standard deviation of one step, as a share of it."""
    link: Link = field(default_factory=Link)
    begins_s: float = 0.0
    """It comes later."""
    tokens_per_step: int = 1_000_000
    site: str = ""
    """Inside one that has a name no link slows anybody down."""
    is_home: bool = False
    """The shards are there."""
    line: ChipTimeline | None = None
    """When it computes; None: drawn from the island and its failures."""

    def there_s(self, until: float) -> float:
        """Seconds since it came; 0 if it comes later."""
        return max(0.0, until - self.begins_s)

    @property
    def to_shards(self) -> Link:
        return Link() if self.is_home else self.link

    def chance(self, seed: int) -> random.Random:
        """That its failures are drawn from, and its preemptions first: so they are the same in each way of training."""
        return random.Random(f"{seed} {self.name}")

    def drawn(self, until: float, chance: random.Random) -> ChipTimeline:
        """When it computes, from when it comes until then."""
        return self.line or island_timeline(self.island, self.failures, max(1.0, self.there_s(until)), chance)


@dataclass(frozen=True)
class ShardPlan:
    """All machines of shards together."""

    count: int | None = None
    """Each makes one version after the other. None: there are enough of them, so that none waits."""
    merge_bytes_s: float = BYTES_PER_S
    """Of contributions and versions, that one machine receives, merges and sends (docs/performance.md)."""
    disk_bytes_s: float = math.inf
    """A version is written before it is announced."""
    restart_every_s: float = math.inf
    """Mean time between failures of one of them."""
    restart_s: float = 60.0


@dataclass
class RunOutcome:
    """What a run came to."""

    hours: float
    goodput: float
    uptime: float
    rounds: int
    """Outer steps, of all fragments."""
    participants_mean: float
    tokens_trained: float
    tokens_share_merged: float
    """Of what was trained, averaged over fragments; what is still under way at the end is missing."""
    gbit_per_learner_up: float
    """Gbit/s while a learner computes."""
    gbit_per_learner_down: float
    late_share: float
    shards_busy: float
    """The share of the time in which their machines merge, or would have to; 0 without a number of them."""
    evictions: int
    joins: int
    ended_s: float
    """When the budget was merged, or the time was over."""
    events: int
    decided: int
    """Fragments that the cores decided for."""
    learners: list[dict[str, float]] = field(default_factory=list)
