"""The shard: one state machine that makes every decision and performs no I/O.

Callers report events and their times (`join`, `progress`, `committed`, ..., `tick`). The shard changes its state and
queues effects for the shell to carry out. This file is the interface; it also updates rounds and versions when a
learner joins or goes. Five files make the other decisions. Callers report directly to `taking`, `versions` and `rounds`
if an event concerns only one of these:

    membership.py   leases and generations
    influence.py    how much one contribution may move the model
    taking.py       the answer to each push
    rounds.py       when rounds open and close
    versions.py     seeding, restoring, committing and announcing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco_common.codec import Payload
from diloco_common.errors import (
    BadRequest,
    Draining,
    NotJoined,
    NotSeeded,
    Revoked,
    StaleGeneration,
    Superseded,
    VersionGone,
)
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Manifest, TensorSpec
from diloco_common.wire.messages import (
    Drain,
    Evicted,
    JoinAnswer,
    JoinRequest,
    LearnerPolicy,
    Progress,
    PullHeader,
    Pulse,
    Stop,
    VersionId,
)
from diloco_server.core.arithmetic import Published
from diloco_server.core.effects import Effect, Outbox
from diloco_server.core.fragment import FragmentState, status_of
from diloco_server.core.influence import Direction, Influence
from diloco_server.core.ledger import LearnerForgotten, LearnerGone, LearnerJoined, Ledger, SameLosses
from diloco_server.core.membership import Likeness, Member, Membership, superseded
from diloco_server.core.model import check_model
from diloco_server.core.record import Record
from diloco_server.core.rounds import Rounds
from diloco_server.core.versions import Versions


class Shard:
    """The state machine of one shard. Not thread-safe: one thread owns it."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.membership = Membership(settings.lease, settings.shard.max_learners)
        self.draining = False
        self._likeness = Likeness()
        self._outbox = Outbox(self.membership)
        self.influence = Influence(settings.guard.trust == "strangers")
        self.versions = Versions(
            settings.run, settings.shard, settings.sync, epoch, self.influence, self.membership, self._outbox
        )
        self.rounds = Rounds(settings, self.influence, self.membership, self.versions, self._outbox)
        self.taking = self.rounds.taking

    def take_effects(self) -> list[Effect]:
        return self._outbox.take()

    # ------------------------------------------------------------ learners

    def join(self, learner_id: str, request: JoinRequest, now: float) -> Member:
        """Grant a lease, ending any earlier one. Raises Draining, Superseded, ManifestMismatch, FrozenMismatch or
        Busy."""
        self._check_not_draining()
        self._outbox.now = now
        membership, versions, process_id = self.membership, self.versions, request.process_id
        membership.welcome(learner_id, process_id, now - request.age_s)
        versions.adopt_or_check(request.tensors)
        versions.check_frozen(request.frozen)
        old = membership.get(learner_id)
        if old is not None and old.live:
            if old.process_id == process_id:
                self._end(old, StaleGeneration.code, f"{learner_id} has joined again")
            else:
                self._end(old, Superseded.code, str(superseded(learner_id)))
        if old is None or old.process_id != process_id:
            self.influence.begin(learner_id)
        member = membership.join(learner_id, process_id, now, request.index, request.age_s)
        member.site = request.site
        versions.frozen.adopt(learner_id, request.frozen)
        versions.tell_keys(request.ties)
        versions.forget_others(learner_id, process_id)
        self._outbox.note(LearnerJoined(learner_id, member.generation, returned=old is not None))
        for state in versions.look_for_losses(learner_id, request.held, request.tokens_seen):
            self.rounds.ask_missing(state)
        if all(theirs.epoch != self.epoch for theirs in request.held):
            versions.look_for_more(learner_id, request.tokens_seen, now - self.settings.lease.lease_s)
        return member

    def _check_not_draining(self) -> None:
        if self.draining:
            raise Draining(f"shard {self.settings.shard.index} is shutting down; try again when it is back")

    def observe(self, tensors: Sequence[TensorSpec]) -> None:
        """Check the model of an observer, if it sends one. Raises NotSeeded or ManifestMismatch."""
        if self.manifest is None:
            raise NotSeeded("no learner has joined yet, so there is no model to look at; try again later")
        if tensors:
            check_model(self.manifest, tensors)

    def check(self, learner_id: str, generation: int, epoch: int) -> Member:
        """The member that makes this call. Raises NotJoined, StaleGeneration, Superseded or LeaseExpired."""
        if epoch != self.epoch:
            raise NotJoined(f"{learner_id} has no lease here since this shard restarted; join again")
        return self.membership.check(learner_id, generation)

    def attend(self, member: Member) -> None:
        """A control stream opened: resend everything that the learner may have missed. Repeats are harmless."""
        self._outbox.tell(member, self.pulse())
        for state in self.fragments.values():
            if state.seeded and member.learner_id not in state.may_bring:
                self._outbox.tell(member, state.announcement())
            if state.round and member.learner_id in state.round.awaited:
                self._outbox.tell(member, state.request())
        if self.done:
            self._outbox.tell(member, Stop())
        if self.draining:
            self._outbox.tell(member, Drain())

    def progress(self, member: Member, progress: Progress, now: float) -> None:
        self._outbox.now = now
        other = self._likeness.heard(member.learner_id, progress)
        if other is not None:
            self._outbox.note(SameLosses(member.learner_id, other))
        if progress.inner and progress.inner != member.reported.inner:
            self.versions.hear_inner(member.learner_id, progress.inner)
        self.membership.heard(member, progress, now)

    def leave(self, member: Member) -> None:
        self.membership.leave(member)
        self._outbox.note(LearnerGone(member.learner_id, member.generation, "LEFT"))
        self.rounds.leave(member)

    def revoke(self, member: Member) -> None:
        """Revoke a learner's access. Its contributions to open rounds are fenced off."""
        self.membership.revoke(member)
        self._end(member, Revoked.code, f"{member.learner_id} was revoked")

    def _expire(self, now: float) -> None:
        """End leases that ran out, and forget learners that have been gone for too long."""
        for member in self.membership.expire(now):
            refusal = self.membership.eviction(member)
            self._end(member, refusal.code, str(refusal))
        for learner_id in self.membership.forget():
            self.versions.forget(learner_id)
            self.influence.begin(learner_id)
            self._outbox.note(LearnerForgotten(learner_id))

    def _end(self, member: Member, code: str, words: str) -> None:
        """End a generation: tell the learner, and fence it off."""
        self._outbox.tell(member, Evicted(code, words))
        self._outbox.note(LearnerGone(member.learner_id, member.generation, code))
        self.rounds.lose(member, code)

    # ------------------------------------------------------------ versions

    def hear(self, fragment_id: int, directions: Mapping[str, Direction], now: float) -> None:
        """Take the directions of the contributions to the version that is being computed."""
        self._outbox.now = now
        closed = self.fragments[fragment_id].closed
        assert closed is not None
        self.rounds.hear(closed, directions)

    def committed(self, record: Record, published: Published, now: float) -> None:
        """The next version and this record are durable: announce it."""
        self._outbox.now = now
        closed = self.fragments[record.fragment_id].closed
        assert closed is not None
        self.rounds.committed(closed, record.fragment_id, now)
        self.versions.committed(record, published)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Expire leases, and open and close rounds. Call it often, and after every event."""
        self._outbox.now = now
        self._expire(now)
        self.versions.end_without()
        self.rounds.tick(now, may_open=not self.draining)

    def drain(self) -> None:
        """Refuse joins, open no more rounds, and tell learners so."""
        self.draining = True
        self._outbox.tell_live(Drain())

    def send_pulses(self) -> None:
        """Tell every learner that the shard is alive; call it about once per heartbeat."""
        self._outbox.tell_live(self.pulse())

    # ------------------------------------------------------------ questions

    @property
    def manifest(self) -> Manifest | None:
        """None until a learner has brought the model or a version was restored."""
        return self.versions.manifest

    @property
    def fragments(self) -> dict[int, FragmentState]:
        """The fragments that this shard owns; empty until there is a manifest."""
        return self.versions.fragments

    @property
    def done(self) -> bool:
        """The token budget is reached; no more rounds open."""
        return self.versions.done

    @property
    def ledger(self) -> Ledger:
        return self._outbox.ledger

    @property
    def tokens_merged(self) -> int:
        """Merged tokens, averaged over the shard's fragments of the model."""
        return self.versions.tokens_merged

    @property
    def open_rounds(self) -> int:
        return len(self.versions.phases.collecting)

    def pulse(self) -> Pulse:
        return Pulse(self.tokens_merged, self.settings.run.tokens, len(self.membership.live()))

    def published(self, fragment_id: int) -> tuple[int, Payload]:
        """The latest announced version and its values. Raises UnknownFragment or NotSeeded."""
        state = self.versions.owned(fragment_id)
        if state.published is None:
            raise NotSeeded(f"fragment {fragment_id} has no version yet; wait for Committed")
        return state.version, state.published.values

    def named(self, fragment_id: int, want: VersionId, learner_id: str) -> tuple[Record, Published]:
        """A version that a rank requests by name, and its record.

        It is kept until the learner's ranks name another one or its lease ends, unless too many are kept. Raises
        UnknownFragment, NotSeeded or VersionGone.
        """
        state = self.versions.owned(fragment_id)
        if state.published is None:
            raise NotSeeded(f"fragment {fragment_id} has no version yet; wait for Committed")
        held = state.named(want)
        if held is None:
            raise VersionGone(
                f"fragment {fragment_id}: version {want.version} of epoch {want.epoch} is not held here, but "
                f"{state.version} of {state.epoch}; pull that"
            )
        if learner_id and state.pulled.get(learner_id) != want:
            state.pulled[learner_id] = want
            state.drop_unwanted()
        return held

    def change_since(self, fragment_id: int, have: VersionId | None) -> Payload | None:
        """The change from the previous version to the latest; None if the caller has another version. Raises
        UnknownFragment."""
        state = self.versions.owned(fragment_id)
        if state.published is None or have is None or have != state.before:
            return None
        return state.published.change

    # ------------------------------------------------------------ answers for one caller

    def join_answer(
        self, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = (), index: int = 0,
        rules: str = "",
    ) -> JoinAnswer:  # fmt: skip
        """The answer to a learner's Join, or to an observer's call (no id, no generation)."""
        settings, sync = self.settings, self.settings.sync
        return JoinAnswer(
            generation=generation,
            epoch=self.epoch,
            heartbeat_s=settings.lease.heartbeat_s,
            shard_index=settings.shard.index,
            num_shards=settings.shard.count,
            num_fragments=sync.fragments,
            manifest_digest="" if self.manifest is None else self.manifest.digest,
            policy=LearnerPolicy(sync.first_every, sync.push, sync.pull),  # not the current H: equal on all shards
            fragments=tuple(state.status(learner_id) for _, state in sorted(self.fragments.items())),
            pulse=self.pulse(),
            tensors=tensors,
            ties=self.manifest.ties if self.manifest is not None and tensors else (),
            index=index,
            rules=rules,
            frozen=self.versions.frozen.declared if tensors else (),
            began_with_nothing=self.versions.began_with_nothing,
        )

    def pull_header(self, learner_id: str, fragment_id: int, record: Record | None = None) -> PullHeader:
        """The header for this record's version, or for the latest, without a payload: the caller chooses that.

        It describes the version as it was announced, so every rank gets the same header. Raises UnknownFragment.
        """
        record = record or self.versions.owned(fragment_id).record
        status = status_of(record, learner_id)
        return PullHeader(
            fragment_id=fragment_id,
            version=status.version,
            epoch=status.epoch,
            merged_version=status.merged_version,
            forgotten_version=status.forgotten_version,
            tokens_merged=record.tokens_merged,
            payload=None,
        )


class MirroredShard(Shard):
    """Serves another shard's versions, and accepts no contributions."""

    told: JoinAnswer | None = None
    """The mirrored shard's answer to readers; None: not received yet."""

    def mirror(self, told: JoinAnswer, manifest: Manifest) -> None:
        self.told = told
        self.versions.mirror(manifest, told.shard_index)

    def join(self, learner_id: str, request: JoinRequest, now: float) -> Member:
        """Raises BadRequest."""
        raise BadRequest(f"this is a mirror of {self.settings.shard.mirror_of}; join its shards instead")

    def pulse(self) -> Pulse:
        return super().pulse() if self.told is None else self.told.pulse

    def join_answer(
        self, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = (), index: int = 0,
        rules: str = "",
    ) -> JoinAnswer:  # fmt: skip
        own = super().join_answer(learner_id, generation, tensors, index, rules)
        return own if self.told is None else replace(self.told, fragments=own.fragments)
