"""The shard: one state machine that decides everything, and does nothing.

Callers say what happened and when (`join`, `progress`, `admit`, `contribute`, `committed`, ..., `tick`). The shard
changes its state and leaves effects for the shell to carry out. This is the face, and what follows for rounds and
versions when somebody comes or goes; the other decisions are in five parts, which answer questions themselves:

    membership.py   who may speak
    influence.py    how much one contribution may move the model
    taking.py       what becomes of a push
    rounds.py       rounds: when they open and close
    versions.py     seeding, restoring, committing and announcing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_common.codec import Payload
from diloco_common.errors import (
    Draining,
    NotJoined,
    NotSeeded,
    Refusal,
    Revoked,
    StaleGeneration,
    Superseded,
    VersionGone,
)
from diloco_common.settings import BLEND_ALPHA, Settings
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
    PushAnswer,
    PushHeader,
    Stop,
    VersionId,
)
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.directions import Direction
from diloco_server.core.effects import Effect, Outbox
from diloco_server.core.fragment import FragmentState, Restored, status_of
from diloco_server.core.influence import Influence
from diloco_server.core.ledger import LearnerForgotten, LearnerGone, LearnerJoined, Ledger, SameLosses
from diloco_server.core.membership import Likeness, Member, Membership, superseded
from diloco_server.core.model import check_model
from diloco_server.core.record import Record
from diloco_server.core.rounds import Rounds
from diloco_server.core.versions import Versions


class Shard:
    """Decides for the fragments of one shard. Not thread-safe: one owner calls it."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.membership = Membership(settings.lease, settings.shard.max_learners)
        self.draining = False
        """No joins and no new rounds any more."""
        self._likeness = Likeness()
        self._outbox = Outbox(self.membership)
        self.influence = Influence(settings.guard.trust)
        self.versions = Versions(
            settings.run, settings.shard, settings.sync, epoch, self.influence, self.membership, self._outbox
        )
        self.rounds = Rounds(settings, self.influence, self.membership, self.versions, self._outbox)

    def take_effects(self) -> list[Effect]:
        return self._outbox.take()

    # ------------------------------------------------------------ learners

    def join(self, learner_id: str, request: JoinRequest, now: float) -> Member:
        """Grant a lease; the one before it ends.

        Raises Draining, Superseded, ManifestMismatch, FrozenMismatch or Busy.
        """
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
        versions.frozen.adopt(learner_id, request.frozen)
        versions.tell_keys(request.ties)
        membership.replace(member, versions.forget_others(learner_id, process_id))
        self._outbox.note(LearnerJoined(learner_id, member.generation, returned=old is not None))
        for state in versions.look_for_losses(learner_id, request.held, request.tokens_seen):
            self.rounds.ask_missing(state)
        if all(theirs.epoch != self.epoch for theirs in request.held):
            versions.look_for_more(learner_id, request.tokens_seen, now - self.settings.lease.lease_s)
        return member

    def take_number(self, learner_id: str, now: float) -> int:
        """The number of a learner that has not joined yet. Raises Draining or Busy."""
        self._check_not_draining()
        return self.membership.take_number(learner_id, now)

    def _check_not_draining(self) -> None:
        if self.draining:
            raise Draining(f"shard {self.settings.shard.index} is shutting down; try again when it is back")

    def observe(self, tensors: Sequence[TensorSpec]) -> None:
        """Check an observer's model, if it brings one. Raises NotSeeded or ManifestMismatch."""
        if self.manifest is None:
            raise NotSeeded("no learner has joined yet, so there is no model to look at; try again later")
        if tensors:
            check_model(self.manifest, tensors)

    def check(self, learner_id: str, generation: int, epoch: int) -> Member:
        """The member that speaks. Raises NotJoined, StaleGeneration, Superseded, LeaseExpired or Stalled."""
        if epoch != self.epoch:
            raise NotJoined(f"{learner_id} has no lease here since this shard restarted; join again")
        return self.membership.check(learner_id, generation)

    def attend(self, member: Member) -> None:
        """A control stream begins: tell it everything that it could have missed. Repeats are harmless."""
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
        """A learner reports, which renews its lease."""
        self._outbox.now = now
        other = self._likeness.heard(member.learner_id, progress)
        if other is not None:
            self._outbox.note(SameLosses(member.learner_id, other))
        if progress.inner and progress.inner != member.reported.inner:
            self.versions.hear_inner(member.learner_id, progress.inner)
        self.membership.heard(member, progress, now)

    def leave(self, member: Member) -> None:
        """A learner says goodbye. What it contributed to open rounds counts; nobody waits for more of it."""
        self.membership.leave(member)
        self._outbox.note(LearnerGone(member.learner_id, member.generation, "LEFT"))
        self.rounds.leave(member)

    def revoke(self, member: Member) -> None:
        """A learner may call no longer. What it contributed to open rounds is fenced off."""
        self.membership.revoke(member)
        self._end(member, Revoked.code, f"{member.learner_id} was revoked")

    def _expire(self, now: float) -> None:
        """End the leases that ran out, and forget learners that have been gone for too long."""
        for member in self.membership.expire(now):
            refusal = self.membership.eviction(member)
            self._end(member, refusal.code, str(refusal))
        for learner_id in self.membership.forget():
            self.versions.forget(learner_id)
            self.influence.begin(learner_id)
            self._outbox.note(LearnerForgotten(learner_id))

    def _end(self, member: Member, code: str, words: str) -> None:
        """A generation is over: tell it, and fence it off."""
        self._outbox.tell(member, Evicted(code, words))
        self._outbox.note(LearnerGone(member.learner_id, member.generation, code))
        self.rounds.lose(member, code)

    # ------------------------------------------------------------ contributions

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. None: send the bytes; else this is the answer."""
        return self.rounds.taking.admit(member, header)

    def contribute(
        self, member: Member, header: PushHeader, payload: Payload, piece_norms: tuple[float, ...], now: float
    ) -> PushAnswer:
        """Take a push that was admitted, once its bytes are whole and valid. Raises Busy."""
        self._outbox.now = now
        return self.rounds.taking.contribute(member, header, payload, piece_norms, now)

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        """Refuse a push that was admitted, because of its bytes."""
        return self.rounds.taking.reject(member, header, refusal)

    # ------------------------------------------------------------ versions

    def restore(self, manifest: Manifest, fragments: Sequence[Restored]) -> None:
        """Go on from versions that were kept, before anybody joins."""
        self.versions.restore(manifest, fragments)

    def seed_record(self, fragment_id: int) -> Record:
        """Of version 0, which is being made."""
        return self.versions.seed_record(fragment_id)

    def seeded(self, record: Record, values: Values, published: Published) -> None:
        """Version 0 is durable with this record: announce it."""
        self.versions.seeded(record, values, published)

    def fail_seed(self, fragment_id: int) -> None:
        """The seed could not be used: any learner may bring another one."""
        self.fragments[fragment_id].fail_seed()

    def next_record(self, fragment_id: int) -> Record:
        """The record of the version that is being made. Call it once per version.

        Learners may come and go until `committed` gets the same record back.
        """
        return self.versions.next_record(fragment_id)

    def hear(self, fragment_id: int, directions: Mapping[str, Direction], now: float) -> None:
        """Where the contributions to the version of the model that is being made point."""
        self._outbox.now = now
        closed = self.fragments[fragment_id].closed
        assert closed is not None
        self.rounds.hear(closed, directions)

    def committed(self, record: Record, published: Published, now: float) -> None:
        """The next version is durable with this record: announce it."""
        self._outbox.now = now
        closed = self.fragments[record.fragment_id].closed
        assert closed is not None
        self.rounds.committed(closed, record.fragment_id, now)
        self.versions.committed(record, published)

    def pulled(self, member: Member, fragment_id: int, version: int, now: float) -> None:
        """A learner that had an earlier one has taken all bytes of a version."""
        self.rounds.pulled(member, fragment_id, version, now)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Let time pass: leases end, rounds open and close. Call often, and after every event."""
        self._outbox.now = now
        self._expire(now)
        self.versions.end_without()
        self.rounds.tick(now, may_open=not self.draining)

    def drain(self) -> None:
        """Take no new work: no joins, no new rounds. Learners are told."""
        self.draining = True
        self._outbox.tell_live(Drain())

    def send_pulses(self) -> None:
        """Tell every learner that the shard is there; about once per heartbeat."""
        self._outbox.tell_live(self.pulse())

    # ------------------------------------------------------------ questions

    @property
    def manifest(self) -> Manifest | None:
        """None until the first learner has brought the model, or a version was restored."""
        return self.versions.manifest

    @property
    def fragments(self) -> dict[int, FragmentState]:
        """Those that this shard owns; none before there is a manifest."""
        return self.versions.fragments

    @property
    def done(self) -> bool:
        """The token budget is reached; no round opens any more."""
        return self.versions.done

    @property
    def ledger(self) -> Ledger:
        return self._outbox.ledger

    @property
    def tokens_merged(self) -> int:
        """Progress of this shard: merged tokens, averaged over its fragments."""
        return self.versions.tokens_merged

    @property
    def open_rounds(self) -> int:
        """Fragments that are collecting contributions."""
        return len(self.versions.phases.collecting)

    def pulse(self) -> Pulse:
        return Pulse(self.tokens_merged, self.settings.run.tokens, len(self.membership.live()))

    def owned(self, fragment_id: int) -> FragmentState:
        """Raises UnknownFragment."""
        return self.versions.owned(fragment_id)

    def published(self, fragment_id: int) -> tuple[int, Payload]:
        """The latest announced version and its values. Raises UnknownFragment or NotSeeded."""
        state = self.owned(fragment_id)
        if state.published is None:
            raise NotSeeded(f"fragment {fragment_id} has no version yet; wait for Committed")
        return state.version, state.published.values

    def named(self, fragment_id: int, want: VersionId, learner_id: str) -> tuple[Record, Published]:
        """A version that a rank names, with its record.

        It is held until they name another one or the lease ends, unless there are too many of the kind. Raises
        UnknownFragment, NotSeeded or VersionGone.
        """
        state = self.owned(fragment_id)
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
        """The change from what a caller has to the latest announced version; None unless that is the one before.

        Raises UnknownFragment.
        """
        state = self.owned(fragment_id)
        if state.published is None or have is None or have != state.before:
            return None
        return state.published.change

    # ------------------------------------------------------------ what it says of itself to one caller, at one moment

    def join_answer(
        self, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = (), index: int = 0,
        rules: str = "",
    ) -> JoinAnswer:  # fmt: skip
        """What a learner, or an observer (neither id nor generation), needs to know of the run."""
        settings, sync = self.settings, self.settings.sync
        return JoinAnswer(
            generation=generation,
            epoch=self.epoch,
            heartbeat_s=settings.lease.heartbeat_s,
            shard_index=settings.shard.index,
            num_shards=settings.shard.count,
            num_fragments=sync.fragments,
            manifest_digest="" if self.manifest is None else self.manifest.digest,
            policy=LearnerPolicy(  # with H of the settings: learners refuse shards that differ in it
                sync.first_every, sync.push, sync.pull, sync.on_commit, BLEND_ALPHA, sync.error_feedback
            ),
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
        """The version of a record, or the latest; without a payload, which is the caller's to choose.

        All of it is as it was when the version was announced, so every rank hears the same. Raises
        UnknownFragment.
        """
        record = record or self.owned(fragment_id).record
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
