"""What happened on a shard, told five ways: log lines, metrics, the recent events of /status, /rounds, the history.

It decides nothing, and branches on nothing that a log or a metric returns: in another world they may be silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, cast

from diloco_common import ports
from diloco_common.logs import Log
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_common.metrics import ShardMetrics
from diloco_common.ports import Clock
from diloco_server.core.effects import (
    BudgetReached,
    ContributionAnswered,
    Fact,
    LearnerForgotten,
    LearnerGone,
    LearnerJoined,
    LearnerQuarantined,
    LearnerReleased,
    MergeRound,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    SameLosses,
    VersionCommitted,
    VersionsLost,
)
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member, State
from diloco_server.core.shard import Shard
from diloco_server.history import ShardHistory
from diloco_server.timeline import Timeline

EVENTS_MAX = 50


class ShardTelemetry:
    """Tells of one shard. Owned by its event loop."""

    def __init__(
        self, shard: Shard, metrics: ShardMetrics, log: Log, clock: Clock, history: ports.History | None
    ) -> None:
        """`clock` is the shard's; None for `history`: nothing is recorded."""
        self._shard = shard
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._events: deque[tuple[float, dict[str, Any]]] = deque(maxlen=EVENTS_MAX)
        self.timeline = Timeline(shard.epoch)
        self.versions_lost = 0
        self.staleness: dict[str, int] = {}
        """Learner -> that of its last accepted contribution, in versions. As long as the learner is remembered."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self._history = None if history is None else ShardHistory(history, shard.epoch)
        metrics.itself.epoch(shard.epoch)
        settings = shard.settings
        compared = {"shard.count": settings.shard.count, "sync.staleness_max": settings.sync.staleness_max}
        if settings.sync.quorum != "all":
            compared["sync.quorum"] = settings.sync.quorum
        metrics.itself.settings(compared)

    def note(self, event: Fact) -> None:
        """An event of the core."""
        if self._history is not None:
            self._history.note(event)
        self.timeline.note(event, self._clock())
        match event:
            case ContributionAnswered():
                self._answered(event)
            case RoundOpened():
                self._log.debug("round opened", fragment=event.fragment_id, round=event.round, asked=event.asked)
            case QuorumReached():
                self._metrics.rounds.quorum_reached(event.after_s)
            case RoundClosed():
                why = cast(Literal["all", "grace", "lease"], event.why)
                self._metrics.rounds.closed(why, event.participants)
                self._log.debug(
                    "round closed", fragment=event.fragment_id, round=event.round, why=event.why,
                    participants=event.participants, asked=event.asked, open_s=round(event.open_s, 3),
                )  # fmt: skip
            case VersionCommitted():
                self._metrics.rounds.committed(event.fragment_id, event.version, event.round_s)
                self._log.debug(
                    "version committed", fragment=event.fragment_id, version=event.version,
                    participants=event.participants, tokens=event.tokens, round_s=round(event.round_s, 3),
                )  # fmt: skip
            case VersionsLost():
                self._metrics.storage.lost(event.seen - event.recovered)
                self.versions_lost += event.seen - event.recovered
                self._say(
                    "versions lost", self._log.error, fragment=event.fragment_id, epoch=event.epoch,
                    recovered=event.recovered, seen=event.seen, learner=event.learner_id,
                )  # fmt: skip
            case LearnerJoined():
                self._metrics.learners.joined()
                what = "returned" if event.returned else "joined"
                self._say(what, learner=event.learner_id, generation=event.generation)
            case LearnerGone():
                self._gone(event)
            case LearnerForgotten():
                self._metrics.learners.forget(event.learner_id)
                self.staleness.pop(event.learner_id, None)
            case LearnerQuarantined():
                self._metrics.learners.put_in_quarantine()
                self._say(
                    "quarantined", self._log.warning, learner=event.learner_id, why=event.why, outliers=event.outliers,
                    for_s=round(event.for_s),
                )  # fmt: skip
            case LearnerReleased():
                self._say("released", learner=event.learner_id)
            case SameLosses():
                self._say(
                    "same losses: these learners train on the same batches; order their data by learner.seed",
                    self._log.warning, learner=event.learner_id, other=event.other,
                )  # fmt: skip
            case BudgetReached():
                self._say("budget reached", tokens_merged=event.tokens_merged)

    def merging(self, merge: MergeRound) -> None:
        """A closed round is about to become a version."""
        if self._history is not None:
            self._history.merging(merge)

    def merged(self, seconds: float) -> None:
        """It took so long to merge it and to take the outer step."""
        self._metrics.rounds.merged(seconds)

    def announcing(self, state: FragmentState) -> None:
        """A version is durable, and nobody has heard of it yet."""
        if self._history is not None:
            self._history.announcing(state)
        if state.version == 0:
            fragment = state.fragment
            self._log.event("fragment seeded", fragment=fragment.fragment_id, elements=fragment.num_elements)

    def restored(self, fragment_id: int) -> None:
        """A fragment goes on from a version that an earlier epoch of the shard, or a checkpoint, has left."""
        state = self._shard.fragments[fragment_id]
        if self._history is not None:
            self._history.restored(state)
        self._metrics.rounds.version(fragment_id, state.version)

    def recovered(self, took_s: float) -> None:
        """All that the data folder held is back."""
        shard = self._shard
        states = shard.fragments.values()
        self._log.event(
            "recovered", fragments=sum(s.seeded for s in states),
            parameters=sum(s.fragment.num_elements for s in states if s.seeded and s.fragment.traits.is_of_model),
            tokens_merged=shard.tokens_merged, epoch=shard.epoch, took_s=round(took_s, 2),
        )  # fmt: skip

    def answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> None:
        """A push got its outcome. What counts as a contribution, the core says (`ContributionAnswered`)."""
        if self._history is not None:
            self._history.answered(member.learner_id, member.generation, header, answer)

    def call_refused(self, learner_id: str, code: str, words: str) -> None:
        """A call ended with an error status."""
        self._metrics.itself.call_refused(code)
        self._log.warning("call refused", learner=learner_id, code=code, why=words)

    def received(self, num_bytes: int) -> None:
        self.bytes_pushed += num_bytes
        self._metrics.contributions.received(num_bytes)

    def sent(self, num_bytes: int) -> None:
        self.bytes_pulled += num_bytes
        self._metrics.contributions.sent(num_bytes)

    def sample(self, now: float, *, is_ready: bool) -> None:
        """Set the gauges; about once per heartbeat."""
        shard, metrics = self._shard, self._metrics
        live = shard.membership.live()
        metrics.itself.ready(is_ready)
        metrics.learners.live(alive=len(live), stalled=sum(m.state is State.STALLED for m in live))
        opened_at = [s.round.opened_at for s in shard.fragments.values() if s.round is not None]
        metrics.rounds.open(len(opened_at), oldest_s=now - min(opened_at, default=now))
        metrics.rounds.grace(shard.grace_s())
        metrics.itself.tokens(merged=shard.tokens_merged, budget=shard.settings.run.tokens)
        ledger = shard.ledger
        metrics.contributions.tokens(
            accepted=ledger.tokens_accepted,
            merged=ledger.tokens_merged,
            late=ledger.tokens_late,
            refused=sum(ledger.tokens_refused.values()),
            fenced=ledger.tokens_fenced,
        )
        for member in shard.membership.all():
            metrics.learners.state(member.learner_id, member.state.value)
            metrics.learners.contributions(
                member.learner_id, asked=member.asked, contributed=member.contributed, merged=member.merged
            )
            metrics.learners.quarantined(member.learner_id, is_so=shard.quarantine.holds(member.learner_id))
            metrics.learners.silent(member.learner_id, now - member.last_heard)
            p = member.progress
            metrics.learners.progress(
                member.learner_id,
                inner_step=p.inner_step,
                tokens=p.tokens,
                step_seconds=p.step_time_s,
                loss=p.loss,
            )

    def recent(self, now: float) -> list[dict[str, Any]]:
        """The last events, oldest first, with their age in seconds."""
        return [{"ago_s": round(now - at, 3), **event} for at, event in self._events]

    def _answered(self, event: ContributionAnswered) -> None:
        header, answer = event.header, event.answer
        match answer.outcome:
            case Outcome.ACCEPTED:
                self._metrics.contributions.accepted(staleness=event.staleness)
                self.staleness[event.learner_id] = event.staleness
            case Outcome.DUPLICATE:
                self._metrics.contributions.duplicate()
            case Outcome.LATE:
                self._metrics.contributions.late()
            case Outcome.REJECTED:
                self._metrics.contributions.rejected(answer.code)
                self._log.warning(
                    "contribution refused", fragment=header.fragment_id, round=header.round,
                    code=answer.code, why=answer.message,
                )  # fmt: skip

    def _gone(self, event: LearnerGone) -> None:
        learner, generation = event.learner_id, event.generation
        if event.code == "LEFT":
            self._say("left", learner=learner, generation=generation)
        elif event.code in ("SUPERSEDED", "STALE_GENERATION"):
            self._say("replaced", learner=learner, generation=generation, code=event.code)
        else:
            self._metrics.learners.evicted(event.code)
            self._say("evicted", learner=learner, generation=generation, code=event.code)

    def _say(self, event: str, say: Callable[..., None] | None = None, /, **facts: Any) -> None:
        (say or self._log.event)(event, **facts)
        now, told = self._clock(), {"event": event, **facts}
        self._events.append((now, told))
        self.timeline.event(told, now)
