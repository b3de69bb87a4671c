"""What happens on a shard: the facts that its core notes, and the one account that is kept of them.

A fact is noted once (`effects.Outbox.note`), and counted here and nowhere else. Whatever the shell tells is a view of
that: the log says single facts, in the words of `told_of`; /status, /rounds and the counters of /metrics show the
account. Pure: times come in.
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
"""Of all fragments together. The oldest go first."""
EVENTS_MAX = 512
ANSWER_MAX = 512
"""Rounds of one answer. The next one goes on from there."""
RECORD_MAX = 32_768
"""Contributions to versions that are remembered, of all fragments together. The oldest go first."""
RECORD_ANSWER_MAX = 1024
"""Contributions of one answer."""

# ------------------------------------------------------------------ facts


@dataclass(frozen=True, slots=True)
class ContributionAnswered:
    """A contribution got its answer: one that comes in parts once, and a seed only if it is refused."""

    learner_id: str
    header: PushHeader
    answer: PushAnswer
    staleness: int
    """In versions."""
    tokens: int
    """That the account counts: they are of what the model learns."""


@dataclass(frozen=True, slots=True)
class ContributionDropped:
    """It was accepted, and comes into no version: its learner has lost its lease."""

    learner_id: str
    fragment_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ContributionLeftOut:
    """It was taken and has no weight, as its learner is left out (`influence.py`). Its work is gone."""

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
    """Learners that were still expected: what they bring is late, and they carry it."""
    open_s: float


class Merged(NamedTuple):
    """What one learner has in a version."""

    learner_id: str
    tokens: int
    """As it claimed them."""
    share: float
    """Of the weights of the version, in [0, 1]; 0: it was left out."""
    kept: float
    """What was left of its length, in (0, 1]; the rest was cut."""


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    fragment_id: int
    version: int
    participants: int
    tokens: int
    round_s: float
    """From the opening of the round to the announcement."""
    merged: tuple[Merged, ...] = ()
    """By learner; those that were left out come last."""


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
    tokens: int = 0
    """Merged into what the learner has seen, and not into what was restored."""


@dataclass(frozen=True, slots=True)
class ValuesReplaced:
    """A line that began with nothing ends: a learner that had seen more has brought its values."""

    fragment_id: int
    version: int
    """The last one of that line."""
    tokens_merged: int
    """Into it."""
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
    """Gone for so long that what was kept about it was dropped."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class LearnerLeftOut:
    """What it contributes points away from the others, or is always the same: from now on it is not merged."""

    learner_id: str
    cosine: float
    """With the sum of the others: the mean over two H."""


@dataclass(frozen=True, slots=True)
class LearnerTakesPart:
    """It does not point away any more: it is merged again."""

    learner_id: str


@dataclass(frozen=True, slots=True)
class SameLosses:
    """Two learners report the same losses: they train on the same batches."""

    learner_id: str
    other: str


@dataclass(frozen=True, slots=True)
class EveryChanged:
    """H is another one (sync.sync_every = "auto")."""

    before: int
    every: int
    why: str


@dataclass(frozen=True, slots=True)
class MergeChosen:
    """How contributions of this run are merged from now on (sync.merge = "auto")."""

    merge: str
    why: str


@dataclass(frozen=True, slots=True)
class MergeStays:
    """A learner trains with what another merge rule is for. It is merged as all others are."""

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

# ------------------------------------------------------------------ their words


class FactWords(NamedTuple):
    """A fact as people hear of it."""

    words: str
    facts: Mapping[str, Any]
    level: Literal["debug", "event", "warning", "error"] = "event"
    """Of its line in the log."""


def told_of(fact: Fact) -> FactWords | None:
    """None: nobody is told of it by itself."""
    match fact:
        case ContributionAnswered(header=header, answer=answer) if answer.outcome is Outcome.REJECTED:
            facts = {"fragment": header.fragment_id, "round": header.round, "code": answer.code, "why": answer.message}
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
            words = "values replaced: this learner has seen more than they held"
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
    """Its fields, by the names that people know."""
    values = {f.name.removesuffix("_id"): getattr(fact, f.name) for f in fields(fact) if f.name not in left_out}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


# ------------------------------------------------------------------ the account


NEWS = (
    VersionsLost, ValuesReplaced, LearnerJoined, LearnerGone, LearnerLeftOut, LearnerTakesPart, SameLosses,
    EveryChanged, MergeChosen, MergeStays, BudgetReached,
)  # fmt: skip
"""Facts that are among the events of /status and /rounds; others are in the log alone."""


class Event(NamedTuple):
    """Something that people want to hear of."""

    seq: int
    at: float
    fact: Fact


@dataclass
class TracedRound:
    """One round, as far as it has come. Seconds count from its opening."""

    fragment_id: int
    round: int
    opened_at: float
    asked: int
    seq: int = 0
    """Of its last change."""
    quorum_s: float | None = None
    closed_s: float | None = None
    why: str = ""
    """Why it closed: all, grace or lease."""
    participants: int = 0
    announced_s: float | None = None
    """When its version was announced."""
    tokens: int = 0
    absent: int = 0
    """Learners that it had asked and that were not there when it closed: those that /status counts as ABSENT."""
    refused: Counter[str] = field(default_factory=Counter)
    """Contributions to it that were refused, by code."""


class Recorded(NamedTuple):
    """One line of the record: whose work is in a version."""

    seq: int
    at: float
    fragment_id: int
    version: int
    merged: Merged


@dataclass
class Ledger:
    """Counts of one epoch, which only grow, and its last rounds and events.

    Tokens count once per fragment of the model that they were pushed for. Every change of a round, and every event,
    takes the next number: whoever has seen all up to one of them asks for what came after it.
    """

    rounds: int = 0
    """Rounds that became a version."""
    participants: int = 0
    """Contributions merged, over all rounds."""
    closed: Counter[str] = field(default_factory=Counter)
    """Rounds that were closed, by why."""
    accepted: int = 0
    duplicates: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Refusals by stable code."""
    joins: int = 0
    evictions: Counter[str] = field(default_factory=Counter)
    """Evictions by stable code."""
    left_out: int = 0
    """Times that a learner was left out."""
    versions_lost: int = 0
    staleness: dict[str, int] = field(default_factory=dict)
    """Learner -> that of its last accepted contribution, in versions. As long as the learner is remembered."""
    tokens_accepted: int = 0
    tokens_merged: int = 0
    tokens_late: int = 0
    """Of contributions that came too late. Their learners carry the work into the next round."""
    tokens_refused: Counter[str] = field(default_factory=Counter)
    tokens_fenced: int = 0
    """Accepted, then dropped: the learner lost its lease before the round closed. It carries the work if it lives."""
    tokens_left_out: int = 0
    """Accepted, and of no weight in its version: the learner was left out."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    _record: deque[Recorded] = field(default_factory=lambda: deque(maxlen=RECORD_MAX))
    _recorded: int = 0  # lines of the record so far
    _seq: int = 0  # grows; never reset within an epoch
    _traced: OrderedDict[tuple[int, int], TracedRound] = field(default_factory=OrderedDict)  # as they changed last

    @property
    def tokens_in_flight(self) -> int:
        return self.tokens_accepted - self.tokens_merged - self.tokens_fenced - self.tokens_left_out

    @property
    def participants_mean(self) -> float:
        return self.participants / self.rounds if self.rounds else 0.0

    def since(self, seq: int) -> tuple[int, Sequence[TracedRound], Sequence[Event]]:
        """What is newer than a number, oldest first, at most `ANSWER_MAX` rounds; and the number to ask with next."""
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
        """Lines of the record after a number, oldest first, at most `RECORD_ANSWER_MAX`."""
        gone = self._recorded - len(self._record)
        return list(islice(self._record, max(0, seq - gone), max(0, seq - gone) + RECORD_ANSWER_MAX))

    # ------------------------------------------------------------ reducing

    def note(self, fact: Fact, now: float) -> None:
        """Count a fact. The only way that this changes."""
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
        """The round, as the newest, with these fields. None: it is too old, or of another epoch."""
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
