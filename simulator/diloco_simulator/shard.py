"""One shard process: the core `Shard` and its shell, as server/diloco_server/{host,service}.py wire it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from diloco_common.errors import BadRequest, Refusal
from diloco_common.messages import Committed, Directive, Evicted, Progress, PushHeader
from diloco_server.core.effects import Effect, MergeRound, SeedFragment, Tell
from diloco_server.core.membership import Member
from diloco_server.core.shard import Shard
from diloco_simulator import invariants
from diloco_simulator.arithmetic import arithmetic_of
from diloco_simulator.messages import JoinAnswer, JoinRequest, PullAnswer, PullRequest, PushRequest
from diloco_simulator.network import Respond, Stream
from diloco_simulator.options import Options
from diloco_simulator.timeline import Process
from diloco_simulator.truth import Truth

INSPECT_S = 0.005
"""Mean of what it takes to receive and inspect a contribution."""

Note = Callable[..., None]


class SimulatedShard:
    """A process that serves one shard from memory: with it everything is lost."""

    def __init__(self, index: int, epoch: int, process: Process, options: Options, truth: Truth, note: Note) -> None:
        self.index = index
        self.process = process
        self.settings = options.settings[index]
        self.core = Shard(self.settings, epoch)
        self._options = options
        self._truth = truth
        self._note = note
        self._arithmetic = arithmetic_of(options.arithmetic)
        self._streams: dict[str, Stream] = {}
        self._random = random.Random(f"shard {options.seed} {epoch}")
        self._compute_free_at = 0.0
        self._thawed_at = 0.0
        self._grace_s_max = 0.0
        truth.live_epochs[index] = epoch
        process.later(0.0, self._tick)
        process.later(0.0, self._pulse)

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
        collecting = [state for state in self.core.fragments.values() if state.round is not None]
        if any(state.round is not None and state.round.quorum_at is not None for state in collecting):
            self._grace_s_max = max(self._grace_s_max, self.core.grace_s())
        for state in collecting:
            invariants.rounds_make_the_next_version(state)
            invariants.rounds_are_bounded(state, self._options.learners)
            invariants.nobody_delays_a_round_beyond_its_grace(
                state, self._options.quorum, now, self._grace_s_max, self._options.tick_s
            )

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Tell():
                self._announced(effect.directive)
                stream = self._streams.get(effect.learner_id)
                if stream is not None and stream.generation == effect.generation:
                    self._send(stream, effect.directive)
            case SeedFragment():
                self._note("seed", self.index, effect.fragment_id)
                self._compute(self._options.compute_s, self._seed, effect)
            case MergeRound():
                self._round_closed(effect)
                self._compute(self._options.compute_s, self._merge, effect)
            case _:
                self._note("shard", self.index, effect)

    def _announced(self, directive: Directive) -> None:
        if isinstance(directive, Committed):
            invariants.announced_versions_are_there(
                self._truth, self.core.epoch, directive.fragment_id, directive.version
            )

    def _compute(self, mean_s: float, job: Callable[..., None], *args: Any) -> None:
        """On the one compute thread, in the order of the calls."""
        now = self.process.timeline.now
        takes_s = mean_s * 2 * self._random.random()
        self._compute_free_at = max(now, self._compute_free_at) + takes_s
        self.process.later(self._compute_free_at - now, job, *args)

    def _seed(self, effect: SeedFragment) -> None:
        """Make version 0 of a fragment."""
        values = self._arithmetic.seed(effect.payload)
        published = self._arithmetic.publish(values, self._options.pull, None)
        self._truth.publish(self.core.epoch, effect.fragment_id, 0, published.values)
        self.core.seeded(effect.fragment_id, values, published)
        self.advance()

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
        truth, before = self._truth, state.version
        truth.publish(self.core.epoch, effect.fragment_id, effect.version, published.values)
        origins = [truth.origin(c.payload) for c in effect.contributions]
        invariants.nothing_carried_is_merged(origins)
        invariants.merged_at_most_once(truth, origins, gapless=self.settings.sync.on_commit == "carry")
        for origin in origins:
            origin.merged = True
            truth.merged[origin.instance, origin.fragment_id, origin.epoch].append(origin)
        truth.counts["versions"] += 1
        truth.counts["merged"] += len(origins)
        self.core.committed(effect.fragment_id, published, self.process.timeline.now)
        invariants.versions_grow_by_one(before, effect.version, state.version)
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
        self.core.progress(member, progress, self.process.timeline.now)
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
        member = self.core.join(request.learner_id, request.instance, request.tensors, self.process.timeline.now)
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
        version, payload = shard.published(request.fragment_id)
        merged_version = min(shard.owned(request.fragment_id).merged_versions.get(request.learner_id, 0), version)
        invariants.served_versions_are_published(
            self._truth, shard.epoch, request.fragment_id, version, payload, merged_version
        )
        if (request.have_version, request.epoch) == (version, shard.epoch):
            return None
        tokens_merged = shard.owned(request.fragment_id).tokens_merged
        change = shard.change_since(request.fragment_id, request.epoch, request.have_version)
        base_version = None if change is None else request.have_version
        self._truth.counts["pulled as values" if change is None else "pulled as changes"] += 1
        return PullAnswer(version, shard.epoch, change or payload, merged_version, tokens_merged, base_version)

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
