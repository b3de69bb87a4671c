"""What the core asks of its shell, in order: say something, compute something, note a fact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_common.codec import Payload
from diloco_common.messages import Directive, PushAnswer, PushHeader
from diloco_server.core.membership import Member, Membership
from diloco_server.core.parts import PartedPayload
from diloco_server.core.round import CloseReason, Contribution


class Tell(NamedTuple):
    """Send a directive on the learner's control stream of this generation, if it has one."""

    learner_id: str
    generation: int
    directive: Directive


@dataclass(frozen=True, slots=True)
class TellAll:
    """The same, to these members. One effect, as a round asks a thousand learners, and a shard opens many at once."""

    members: Sequence[Member]
    directive: Directive


@dataclass(frozen=True, slots=True)
class SeedFragment:
    """Compute version 0 from this payload.

    Then take `Shard.seed_record`, make both durable, and hand the record to `Shard.seeded`. On failure call
    `Shard.seed_failed`.
    """

    fragment_id: int
    payload: Payload | PartedPayload


@dataclass(frozen=True, slots=True)
class MergeRound:
    """Merge these contributions into the next version.

    Then take `Shard.next_record` once, make both durable, and hand the same record to `Shard.committed`.
    """

    fragment_id: int
    version: int
    contributions: tuple[Contribution, ...]
    beside: tuple[Contribution, ...] = ()
    """Of earlier rounds, which count on: what learners that are in none of these contributed last to buffers."""
    left_out: tuple[str, ...] = ()
    """Learners whose contribution was accepted, and is left out: it is far from those of the others."""


@dataclass(frozen=True, slots=True)
class ContributionAnswered:
    """The ledger counted a contribution: one that comes in parts once, and a seed only if it is refused."""

    learner_id: str
    header: PushHeader
    answer: PushAnswer
    staleness: int
    """In versions."""


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
    why: CloseReason
    participants: int
    asked: int
    late: int
    """Learners that were still expected: what they bring is too late, and they carry it."""
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
    """A learner holds a later version than the one that this shard was restored with."""

    fragment_id: int
    epoch: int
    """That the lost version was made in."""
    recovered: int
    """The version that was restored; 0 also where none was, and a learner seeds the fragment again."""
    seen: int
    learner_id: str


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    learner_id: str
    generation: int
    returned: bool


@dataclass(frozen=True, slots=True)
class LearnerGone:
    """Evicted (the code says why), left (LEFT), or replaced by its next generation (SUPERSEDED, STALE_GENERATION)."""

    learner_id: str
    generation: int
    code: str


@dataclass(frozen=True, slots=True)
class LearnerForgotten:
    """Gone for so long that what was kept about it was dropped."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class LearnerQuarantined:
    learner_id: str
    why: str
    """The last evidence against it."""
    outliers: int
    """Among its last contributions."""
    for_s: float


@dataclass(frozen=True, slots=True)
class LearnerReleased:
    """Its quarantine is over."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class SameLosses:
    """Two learners report the same losses: they train on the same batches."""

    learner_id: str
    other: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    tokens_merged: int


Fact = (
    ContributionAnswered
    | RoundOpened
    | QuorumReached
    | RoundClosed
    | VersionCommitted
    | VersionsLost
    | LearnerJoined
    | LearnerGone
    | LearnerForgotten
    | LearnerQuarantined
    | LearnerReleased
    | SameLosses
    | BudgetReached
)
"""Something that happened, for the log, the metrics and the history."""
Effect = Tell | TellAll | SeedFragment | MergeRound | Fact


class Outbox:
    """Effects that the shell has not taken yet, in order."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def tell(self, member: Member, directive: Directive) -> None:
        """Tell one generation of a learner."""
        self.add(Tell(member.learner_id, member.generation, directive))

    def tell_live(self, directive: Directive) -> None:
        """Tell every learner that has a lease."""
        self.tell_all(self._membership.live(), directive)

    def tell_all(self, members: Sequence[Member], directive: Directive) -> None:
        """Tell these generations of their learners."""
        self.add(TellAll(members, directive))

    def take(self) -> list[Effect]:
        """Empty it."""
        effects, self._effects = self._effects, []
        return effects
