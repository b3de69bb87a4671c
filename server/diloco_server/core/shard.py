"""The shard: one state machine that decides everything, and does nothing.

Callers say what happened and when (`join`, `progress`, `admit`, `contribute`, `committed`, ..., `tick`); the shard
changes its state and leaves `effects` for the shell to carry out. The same code runs in the server, in the simulator
and in the numerics tests.

    unseeded --seed--> version 0 --due--> round open --verdict--> computing --committed--> version 1 --due--> ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from diloco_common.codec import Payload
from diloco_common.errors import (
    Draining,
    ManifestMismatch,
    NotJoined,
    NotSeeded,
    Refusal,
    StaleGeneration,
    Superseded,
    UnknownFragment,
)
from diloco_common.manifest import Manifest, TensorSpec, cut
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FragmentStatus,
    Held,
    LearnerPolicy,
    Outcome,
    Progress,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_common.settings import Settings
from diloco_server.core import admission, guards
from diloco_server.core.admission import ACCEPTED, DUPLICATE, LATE
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.budget import Budget
from diloco_server.core.cadence import first_interval, is_due
from diloco_server.core.effects import (
    BudgetReached,
    Effect,
    LearnerForgotten,
    LearnerGone,
    LearnerJoined,
    MergeRound,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    SeedFragment,
    Tell,
    VersionCommitted,
    VersionsLost,
)
from diloco_server.core.fragment import FragmentState, Restored
from diloco_server.core.grace import GraceWindow
from diloco_server.core.ledger import Ledger
from diloco_server.core.membership import Member, Membership, superseded
from diloco_server.core.record import Record, next_record
from diloco_server.core.rounds import Contribution, total_norm


class Shard:
    """Decides for the fragments of one shard. Not thread-safe: one owner calls it."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.manifest: Manifest | None = None
        self.fragments: dict[int, FragmentState] = {}
        """Those that this shard owns, once the first learner has brought the model."""
        self.membership = Membership(settings.lease, settings.shard.max_learners)
        self.grace = GraceWindow(settings.sync)
        self.ledger = Ledger()
        self.draining = False
        self.done = False
        """The token budget is reached; no round opens any more."""
        self._budget = Budget(settings.run.tokens)
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """What the shell has to do, in order; the list starts anew."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ learners

    def join(
        self, learner_id: str, process_id: str, tensors: Sequence[TensorSpec], now: float, held: Sequence[Held] = ()
    ) -> Member:
        """Grant a lease. Raises Draining, ManifestMismatch, Superseded or Busy."""
        if self.draining:
            raise Draining(f"shard {self.settings.shard.index} is shutting down; try again when it is back")
        self._adopt_or_check(tensors)
        self.membership.welcome(learner_id, process_id)
        old = self.membership.get(learner_id)
        if old is not None and old.live:
            if old.process_id == process_id:
                self._lose(old, StaleGeneration.code, f"{learner_id} has joined again")
            else:
                self._lose(old, Superseded.code, str(superseded(learner_id)))
        member = self.membership.join(learner_id, process_id, now)
        others = {s.merged_by[learner_id] for s in self.fragments.values() if learner_id in s.merged_by} - {process_id}
        for state in self.fragments.values():
            if state.merged_by.get(learner_id) in others:  # this process cannot have pending what another contributed
                state.forget(learner_id)
        # Perhaps only an earlier life of the shard knew them: they may not come back for what is forgotten now.
        member.replaced = (*member.replaced, *sorted(others - {*member.replaced}))
        self._effects.append(LearnerJoined(learner_id, member.generation, returned=old is not None))
        self._look_for_losses(learner_id, held)
        return member

    def observe(self, tensors: Sequence[TensorSpec]) -> None:
        """Check an observer's model, if it brings one. Raises NotSeeded or ManifestMismatch."""
        if self.manifest is None:
            raise NotSeeded("no learner has joined yet, so there is no model to look at; try again later")
        if tensors:
            guards.check_model(self.manifest, tensors)

    def check(self, learner_id: str, generation: int, epoch: int) -> Member:
        """The member that speaks. Raises NotJoined, StaleGeneration, Superseded, LeaseExpired or Stalled."""
        if epoch != self.epoch:
            raise NotJoined(f"{learner_id} has no lease here since this shard restarted; join again")
        return self.membership.check(learner_id, generation)

    def attend(self, member: Member) -> None:
        """A control stream begins: tell it everything that it could have missed. Repeats are harmless."""
        self._tell(member, self.pulse())
        for state in self.fragments.values():
            if state.seeded:
                self._tell(member, self._committed(state))
            if state.round and member.learner_id in state.round.missing:
                self._ask(member, state)
        if self.done:
            self._tell(member, Stop())
        if self.draining:
            self._tell(member, Drain())

    def progress(self, member: Member, progress: Progress, now: float) -> None:
        """A learner reports, which renews its lease."""
        self.membership.heard(member, progress, now)

    def leave(self, member: Member) -> None:
        """A learner says goodbye. What it contributed to open rounds counts; nobody waits for the rest."""
        self.membership.leave(member)
        self._effects.append(LearnerGone(member.learner_id, member.generation, "LEFT"))
        for state in self.fragments.values():
            state.base_steps.pop(member.learner_id, None)
            if state.round and member.learner_id in state.round.missing:
                state.round.lose(member.learner_id)
                member.missed["LEFT"] += 1

    # ------------------------------------------------------------ contributions

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. None: send the bytes; else this is the answer."""
        try:
            return self._admit(member, header)
        except Refusal as refusal:
            return self.reject(member, header, refusal)

    def contribute(
        self, member: Member, header: PushHeader, payload: Payload, piece_norms: tuple[float, ...], now: float
    ) -> PushAnswer:
        """Take a push whose bytes are whole and valid. State may have moved on since `admit`, so it asks again."""
        try:
            answer = self._admit(member, header)
            if answer is not None:
                return answer
            state = self.fragments[header.fragment_id]
            if header.is_seed:
                guards.check_norm(piece_norms, state, float("inf"))
                return self._accept_seed(state, header, payload, piece_norms)
            guards.check_norm(piece_norms, state, self.settings.guard.norm_factor)
        except Refusal as refusal:
            return self.reject(member, header, refusal)
        return self._accept(member, state, header, payload, piece_norms, now)

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        """Count a refused push. Its round goes on without it, or one learner that diverged would hold up all.

        A learner gives back what was refused: another copy of it must not have been taken.
        """
        answer = PushAnswer(Outcome.REJECTED, refusal.code, str(refusal))
        state = self.fragments.get(header.fragment_id)
        if state is not None and guards.is_in_line(header, state, self.epoch):
            collecting = state.round
            if admission.is_taken(header, state, member.learner_id):
                answer = DUPLICATE
            elif (
                collecting is not None
                and collecting.round == header.round
                and collecting.refuse(member.learner_id, member.generation, header, answer)
            ):
                member.missed[refusal.code] += 1
        self.ledger.answered(header, answer)
        return answer

    def _admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        if self.manifest is None:
            raise NotSeeded("no learner has joined since this shard started; join again")
        guards.check_origin(header, self.manifest)
        state = self.owned(header.fragment_id)
        answer = admission.by_header(header, state, member.learner_id, self.epoch, self.settings.sync)
        if answer is not None and answer.outcome is not Outcome.REJECTED:  # that is told once more, and was counted
            self.ledger.answered(header, answer)
        return answer

    def _accept_seed(
        self, state: FragmentState, header: PushHeader, payload: Payload, piece_norms: tuple[float, ...]
    ) -> PushAnswer:
        state.begin_seed(total_norm(piece_norms), header.tokens_merged)
        self._effects.append(SeedFragment(header.fragment_id, payload))
        return ACCEPTED

    def _accept(
        self,
        member: Member,
        state: FragmentState,
        header: PushHeader,
        payload: Payload,
        piece_norms: tuple[float, ...],
        now: float,
    ) -> PushAnswer:
        assert state.round is not None
        had_quorum = state.round.quorum_at is not None
        contribution = Contribution(
            member.learner_id, member.generation, header.fragment_id, header.round, header.base_version,
            header.tokens, header.steps, payload, piece_norms,
        )  # fmt: skip
        state.round.accept(contribution, self.settings.sync.quorum, now)
        member.contributed += 1
        self.ledger.answered(header, ACCEPTED)
        if not had_quorum and state.round.quorum_at is not None:
            after_s = now - state.round.opened_at
            self.grace.to_quorum.add(after_s)
            self._effects.append(QuorumReached(header.fragment_id, header.round, after_s))
        return ACCEPTED

    # ------------------------------------------------------------ versions

    def restore(self, manifest: Manifest, fragments: Sequence[Restored]) -> None:
        """Go on from versions that were kept, before anybody joins."""
        assert self.manifest is None, "a shard that has a model cannot be restored"
        self._adopt(manifest)
        for restored in fragments:
            self.fragments[restored.record.fragment_id].restore(restored, self.epoch)
        self._check_budget()

    def seed_record(self, fragment_id: int) -> Record:
        """What is to be kept with version 0."""
        return replace(self.fragments[fragment_id].record(), epoch=self.epoch)

    def next_record(self, fragment_id: int) -> Record:
        """What is to be kept with the version that is being computed."""
        state = self.fragments[fragment_id]
        closed = state.closed
        assert closed is not None
        return next_record(
            state.record(), closed, self.epoch, self.membership,
            norm_window=self.settings.guard.norm_window, strangers_max=2 * self.settings.shard.max_learners,
        )  # fmt: skip

    def seeded(self, record: Record, values: Values, published: Published) -> None:
        """Version 0 is computed and durable, with the record that `seed_record` gave: announce it."""
        state = self.fragments[record.fragment_id]
        state.seed(values, published, self.epoch)
        self._announce(state)
        self._check_budget()

    def seed_failed(self, fragment_id: int) -> None:
        """The seed could not be used; another learner may seed."""
        self.fragments[fragment_id].computing = False

    def committed(self, record: Record, published: Published, now: float) -> None:
        """The next version is computed and durable, with the record that `next_record` gave: announce it."""
        state = self.fragments[record.fragment_id]
        closed = state.closed
        assert closed is not None
        state.advance(record, published)
        tokens = 0
        for contribution in closed.contributions.values():
            tokens += contribution.tokens
            member = self.membership.get(contribution.learner_id)
            if member is not None:
                member.merged += 1
                member.tokens_merged += contribution.tokens
        self.ledger.rounds += 1
        self.ledger.participants += len(closed.contributions)
        self.ledger.tokens_merged += tokens
        self.grace.to_publish.add(now - closed.closed_at)
        self._effects.append(
            VersionCommitted(
                record.fragment_id, state.version, len(closed.contributions), tokens, now - closed.opened_at
            )
        )
        self._announce(state)
        self._check_budget()

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Let time pass: leases end, rounds open and close. Call often, and after every event."""
        for member in self.membership.expire(now):
            self.ledger.evictions[member.evicted_for] += 1
            refusal = self.membership.eviction(member)
            self._lose(member, refusal.code, str(refusal))
        for learner_id in self.membership.forget():
            for state in self.fragments.values():
                state.forget(learner_id)
            self._effects.append(LearnerForgotten(learner_id))
        live = [m for m in self.membership.live() if m.first_step is not None]
        grace_s: float | None = None  # once, and only where a round has its quorum
        for state in self.fragments.values():
            if state.round is not None:
                if grace_s is None and state.round.quorum_at is not None:
                    grace_s = self.grace_s()
                self._close_if_ready(state, grace_s or 0.0, now)
            if state.round is None and self._is_due(state, live):
                self._open_round(state, live, now)

    def drain(self) -> None:
        """Take no new work: no joins, no new rounds. Learners are told."""
        self.draining = True
        for member in self.membership.live():
            self._tell(member, Drain())

    def pulse(self) -> Pulse:
        return Pulse(self.tokens_merged, self.settings.run.tokens)

    def send_pulses(self) -> None:
        """Tell every learner that the shard lives; about once per heartbeat."""
        pulse = self.pulse()
        for member in self.membership.live():
            self._tell(member, pulse)

    def grace_s(self) -> float:
        """The grace window now, in seconds."""
        times = [m.progress.step_time_s for m in self.membership.live() if m.progress.step_time_s > 0]
        return self.grace.seconds(median_low(times) if times else 0.0)

    # ------------------------------------------------------------ questions

    @property
    def tokens_merged(self) -> int:
        """Progress of this shard: merged tokens, averaged over its fragments."""
        states = self.fragments.values()
        return sum(s.tokens_merged for s in states) // len(states) if states else 0

    @property
    def open_rounds(self) -> int:
        """Fragments that are collecting contributions."""
        return sum(s.round is not None for s in self.fragments.values())

    @property
    def all_seeded(self) -> bool:
        return bool(self.fragments) and all(s.seeded for s in self.fragments.values())

    def owned(self, fragment_id: int) -> FragmentState:
        """Raises UnknownFragment."""
        state = self.fragments.get(fragment_id)
        if state is None:
            mine = ", ".join(map(str, sorted(self.fragments))) or "none yet"
            raise UnknownFragment(f"shard {self.settings.shard.index} owns fragments {mine}, not {fragment_id}")
        return state

    def published(self, fragment_id: int) -> tuple[int, Payload]:
        """The latest announced version and its values. Raises UnknownFragment or NotSeeded."""
        state = self.owned(fragment_id)
        if not state.seeded or state.published is None:
            raise NotSeeded(f"fragment {fragment_id} has no version yet; wait for Committed")
        return state.version, state.published.values

    def change_since(self, fragment_id: int, epoch: int, version: int | None) -> Payload | None:
        """What leads to the latest announced version from the one that a caller has, if that is the one before."""
        state = self.owned(fragment_id)
        if state.published is None or (epoch, version) != state.before:
            return None
        return state.published.change

    def fragment_statuses(self, learner_id: str) -> list[FragmentStatus]:
        return [state.status(learner_id) for _, state in sorted(self.fragments.items())]

    def policy(self) -> LearnerPolicy:
        sync = self.settings.sync
        return LearnerPolicy(
            sync.sync_every, sync.push, sync.pull, sync.on_commit, sync.blend_alpha, sync.error_feedback
        )

    # ------------------------------------------------------------ transitions

    def _adopt_or_check(self, tensors: Sequence[TensorSpec]) -> None:
        """The first learner brings the model. It may be replaced while nothing is seeded and nobody holds a lease."""
        in_use = any(s.seeded or s.computing for s in self.fragments.values()) or self.membership.live()
        if self.manifest is not None and in_use:
            guards.check_model(self.manifest, tensors)
            return
        try:
            self._adopt(cut(tensors, self.settings.sync.fragments, self.settings.shard.count))
        except ValueError as error:
            raise ManifestMismatch(f"the model cannot be cut: {error}") from error

    def _adopt(self, manifest: Manifest) -> None:
        self.manifest = manifest
        owned, window = manifest.owned_by(self.settings.shard.index), self.settings.guard.norm_window
        self.fragments = {f.fragment_id: FragmentState(f, deque(maxlen=window)) for f in owned}

    def _look_for_losses(self, learner_id: str, held: Sequence[Held]) -> None:
        """A learner may hold a version that this shard came back without.

        Where the lost one has the epoch of what came back, its number will be given to another version. Then the
        latest one gets a name of its own, so that this learner pulls it.
        """
        for theirs in held:
            state = self.fragments.get(theirs.fragment_id)
            if state is None or theirs.epoch == self.epoch or not state.lacks(theirs):
                continue
            epoch, version = state.recovered or (None, 0)
            if theirs.version > state.seen_lost:
                state.seen_lost = theirs.version
                self._effects.append(
                    VersionsLost(theirs.fragment_id, theirs.epoch, version, theirs.version, learner_id)
                )
            if theirs.epoch == epoch == state.epoch:
                state.epoch, state.before = self.epoch, None
                self._announce(state)
                self._ask_again(state)

    def _lose(self, member: Member, code: str, words: str) -> None:
        """A generation ends: tell it, and fence off what it has in open rounds."""
        self._tell(member, Evicted(code, words))
        self._effects.append(LearnerGone(member.learner_id, member.generation, code))
        for state in self.fragments.values():
            state.base_steps.pop(member.learner_id, None)
            if state.round is None or member.learner_id not in state.round.missing + list(state.round.contributions):
                continue
            fenced = state.round.lose(member.learner_id)
            member.missed["FENCED" if fenced else code] += 1
            if fenced:
                self.ledger.tokens_fenced += fenced.tokens

    def _ask_again(self, state: FragmentState) -> None:
        """Who was asked under the version's old name may have pulled the new one before it could answer."""
        for learner_id in state.round.missing if state.round else ():
            member = self.membership.get(learner_id)
            if member is not None:
                self._ask(member, state)

    def _is_due(self, state: FragmentState, live: Sequence[Member]) -> bool:
        if not state.seeded or state.computing or self.draining or self._budget.is_reached(state):
            return False
        sync, total = self.settings.sync, len(self.manifest.fragments) if self.manifest else 1
        never = state.rounds_opened == 0 and state.version == 0
        interval = first_interval(state.fragment.fragment_id, total, sync.sync_every) if never else sync.sync_every
        return self._budget.rest_is_trained(state, live) or is_due(live, state.base_steps, interval, sync.quorum)

    def _open_round(self, state: FragmentState, live: Sequence[Member], now: float) -> None:
        opened = state.open_round(live, now)
        self._effects.append(RoundOpened(state.fragment.fragment_id, opened.round, len(live)))
        for member in live:
            member.asked += 1
            self._ask(member, state)

    def _close_if_ready(self, state: FragmentState, grace_s: float, now: float) -> None:
        assert state.round is not None
        collected = state.round
        if collected.is_void:
            state.round = None
            return
        closes, why = collected.verdict(self.settings.sync.quorum, grace_s, now)
        if not closes:
            return
        fragment_id = state.fragment.fragment_id
        for learner_id in collected.missing:
            member = self.membership.get(learner_id)
            if member is not None:
                member.missed[LATE.outcome.name] += 1
        state.close_round(now)
        contributions = tuple(collected.contributions[i] for i in sorted(collected.contributions))
        open_s = now - collected.opened_at
        self._effects.append(
            RoundClosed(fragment_id, collected.round, why, len(contributions), len(collected.asked), open_s)
        )
        self._effects.append(MergeRound(fragment_id, collected.round, contributions))

    def _ask(self, member: Member, state: FragmentState) -> None:
        self._tell(member, Collect(state.fragment.fragment_id, state.version + 1, state.epoch))

    def _announce(self, state: FragmentState) -> None:
        for member in self.membership.live():
            self._tell(member, self._committed(state))

    def _committed(self, state: FragmentState) -> Committed:
        return Committed(state.fragment.fragment_id, state.version, state.epoch)

    def _check_budget(self) -> None:
        if self.done or not self.all_seeded or not all(map(self._budget.is_reached, self.fragments.values())):
            return
        self.done = True
        self._effects.append(BudgetReached(self.tokens_merged))
        for member in self.membership.live():
            self._tell(member, Stop())

    def _tell(self, member: Member, directive: Directive) -> None:
        self._effects.append(Tell(member.learner_id, member.generation, directive))
