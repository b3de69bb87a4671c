"""The facts that a shard's core records, and their totals.

A fact is noted once (`effects.Outbox.note`) and counted only here. The log prints single facts (`told_of`); /status,
/rounds and the counters of /metrics show the totals.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal, NamedTuple

from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_server.core.round import CloseReason

ROUNDS_MAX = 2048
"""Maximum number of rounds remembered, over all fragments. The oldest are dropped."""
ANSWER_MAX = 512
"""Maximum number of rounds, or lines of the record, in one answer (the next continues it), and of remembered events."""
RECORD_MAX = 32_768
"""Maximum number of merged contributions remembered, over all fragments. The oldest are dropped."""

# ------------------------------------------------------------------ facts


@dataclass(frozen=True, slots=True)
class ContributionAnswered:
    """A contribution was answered. A contribution in parts counts once, and a seed counts only if it is refused."""

    learner_id: str
    header: PushHeader
    answer: PushAnswer
    staleness: int
    tokens: int
    """Tokens to count: those of the model's fragments."""


@dataclass(frozen=True, slots=True)
class ContributionDropped:
    """An accepted contribution will not be merged: its learner lost its lease."""

    learner_id: str
    fragment_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ContributionLeftOut:
    """A contribution has no weight because its learner is left out (`influence.py`). Its work is lost."""

    learner_id: str
    fragment_id: int
    tokens: int


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
    absent: int
    """Learners that were still expected: their contributions will be late, and they carry the work."""
    open_s: float


class Merged(NamedTuple):
    """One learner's share of a version."""

    learner_id: str
    tokens: int
    """The number that the learner claimed."""
    share: float
    """Share of the version's weights, in [0, 1]; 0: left out."""
    kept: float
    """Factor that scaled its length, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    fragment_id: int
    version: int
    participants: int
    tokens: int
    round_s: float
    """From opening the round to announcing the version."""
    merged: tuple[Merged, ...] = ()
    """Sorted by learner; those left out come last."""


@dataclass(frozen=True, slots=True)
class VersionsLost:
    """A learner holds a later version than the one restored."""

    fragment_id: int
    epoch: int
    recovered: int
    """The restored version; also 0 if none was restored, and a learner seeds the fragment again."""
    seen: int
    learner_id: str
    tokens: int = 0
    """Tokens merged into the version that the learner has seen, but not into the restored one."""


@dataclass(frozen=True, slots=True)
class ValuesReplaced:
    """A learner that had seen more tokens replaced the values of versions that began from nothing."""

    fragment_id: int
    version: int
    """The last version before the replacement."""
    tokens_merged: int
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

    @property
    def how(self) -> Literal["left", "replaced", "evicted"]:
        if self.code == "LEFT":
            return "left"
        return "replaced" if self.code in ("SUPERSEDED", "STALE_GENERATION") else "evicted"


@dataclass(frozen=True, slots=True)
class LearnerForgotten:
    """A learner has been gone for so long that its state was dropped."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class LearnerLeftOut:
    """A learner is not merged from now on: it points away from the others, or repeats itself."""

    learner_id: str
    cosine: float
    """Cosine with the sum of the others: the mean over two H."""


@dataclass(frozen=True, slots=True)
class LearnerTakesPart:
    learner_id: str


@dataclass(frozen=True, slots=True)
class SameLosses:
    """Two learners report the same losses, so they train on the same batches."""

    learner_id: str
    other: str


@dataclass(frozen=True, slots=True)
class EveryChanged:
    """H changed (sync.sync_every = "auto")."""

    before: int
    every: int
    why: str


@dataclass(frozen=True, slots=True)
class MergeChosen:
    """The merge rule for the rest of the run was chosen (sync.merge = "auto")."""

    merge: str
    why: str


@dataclass(frozen=True, slots=True)
class MergeStays:
    """A learner's optimizer suits another merge rule than the run's. It is merged like the others."""

    merge: str
    learner_id: str
    why: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    tokens_merged: int


Fact = (
    ContributionAnswered
    | ContributionDropped
    | ContributionLeftOut
    | RoundOpened
    | QuorumReached
    | RoundClosed
    | VersionCommitted
    | VersionsLost
    | ValuesReplaced
    | LearnerJoined
    | LearnerGone
    | LearnerForgotten
    | LearnerLeftOut
    | LearnerTakesPart
    | SameLosses
    | EveryChanged
    | MergeChosen
    | MergeStays
    | BudgetReached
)

# ------------------------------------------------------------------ facts in words


class FactWords(NamedTuple):
    words: str
    facts: Mapping[str, Any]
    level: Literal["debug", "event", "warning", "error"] = "event"


def told_of(fact: Fact) -> FactWords | None:
    """The log line for a fact; None: it has none."""
    match fact:
        case ContributionAnswered(header=header, answer=answer) if answer.outcome is Outcome.REJECTED:
            facts = {
                "learner": fact.learner_id, "fragment": header.fragment_id, "round": header.round, "code": answer.code,
                "why": answer.message,
            }  # fmt: skip
            return FactWords("contribution refused", facts, "warning")
        case RoundOpened():
            return FactWords("round opened", _shown(fact), "debug")
        case RoundClosed():
            return FactWords("round closed", _shown(fact, "absent"), "debug")
        case VersionCommitted():
            return FactWords("version committed", _shown(fact, "merged"), "debug")
        case VersionsLost():
            return FactWords("versions lost", _shown(fact), "error")
        case ValuesReplaced():
            words = "values replaced: this learner has seen more tokens than they held"
            return FactWords(words, _shown(fact), "warning")
        case LearnerJoined():
            return FactWords("returned" if fact.returned else "joined", _shown(fact, "returned"))
        case LearnerGone():
            return FactWords(fact.how, _shown(fact, "code") if fact.how == "left" else _shown(fact))
        case LearnerLeftOut():
            return FactWords("left out", _shown(fact), "warning")
        case LearnerTakesPart():
            return FactWords("takes part again", _shown(fact))
        case SameLosses():
            words = "same losses: these learners train on the same batches; order their data by learner.seed"
            return FactWords(words, _shown(fact), "warning")
        case EveryChanged():
            return FactWords("sync_every changed", _shown(fact))
        case MergeChosen():
            return FactWords("merge rule chosen", _shown(fact))
        case MergeStays():
            return FactWords("merge rule stays: set sync.merge for another", _shown(fact), "warning")
        case BudgetReached():
            return FactWords("budget reached", _shown(fact))
        case _:
            return None


def _shown(fact: Fact, *left_out: str) -> dict[str, Any]:
    values = {f.name.removesuffix("_id"): getattr(fact, f.name) for f in fields(fact) if f.name not in left_out}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


# ------------------------------------------------------------------ totals


NEWS = (
    VersionsLost, ValuesReplaced, LearnerJoined, LearnerGone, LearnerLeftOut, LearnerTakesPart, SameLosses,
    EveryChanged, MergeChosen, MergeStays, BudgetReached,
)  # fmt: skip
"""Facts among the events of /status and /rounds; the others are only logged or counted."""


class Event(NamedTuple):
    seq: int
    at: float
    fact: Fact


@dataclass
class TracedRound:
    """The progress of one round. Seconds count from its opening."""

    fragment_id: int
    round: int
    opened_at: float
    asked: int
    seq: int = 0
    quorum_s: float | None = None
    closed_s: float | None = None
    why: str = ""
    """Why it closed: all, grace or lease."""
    participants: int = 0
    announced_s: float | None = None
    tokens: int = 0
    absent: int = 0
    """Asked learners that were missing when it closed; /status counts them as ABSENT."""
    refused: Counter[str] = field(default_factory=Counter)


class Recorded(NamedTuple):
    """One line of the record: a contribution in a version."""

    seq: int
    at: float
    fragment_id: int
    version: int
    merged: Merged


@dataclass
class Ledger:
    """Totals of one epoch, which only grow, and its last rounds and events.

    Tokens count once per fragment of the model that they were pushed for. Every change of a round and every event takes
    the next number, so a reader asks for everything after the last number it has seen.
    """

    rounds: int = 0
    """Rounds that became a version."""
    participants: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    duplicates: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Refusals by stable code."""
    joins: int = 0
    evictions: Counter[str] = field(default_factory=Counter)
    """Evictions by stable code."""
    left_out: int = 0
    versions_lost: int = 0
    staleness: dict[str, int] = field(default_factory=dict)
    """Learner -> staleness of its last accepted contribution, in versions. Kept while the learner is remembered."""
    tokens_accepted: int = 0
    tokens_merged: int = 0
    tokens_late: int = 0
    """Tokens of late contributions. Their learners carry the work into the next round."""
    tokens_refused: Counter[str] = field(default_factory=Counter)
    tokens_fenced: int = 0
    """Dropped because the learner lost its lease before the round closed. It carries the work if it lives."""
    tokens_left_out: int = 0
    """Accepted, but without weight in its version because the learner was left out."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=ANSWER_MAX))
    _record: deque[Recorded] = field(default_factory=lambda: deque(maxlen=RECORD_MAX))
    _recorded: int = 0  # lines recorded so far
    _seq: int = 0  # grows; never reset within an epoch
    _traced: OrderedDict[tuple[int, int], TracedRound] = field(default_factory=OrderedDict)  # by last change

    @property
    def tokens_in_flight(self) -> int:
        return self.tokens_accepted - self.tokens_merged - self.tokens_fenced - self.tokens_left_out

    @property
    def participants_mean(self) -> float:
        return self.participants / self.rounds if self.rounds else 0.0

    def since(self, seq: int) -> tuple[int, Sequence[TracedRound], Sequence[Event]]:
        """Changes after `seq`, oldest first, with at most `ANSWER_MAX` rounds; and the `seq` for the next call."""
        newer: list[TracedRound] = []
        for traced in reversed(self._traced.values()):
            if traced.seq <= seq:
                break
            newer.append(traced)
        newer.reverse()
        shown = newer[:ANSWER_MAX]
        upto = shown[-1].seq if len(shown) < len(newer) else self._seq
        return upto, shown, [event for event in self.events if seq < event.seq <= upto]

    def record_since(self, seq: int) -> list[Recorded]:
        """Lines of the record after `seq`, oldest first, at most `ANSWER_MAX`."""
        gone = self._recorded - len(self._record)
        return list(islice(self._record, max(0, seq - gone), max(0, seq - gone) + ANSWER_MAX))

    # ------------------------------------------------------------ reducing

    def note(self, fact: Fact, now: float) -> None:
        """Count a fact. Nothing else changes the ledger."""
        match fact:
            case ContributionAnswered():
                self._answered(fact)
            case ContributionDropped():
                self.tokens_fenced += fact.tokens
            case ContributionLeftOut():
                self.tokens_left_out += fact.tokens
            case RoundOpened():
                self._traced[fact.fragment_id, fact.round] = TracedRound(fact.fragment_id, fact.round, now, fact.asked)
                self._changed(fact.fragment_id, fact.round)
            case QuorumReached():
                self._changed(fact.fragment_id, fact.round, quorum_s=fact.after_s)
            case RoundClosed():
                self.closed[fact.why.value] += 1
                self._changed(
                    fact.fragment_id, fact.round, closed_s=fact.open_s, why=fact.why.value,
                    participants=fact.participants, asked=fact.asked, absent=fact.absent,
                )  # fmt: skip
            case VersionCommitted():
                self.rounds += 1
                self.participants += fact.participants
                self.tokens_merged += fact.tokens
                for merged in fact.merged:
                    self._recorded += 1
                    self._record.append(Recorded(self._recorded, now, fact.fragment_id, fact.version, merged))
                self._changed(fact.fragment_id, fact.version, announced_s=fact.round_s, tokens=fact.tokens)
            case VersionsLost():
                self.versions_lost += fact.seen - fact.recovered
            case LearnerJoined():
                self.joins += 1
            case LearnerGone(how="evicted"):
                self.evictions[fact.code] += 1
            case LearnerForgotten():
                self.staleness.pop(fact.learner_id, None)
            case LearnerLeftOut():
                self.left_out += 1
            case _:
                pass
        if isinstance(fact, NEWS):
            self._seq += 1
            self.events.append(Event(self._seq, now, fact))

    def _answered(self, fact: ContributionAnswered) -> None:
        header, answer = fact.header, fact.answer
        match answer.outcome:
            case Outcome.ACCEPTED:
                self.accepted += 1
                self.tokens_accepted += fact.tokens
                self.staleness[fact.learner_id] = fact.staleness
            case Outcome.DUPLICATE:
                self.duplicates += 1
            case Outcome.LATE:
                self.late += 1
                self.tokens_late += fact.tokens
            case Outcome.REJECTED:
                self.rejected[answer.code] += 1
                self.tokens_refused[answer.code] += fact.tokens
                if (traced := self._changed(header.fragment_id, header.round)) is not None:
                    traced.refused[answer.code] += 1

    def _changed(self, fragment_id: int, number: int, **what: Any) -> TracedRound | None:
        """Update these fields of a round and make it the newest. None: it is too old, or from another epoch."""
        traced = self._traced.get((fragment_id, number))
        if traced is None:
            return None
        self._seq += 1
        traced.seq = self._seq
        for name, value in what.items():
            setattr(traced, name, value)
        self._traced.move_to_end((fragment_id, number))
        if len(self._traced) > ROUNDS_MAX:
            self._traced.popitem(last=False)
        return traced
