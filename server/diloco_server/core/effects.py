"""What the core asks of its shell, in order: say something, compute something, note something."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.codec import Payload
from diloco_common.messages import Directive
from diloco_server.core.rounds import Contribution


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a directive on the learner's control stream of this generation, if it has one."""

    learner_id: str
    generation: int
    directive: Directive


@dataclass(frozen=True, slots=True)
class SeedFragment:
    """Compute version 0 from this payload, make it durable with `Shard.seed_record`, then call `Shard.seeded` (or
    `seed_failed`)."""

    fragment_id: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class MergeRound:
    """Merge these contributions into the next version, make it durable with `Shard.next_record`, then call
    `Shard.committed`."""

    fragment_id: int
    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class RoundOpened:
    fragment_id: int
    round: int
    asked: int


@dataclass(frozen=True, slots=True)
class QuorumReached:
    fragment_id: int
    round: int
    after_s: float


@dataclass(frozen=True, slots=True)
class RoundClosed:
    fragment_id: int
    round: int
    why: str
    """"all", "grace" or "lease"."""
    participants: int
    asked: int
    open_s: float


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    fragment_id: int
    version: int
    participants: int
    tokens: int
    round_s: float
    """From the opening of the round to the announcement."""


@dataclass(frozen=True, slots=True)
class VersionsLost:
    """A learner holds a later version than the one that this shard came back with."""

    fragment_id: int
    epoch: int
    """That the lost version was made in."""
    recovered: int
    """0 also where nothing came back, and a learner brings the fragment again."""
    seen: int
    learner_id: str


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    learner_id: str
    generation: int
    returned: bool


@dataclass(frozen=True, slots=True)
class LearnerGone:
    """Evicted (code is why), left (code is LEFT) or replaced by its next generation (SUPERSEDED)."""

    learner_id: str
    generation: int
    code: str


@dataclass(frozen=True, slots=True)
class LearnerForgotten:
    """Gone for so long that its record was dropped."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    tokens_merged: int


Event = (
    RoundOpened
    | QuorumReached
    | RoundClosed
    | VersionCommitted
    | VersionsLost
    | LearnerJoined
    | LearnerGone
    | LearnerForgotten
    | BudgetReached
)
Effect = Tell | SeedFragment | MergeRound | Event
