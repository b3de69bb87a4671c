"""One shard process: the core `Shard` and its shell, as server/diloco_server/{host,service}.py wire it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from diloco_common.codec.change import VALUES
from diloco_common.errors import BadRequest, Refusal
from diloco_common.messages import Committed, Directive, Evicted, Progress, PushHeader
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.effects import Effect, MergeRound, SeedFragment, Tell, VersionsLost
from diloco_server.core.fragment import Restored
from diloco_server.core.membership import Member
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard
from diloco_server.storage.store import FileStore, Found, Recovered
from diloco_server.storage.version import StoredVersion
from diloco_simulator import invariants
from diloco_simulator.arithmetic import arithmetic_of
from diloco_simulator.keeper import ShardDisk, SimulatedKeeper
from diloco_simulator.messages import JoinAnswer, JoinRequest, PullAnswer, PullRequest, PushRequest
from diloco_simulator.network import Respond, Stream
from diloco_simulator.options import Options
from diloco_simulator.timeline import Process
from diloco_simulator.truth import Origin, Truth, Version

INSPECT_S = 0.005
"""Mean of what it takes to receive and inspect a contribution."""

Note = Callable[..., None]


class SimulatedShard:
    """A process that serves one shard: from a disk, or from memory, and then with it everything is lost."""

    def __init__(
        self, index: int, epoch: int, process: Process, options: Options, truth: Truth, note: Note,
        disk: ShardDisk | None = None, life: tuple[FileStore, Recovered] | None = None,
    ) -> None:  # fmt: skip
        """`life`: what `disk` began for it."""
        self.index = index
        self.process = process
        self.settings = options.settings[index]
        self.core = Shard(self.settings, epoch)
        if options.forgets:
            self.core.membership.max_gone = 0
        self._options = options
        self._truth = truth
        self._note = note
        self._arithmetic = arithmetic_of(options.arithmetic)
        self._streams: dict[str, Stream] = {}
        self._random = random.Random(f"shard {options.seed} {epoch if life is None else (index, epoch)}")
        self._compute_free_at = 0.0
        self._thawed_at = 0.0
        self._grace_s_max = 0.0
        self._has: dict[int, Version] = {}  # fragment -> the version that the core has
        self._disk = disk
        self._keeper: SimulatedKeeper | None = None
        if disk is not None and life is not None:
            self._keeper = SimulatedKeeper(process, life[0], disk, options, self._saved)
            self._recover(life[1])
        self._compare_with_life_before()
        process.later(0.0, self._tick)
        process.later(0.0, self._pulse)

    # ------------------------------------------------------------ lives

    def _recover(self, recovered: Recovered) -> None:
        """Go on from what the disk holds."""
        assert self._keeper is not None
        if recovered.manifest is None:
            return
        self._truth.counts["recoveries"] += 1
        self.core.restore(recovered.manifest, [self._restored(found) for found in recovered.versions])
        for found in recovered.versions:
            self._keeper.recovered(found.stored.record.fragment_id)

    def _restored(self, found: Found) -> Restored:
        """As server/diloco_server/recovery.py."""
        stored = found.stored
        record, anchor = stored.record, stored.anchor
        if anchor is None:
            published = self._arithmetic.publish(stored.values, self._options.pull, None)
        else:
            published = Published(anchor)
        known = self._truth.versions.get((record.fragment_id, (record.epoch, record.version)))
        invariants.recovered_versions_are_what_they_were(self._truth, known, record, stored.values, published)
        assert known is not None
        known.payload = published.values
        self._has[record.fragment_id] = known
        self._note("recovered", self.index, record.fragment_id, record.epoch, record.version, found.is_behind)
        return Restored(record, stored.values, published, found.is_behind)

    def _compare_with_life_before(self) -> None:
        """Are the versions still there that were announced?"""
        truth = self._truth
        for fragment_id in truth.fragments_of[self.index]:
            announced, back = truth.announced.get(fragment_id), self._has.get(fragment_id)
            if announced is not None and (back is None or not back.descends_from(announced)):
                how = self._disk.hurt.get(fragment_id, "") if self._disk is not None else "memory"
                lasts = not self._options.interval_s
                renamed = back is None or self.core.fragments[fragment_id].epoch == self.core.epoch
                invariants.announced_versions_survive(announced, back, how, lasts=lasts, renamed=renamed)
                truth.counts["versions lost"] += announced.name[1] - (back.name[1] if back is not None else -1)
                del truth.announced[fragment_id]
            truth.heads.pop(fragment_id, None)
            if back is not None:
                truth.heads[fragment_id] = back
        if self._disk is not None:
            self._disk.hurt.clear()
        self._learn_names()

    def _learn_names(self) -> None:
        """A version that may be taken for one that was lost goes under a name of its own."""
        for fragment_id, has in self._has.items():
            name = self.core.fragments[fragment_id].identity
            if name != has.name:
                invariants.names_are_of_this_life(has, name, self.core.epoch)
                self._note("renamed", self.index, fragment_id, has.name, name)
                self._has[fragment_id] = self._truth.rename(has, name)
                self._truth.counts["versions renamed"] += 1

    def crash(self, *, power: bool) -> None:
        """The process ends where it is, and perhaps its machine."""
        if self._keeper is not None:
            self._keeper.crash(power=power)
        self.process.kill()

    def _saved(self, record: Record, error: int) -> None:
        self._note("saved" if not error else "not saved", self.index, record.fragment_id, record.version, error)
        self._truth.counts["saves refused" if error else "saves"] += 1

    # ------------------------------------------------------------ time

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self._thawed_at = self.process.timeline.now
        self.process.thaw()

    def _tick(self) -> None:
        self.advance()
        self.process.later(self._options.tick_s, self._tick)

    def _pulse(self) -> None:
        self.core.send_pulses()
        self.advance()
        self.process.later(self.settings.lease.heartbeat_s, self._pulse)

    def advance(self) -> None:
        """Let the core decide, and carry out what it asks for. After every event."""
        now = self.process.timeline.now
        self.core.tick(now)
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)
        self._check(now)

    def _check(self, now: float) -> None:
        for state in self.core.fragments.values():
            collecting = state.round
            if collecting is None:
                continue
            invariants.rounds_make_the_next_version(state, collecting)
            invariants.rounds_are_bounded(state, collecting, self._options.learners)
            if collecting.quorum_at is not None:
                self._grace_s_max = max(self._grace_s_max, self.core.grace_s())
                waited_s = now - collecting.quorum_at
                invariants.nobody_delays_a_round_beyond_its_grace(
                    state, collecting, self._options.quorum, waited_s, self._grace_s_max + self._options.tick_s
                )

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Tell(learner_id, generation, directive):
                if isinstance(directive, Committed):
                    name = (directive.epoch, directive.version)
                    invariants.announced_versions_are_there(self._truth, directive.fragment_id, name)
                stream = self._streams.get(learner_id)
                if stream is not None and stream.generation == generation:
                    self._send(stream, directive)
            case SeedFragment():
                self._note("seed", self.index, effect.fragment_id)
                self._compute(self._options.compute_s, self._seed, effect)
            case MergeRound():
                self._round_closed(effect)
                self._compute(self._options.compute_s, self._merge, effect)
            case VersionsLost():
                self._truth.counts["losses noticed by learners"] += 1
                self._note("shard", self.index, effect)
            case _:
                self._note("shard", self.index, effect)

    def _compute(self, mean_s: float, job: Callable[..., None], *args: Any) -> None:
        """On the one compute thread, in the order of the calls."""
        now = self.process.timeline.now
        takes_s = mean_s * 2 * self._random.random()
        self._compute_free_at = max(now, self._compute_free_at) + takes_s
        self.process.later(self._compute_free_at - now, job, *args)

    def _seed(self, effect: SeedFragment) -> None:
        """Make version 0 of a fragment."""
        fragment_id, truth = effect.fragment_id, self._truth
        values = self._arithmetic.seed(effect.payload)
        published = self._arithmetic.publish(values, self._options.pull, None)
        truth.fragments_of[self.index].add(fragment_id)
        invariants.names_are_given_once(truth, fragment_id, (self.core.epoch, 0))
        truth.publish(fragment_id, (self.core.epoch, 0), published.values, values.theta, None, [])
        self._keep(self.core.seed_record(fragment_id), values, published, self._seeded, fragment_id, values, published)

    def _seeded(self, fragment_id: int, values: Values, published: Published) -> None:
        self.core.seeded(fragment_id, values, published)
        self._has[fragment_id] = self._truth.versions[fragment_id, (self.core.epoch, 0)]
        self.advance()

    def _keep(
        self, record: Record, values: Values, published: Published, then: Callable[..., None], *args: Any
    ) -> None:
        """Make a version durable, then go on."""
        if self._keeper is None:
            then(*args)
            return
        assert self.core.manifest is not None
        anchor = None if self._options.pull in VALUES else published.values
        self._keeper.keep(StoredVersion(record, values, anchor), self.core.manifest, then, *args)

    def _round_closed(self, effect: MergeRound) -> None:
        origins = [self._truth.origin(c.payload) for c in effect.contributions]
        members = {c.learner_id: self.core.membership.get(c.learner_id) for c in effect.contributions}
        invariants.only_current_generations_are_merged(effect.contributions, origins, members, self.core.epoch)
        invariants.contributions_are_merged_whole(effect.contributions, origins)

    def _merge(self, effect: MergeRound) -> None:
        """Make the next version of a fragment from a closed round."""
        state = self.core.fragments[effect.fragment_id]
        assert state.values is not None
        self._arithmetic.step(state.values, state.fragment, effect.contributions, effect.version, self._options.merge)
        published = self._arithmetic.publish(state.values, self._options.pull, state.published)
        truth, before = self._truth, self._has[effect.fragment_id]
        origins = [truth.origin(c.payload) for c in effect.contributions]
        invariants.nothing_carried_is_merged(origins)
        invariants.merged_at_most_once(truth, before, origins, gapless=self.settings.sync.on_commit == "carry")
        name = (self.core.epoch, effect.version)
        invariants.names_are_given_once(truth, effect.fragment_id, name)
        truth.publish(effect.fragment_id, name, published.values, state.values.theta, before, origins)
        record = self.core.next_record(effect.fragment_id)
        self._keep(record, state.values, published, self._committed, effect, published, origins)

    def _committed(self, effect: MergeRound, published: Published, origins: list[Origin]) -> None:
        truth, state = self._truth, self.core.fragments[effect.fragment_id]
        truth.counts["versions"] += 1
        truth.counts["contributions merged"] += len(origins)
        before = state.version
        self.core.committed(effect.fragment_id, published, self.process.timeline.now)
        invariants.versions_grow_by_one(before, effect.version, state.version)
        self._has[effect.fragment_id] = truth.versions[effect.fragment_id, state.identity]
        self.advance()

    # ------------------------------------------------------------ control

    def open(self, stream: Stream) -> None:
        """Attend."""
        try:
            member = self.core.check(stream.path[0], stream.generation, stream.epoch)
        except Refusal as refusal:
            self._note("attend refused", self.index, stream.path[0], refusal.code)
            stream.send(refusal)
            return
        old = self._streams.get(member.learner_id)
        if old is not None:
            old.send(None)
        self._streams[member.learner_id] = stream
        self.core.attend(member)
        self.advance()

    def heard(self, stream: Stream, progress: Progress) -> None:
        """A report came on a stream."""
        try:
            member = self.core.check(stream.path[0], stream.generation, stream.epoch)
        except Refusal as refusal:
            self._send(stream, Evicted(refusal.code, str(refusal)))
            return
        is_news = member.first_step is None or member.progress.inner_step != progress.inner_step
        self.core.progress(member, progress, self.process.timeline.now)
        if is_news:  # after a mere heartbeat only time can change anything
            self.advance()

    def closed(self, stream: Stream) -> None:
        """The learner's side of a stream ended."""
        if self._streams.get(stream.path[0]) is stream:
            del self._streams[stream.path[0]]

    def _send(self, stream: Stream, directive: Directive) -> None:
        stream.send(directive)
        if isinstance(directive, Evicted):
            stream.send(None)
            self.closed(stream)

    # ------------------------------------------------------------ calls

    def call(self, method: str, request: Any, respond: Respond) -> None:
        try:
            match method:
                case "Join":
                    respond(self._join(request))
                case "Pull":
                    respond(self._pull(request))
                case "Push":
                    self._push(request, respond)
                case "Leave":
                    self._leave(request)
                    respond(None)
                case _:
                    raise BadRequest(method)
        except Refusal as refusal:
            self._note("refused", self.index, method, refusal.code)
            respond(refusal)

    def _join(self, request: JoinRequest) -> JoinAnswer:
        now = self.process.timeline.now
        member = self.core.join(request.learner_id, request.process_id, request.tensors, now, request.held)
        self._learn_names()
        self.advance()
        shard, settings = self.core, self.settings
        assert shard.manifest is not None
        statuses = tuple(shard.fragment_statuses(member.learner_id))
        return JoinAnswer(
            member.generation, shard.epoch, settings.lease.heartbeat_s, self.index, settings.shard.count,
            settings.sync.fragments, shard.manifest.digest, shard.policy(), statuses, shard.pulse(),
        )  # fmt: skip

    def _pull(self, request: PullRequest) -> PullAnswer | None:
        shard = self.core
        shard.check(request.learner_id, request.generation, request.epoch)
        _, payload = shard.published(request.fragment_id)
        state = shard.owned(request.fragment_id)
        status = state.status(request.learner_id)
        invariants.served_versions_are_published(
            self._truth, request.fragment_id, state.identity, payload, status.merged_version
        )
        if request.have == state.identity:
            return None
        change = shard.change_since(request.fragment_id, *request.have) if request.have is not None else None
        base_version = None if change is None or request.have is None else request.have[1]
        self._truth.counts["pulled as values" if change is None else "pulled as changes"] += 1
        return PullAnswer(
            status.version, status.epoch, change or payload, status.merged_version, status.forgotten_version,
            state.tokens_merged, base_version,
        )  # fmt: skip

    def _push(self, request: PushRequest, respond: Respond) -> None:
        """The header is looked at, then the bytes come and are inspected, then the core decides again."""
        member = self._member(request)
        answer = self.core.admit(member, request.header)
        if answer is not None:
            self._answer(request.header, answer.outcome.value, answer.code)
            respond(answer)
            self.advance()
        else:
            self._compute(INSPECT_S, self._take_bytes, request, respond)

    def _take_bytes(self, request: PushRequest, respond: Respond) -> None:
        try:
            pieces = self.core.owned(request.header.fragment_id).fragment.pieces
            norms = self._arithmetic.norms(request.payload, pieces)
            member = self._member(request)  # the lease may have ended while the bytes came
            answer = self.core.contribute(member, request.header, request.payload, norms, self.process.timeline.now)
        except Refusal as refusal:
            self._note("refused", self.index, "Push", refusal.code)
            respond(refusal)
            return
        self._answer(request.header, answer.outcome.value, answer.code)
        respond(answer)
        self.advance()

    def _answer(self, header: PushHeader, outcome: str, code: str) -> None:
        self._note("push", self.index, header.fragment_id, header.round, header.tokens, outcome, code)

    def _member(self, request: PushRequest) -> Member:
        return self.core.check(request.learner_id, request.generation, request.epoch)

    def _leave(self, request: PullRequest) -> None:
        member = self.core.membership.get(request.learner_id)
        if member is not None and member.live and member.generation == request.generation:
            self.core.leave(self.core.check(request.learner_id, request.generation, request.epoch))
            self.advance()
