"""A shard's log lines and metrics, and the history with which its promises are checked.

The core reports facts and counts them in its ledger, which `status.py` shows as JSON. Nothing here decides, or depends
on a log or metric: in another world they may be silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diloco_common import ports
from diloco_common.codec import decode_payload
from diloco_common.errors import Refusal
from diloco_common.observe.history import fingerprint
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState
from diloco_server.core.ledger import (
    ContributionAnswered,
    Fact,
    LearnerForgotten,
    LearnerGone,
    LearnerJoined,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    VersionCommitted,
    told_of,
)
from diloco_server.core.membership import LeaseState, Member
from diloco_server.core.round import Contribution
from diloco_server.core.shard import Shard


class ShardTelemetry:
    def __init__(self, shard: Shard, metrics: ShardMetrics, log: Log, history: ports.History | None) -> None:
        self._shard = shard
        self._metrics = metrics
        self._log = log
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self._caller: Identity | None = None
        self._history = ShardHistory(history, shard.epoch)
        metrics.itself.epoch.set(shard.epoch)
        settings = shard.settings
        compared = {"shard.count": settings.shard.count, "sync.staleness_max": settings.sync.staleness_max}
        if settings.sync.quorum != "all":
            compared["sync.quorum"] = settings.sync.quorum
        metrics.itself.settings(compared)

    # ------------------------------------------------------------ events

    def note(self, fact: Fact) -> None:
        self._history.note(fact)
        self._observe(fact)
        if (told := told_of(fact)) is not None:
            getattr(self._log, told.level)(told.words, **told.facts, **self._by(fact))

    @contextmanager
    def called_by(self, caller: Identity) -> Iterator[None]:
        """Hold this while a learner joins or leaves, so that the log line says who called."""
        self._caller = caller
        try:
            yield
        finally:
            self._caller = None

    def _by(self, fact: Fact) -> dict[str, str]:
        caller = self._caller
        if caller is None or not isinstance(fact, LearnerJoined | LearnerGone) or fact.learner_id != caller.learner_id:
            return {}
        return _shown(caller)

    def _observe(self, fact: Fact) -> None:
        rounds = self._metrics.rounds
        match fact:
            case ContributionAnswered(answer=PushAnswer(outcome=Outcome.ACCEPTED)):
                self._metrics.contributions.staleness.observe(fact.staleness)
            case QuorumReached():
                rounds.quorum_seconds.observe(fact.after_s)
            case RoundClosed():
                rounds.participants.observe(fact.participants)
            case VersionCommitted():
                rounds.round_seconds.observe(fact.round_s)
                rounds.version(fact.fragment_id, fact.version)
            case LearnerForgotten():
                self._metrics.learners.forget(fact.learner_id)
            case _:
                pass

    def answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> None:
        """A push was answered. The core counts contributions (`ContributionAnswered`)."""
        self._history.answered(member.learner_id, member.generation, header, answer)

    def merging(self, merge: MergeRound) -> None:
        """A closed round is about to be merged."""
        self._history.merging(merge)

    def merged(self, seconds: float) -> None:
        self._metrics.rounds.merge_seconds.observe(seconds)

    def announcing(self, state: FragmentState) -> None:
        self._history.announcing(state)
        if state.version == 0:
            fragment = state.fragment
            self._log.event("fragment seeded", fragment=fragment.fragment_id, elements=fragment.num_elements)

    def restored(self, fragment_id: int) -> None:
        """A fragment continues from a stored version or a checkpoint."""
        state = self._shard.fragments[fragment_id]
        self._history.restored(state)
        self._metrics.rounds.version(fragment_id, state.version)

    def recovered(self, took_s: float) -> None:
        shard = self._shard
        states = shard.fragments.values()
        self._log.event(
            "recovered", fragments=sum(s.seeded for s in states),
            parameters=sum(s.fragment.num_elements for s in states if s.seeded and s.fragment.traits.is_of_model),
            tokens_merged=shard.tokens_merged, epoch=shard.epoch, took_s=round(took_s, 2),
        )  # fmt: skip

    def call_refused(self, caller: Identity, refusal: Refusal) -> None:
        self._metrics.itself.call_refused(refusal.code)
        facts = {"learner": caller.learner_id, "code": refusal.code, "why": str(refusal)}
        self._log.warning("call refused", **facts, **_shown(caller))

    # ------------------------------------------------------------ sampled values

    def sample(self, now: float, *, is_ready: bool) -> None:
        """Update the gauges and the ledger's counters at a scrape."""
        shard, itself, rounds = self._shard, self._metrics.itself, self._metrics.rounds
        itself.ready.set(is_ready)
        itself.tokens_merged.follow(shard.tokens_merged)
        itself.tokens_budget.set(shard.settings.run.tokens)
        opened_at = [s.round.opened_at for s in shard.fragments.values() if s.round is not None]
        rounds.open.set(len(opened_at))
        rounds.oldest.set(now - min(opened_at, default=now))
        rounds.overdue_after.set(shard.rounds.patience.overdue_after_s)
        rounds.grace.set(shard.rounds.patience.grace_s())
        self._sample_ledger()
        live = shard.membership.live()
        self._metrics.learners.live(alive=len(live), stalled=sum(m.state is LeaseState.STALLED for m in live))
        for member in shard.membership.all():
            self._sample_learner(member, now)

    def _sample_ledger(self) -> None:
        ledger, learners, contributions = self._shard.ledger, self._metrics.learners, self._metrics.contributions
        learners.joins.follow(ledger.joins)
        learners.evictions.follow_all(ledger.evictions)
        learners.left_outs.follow(ledger.left_out)
        contributions.outcomes.follow_all(
            {"accepted": ledger.accepted, "duplicate": ledger.duplicates, "late": ledger.late}
        )
        contributions.rejected.follow_all(ledger.rejected)
        contributions.tokens.follow_all({
            "accepted": ledger.tokens_accepted, "merged": ledger.tokens_merged, "late": ledger.tokens_late,
            "refused": ledger.tokens_refused.total(), "fenced": ledger.tokens_fenced,
            "left_out": ledger.tokens_left_out,
        })  # fmt: skip
        contributions.received.follow(self.bytes_pushed)
        contributions.sent.follow(self.bytes_pulled)
        self._metrics.rounds.closed.follow_all(ledger.closed)
        self._metrics.storage.versions_lost.follow(ledger.versions_lost)

    def _sample_learner(self, member: Member, now: float) -> None:
        learners, learner, progress = self._metrics.learners, member.learner_id, member.progress
        learners.state(learner, member.state.value)
        learners.contributions.follow_all(
            {"asked": member.asked, "contributed": member.contributed, "merged": member.merged}, learner
        )
        influence = self._shard.influence
        told = influence.told(learner)
        learners.left_out.labels(learner).set(learner in influence.left_out)
        learners.kept.labels(learner).set(told.mean_kept)
        if told.mean_cosine is not None:
            learners.cosine.labels(learner).set(told.mean_cosine)
        learners.silent.labels(learner).set(now - member.last_heard)
        learners.inner_step.labels(learner).set(progress.inner_step)
        learners.tokens.labels(learner).set(progress.tokens)
        learners.step_seconds.labels(learner).set(progress.step_time_s)
        if progress.loss is not None:
            learners.loss.labels(learner).set(progress.loss)


class ShardHistory:
    """Records one epoch of one shard. `diloco_common/observe/history.py` describes all lines."""

    def __init__(self, history: ports.History | None, epoch: int) -> None:
        self._history = history
        self._write("born", role="shard", epoch=epoch)

    def _write(self, what: str, **facts: Any) -> None:
        if self._history is not None:
            self._history.write(what, **facts)

    def note(self, fact: Fact) -> None:
        match fact:
            case RoundOpened():
                self._write("opened", fragment=fact.fragment_id, round=fact.round, asked=fact.asked)
            case LearnerJoined():
                self._write("joined", learner=fact.learner_id, generation=fact.generation)
            case LearnerGone():
                self._write("gone", learner=fact.learner_id, generation=fact.generation, code=fact.code)

    def answered(self, learner_id: str, generation: int, header: PushHeader, answer: PushAnswer) -> None:
        if header.is_seed:
            return
        what = "accepted" if answer.outcome is Outcome.ACCEPTED else "declined"
        facts = {} if what == "accepted" else {"outcome": answer.outcome.value, "code": answer.code}
        self._write(
            what, learner=learner_id, generation=generation, fragment=header.fragment_id, round=header.round,
            epoch=header.epoch, base=header.base_version, tokens=header.tokens, steps=header.steps, **facts,
        )  # fmt: skip

    def merging(self, merge: MergeRound) -> None:
        """Called before a closed round is merged: after a crash, the version's file shows whether it was merged."""
        contributions = [
            _row(c) | ({} if c.counted == c.tokens else {"counted": c.counted}) for c in merge.contributions
        ]
        left_out = {"left_out": [*map(_row, merge.left_out)]} if merge.left_out else {}
        self._write(
            "merging", fragment=merge.fragment_id, version=merge.version, contributions=contributions, **left_out
        )

    def announcing(self, state: FragmentState) -> None:
        self._version("announced", state)

    def restored(self, state: FragmentState) -> None:
        """Record that this epoch begins with a stored version, perhaps renamed."""
        assert state.recovered is not None
        self._version("restored", state, stored_epoch=state.recovered.epoch)

    def _version(self, what: str, state: FragmentState, **facts: int) -> None:
        if self._history is None:
            return  # decoding a version takes long
        values, published = state.values, state.published
        assert values is not None
        assert published is not None
        decoded = torch.empty(published.values.header.num_elements)
        decode_payload(published.values, decoded)
        self._write(
            what, fragment=state.fragment.fragment_id, epoch=state.epoch, version=state.version,
            checksum=fingerprint(decoded.numpy().tobytes()),
            state=fingerprint(*(part.view(torch.uint8).numpy().tobytes() for part in (values.theta, *values.buffers))),
            tokens_merged=state.tokens_merged,
            **({} if state.fragment.traits.is_of_model else {"companion": True}), **facts,
        )  # fmt: skip


def _shown(caller: Identity) -> dict[str, str]:
    """Where a call came from, and the certificate that proved the caller's identity, if one did."""
    facts = {"peer": caller.peer} if caller.peer else {}
    if (proof := caller.proof) is not None:
        facts |= {"certificate": str(proof.subject), "serial": proof.serial}
    return facts


def _row(c: Contribution) -> dict[str, Any]:
    return {
        "learner": c.learner_id, "generation": c.generation, "round": c.round, "base": c.base_version,
        "tokens": c.tokens, "steps": c.steps,
    }  # fmt: skip
