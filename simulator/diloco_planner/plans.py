"""The question: learners with their chips, failures and links, and shard machines. And the outcome of their run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from diloco_common.formulas import BYTES_PER_S
from diloco_planner.chips import ChipTimeline, Failures, Island, island_timeline


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

    def chance(self, seed: int) -> random.Random:
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
