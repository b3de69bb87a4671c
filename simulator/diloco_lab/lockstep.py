"""Whole runs in one process, step by step and reproducible: the production cores with a virtual clock.

This file owns the clock, the order of events, and the delays. All decisions and all arithmetic are production code:
shards (`diloco_server.core`), learners (`diloco_worker.core`) and encodings.
There are no processes, threads or network, so comparing settings costs no more than the training itself.

Time is counted in inner steps of a learner of speed 1. At a step boundary, a learner processes arrivals and answers
rounds in the order of `diloco_worker.learner`. Learners are out of phase, as in reality: the ends of their first steps
are spread evenly over one step. A push reaches the shard `PUSH` after the snapshot. A new version reaches the learner
`OVERLAP_STEPS` - 1 after its commit, so learners of equal speed apply it `OVERLAP_STEPS` boundaries after their
snapshot. Conditions may delay both, lose pushes, or kill learners.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.errors import NotFinite
from diloco_common.settings import OVERLAP_STEPS, Settings, ShardSettings
from diloco_common.wire.messages import (
    PROTOCOL,
    Collect,
    Committed,
    Directive,
    JoinRequest,
    Progress,
    PushAnswer,
    PushHeader,
    VersionId,
)
from diloco_demo.training import share_at
from diloco_lab.arms import Conditions
from diloco_lab.shard import LockstepShard
from diloco_lab.tasks import InnerSteps, Task
from diloco_server.core.effects import Tell
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica

TICK = 0.1
"""Inner steps between two ticks of the shards. Grace windows have this resolution."""
PUSH = TICK
"""Inner steps from a snapshot until its contribution reaches the shard."""
NOTICE = TICK / 5
"""Inner steps until a learner hears a directive."""
STALLED = 50
"""A run ends after this many times H inner steps without a merged token: its contributions are being refused."""
EPOCH = 1

Arrival = Callable[[LearnerCore], object]
"""A message from a shard, processed by the learner at its next step boundary."""


@dataclass
class LockstepOutcome:
    """The results of a run as numbers. For the model, see `LockstepRun.global_model`."""

    tokens_trained: int = 0
    """Tokens that all learners trained, merged or not."""
    duration: float = 0.0
    """Virtual time, in inner steps of a learner of speed 1."""
    versions: int = 0
    """Outer steps of the fragment that has the fewest."""
    participants: float = 0.0
    """Mean number of contributions per round."""
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    dropped: int = 0
    """Pushes that were lost and sent again."""
    deaths: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    """Number of contributions by fate."""
    stalled: bool = False
    """Whether the run ended early: nothing was merged for long, or values are not finite. It counts as diverged."""


class Clock:
    """Makes the scheduled calls in order of time, and at equal times in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._count), call))

    def step(self) -> None:
        self.now, _, call = heapq.heappop(self._due)
        call()


class ShardRig(LockstepShard):
    """One shard of the run, on the run's clock."""

    def __init__(self, run: LockstepRun, index: int, count: int) -> None:
        settings = run.settings.model_copy(update={"shard": ShardSettings(index=index, count=count)})
        super().__init__(settings, EPOCH, lambda: run.clock.now)
        self._run = run

    def tell(self, tell: Tell) -> None:
        self._run.learners[tell.learner_id].told(self, tell.directive)


class LearnerRig:
    """A learner and its training loop, without sockets or threads."""

    def __init__(self, run: LockstepRun, index: int) -> None:
        settings, conditions = run.settings, run.conditions
        self.learner_id = f"worker-{index}"
        self.cores: list[LearnerCore] = []
        """One core per life. The last one is the current one, if the learner is alive."""
        self.alive = False
        self.generations: dict[ShardRig, int] = {}
        self._run = run
        self.index = index
        self._inbox: list[Arrival] = []
        self._held: dict[int, tuple[int, Tensor]] = {}  # fragment -> the last fetched version and its values
        speed = conditions.speeds[index] if conditions.speeds else 1.0
        key = f"{settings.run.seed}/{self.learner_id}"
        self._step_time = _step_times(speed, conditions.noise, key)
        self._drops = random.Random(f"{key} drops")

    def join(self, shards: Sequence[ShardRig]) -> None:
        """Get a lease from every shard, and the latest version of every fragment. The first learner seeds them."""
        process_id, inner = f"lockstep-{len(self.cores)}", self._run.inner
        replica = Replica(inner.models[self.index], companions=inner.companions(self.index))
        asking = JoinRequest(PROTOCOL, process_id, tuple(replica.specs))
        for rig in shards:
            self.generations[rig] = rig.shard.join(self.learner_id, asking, self._run.clock.now).generation
        manifest = shards[0].shard.manifest
        assert manifest is not None
        core = LearnerCore(replica, manifest, shards[0].shard.join_answer().policy)
        self.cores.append(core)
        self.alive = True
        for fragment in manifest.fragments:
            rig = shards[fragment.shard_index]
            if not rig.shard.versions.owned(fragment.fragment_id).seeded:
                payload = encode_payload(core.fragments[fragment.fragment_id].tensors.values(), "float32")
                self._hand_in(rig, self._header(fragment.fragment_id, 0, 0, 0, 0, payload), payload)
            version, values, _ = self._fetch(rig, fragment.fragment_id)
            core.arrived(fragment.fragment_id, version, EPOCH, values, 0)

    def die(self) -> None:
        """The process ends, and everything that it held or sent is lost."""
        self.alive = False
        self._inbox, self._held = [], {}
        self._run.inner.leave(self.index)
        self._run.outcome.deaths += 1

    def come_back(self) -> None:
        """Start a new process with the same learner id and only the global model."""
        self._run.inner.begin(self.index)
        self.join(self._run.shards)
        self.step()

    def after(self, delay: float, call: Callable[[], object]) -> None:
        """Make a call later, if this process of the learner still lives then."""
        life = self.core

        def call_if_alive() -> None:
            if self.alive and self.core is life:
                call()

        self._run.clock.after(delay, call_if_alive)

    @property
    def core(self) -> LearnerCore:
        return self.cores[-1]

    def told(self, rig: ShardRig, directive: Directive) -> None:
        if not self.alive:
            return
        match directive:
            case Collect():
                asked: Arrival = lambda core: core.collect(directive, EPOCH)  # noqa: E731
                self.after(NOTICE, lambda: self._inbox.append(asked))
            case Committed(version=version) if version:
                self._pull(rig, directive)

    def step(self) -> None:
        """Take one inner step, process its boundary, and schedule the next step."""
        core = self.core
        loss, tokens = self._run.inner.step(self.index, self._run.share_of)
        core.stepped(tokens)
        inbox, self._inbox = self._inbox, []
        for arrival in inbox:
            arrival(core)
        core.take_carried()
        for contribution in core.contribute():
            self._push(contribution)
        took = self._step_time()
        for rig in self._run.shards:
            member = rig.shard.check(self.learner_id, self.generations[rig], EPOCH)
            rig.shard.progress(member, self._report(loss, took), self._run.clock.now)
            rig.advance()
        self.after(took, self.step)

    def _report(self, loss: float, took: float) -> Progress:
        return Progress(self.core.inner_step, self.core.tokens, loss, took, inner=self._run.inner.kind)

    def _push(self, contribution: PendingContribution) -> None:
        fragment = self.core.manifest.fragments[contribution.fragment_id]
        try:
            payload = contribution.tensors.encode(fragment.encoding(self.core.policy.push_encoding))
        except NotFinite:
            self._run.outcome.stalled = True
            return
        header = self._header(
            contribution.fragment_id,
            contribution.round,
            contribution.base_version,
            contribution.tokens,
            contribution.steps,
            payload,
        )
        rig = self._run.shards[self.core.manifest.fragments[contribution.fragment_id].shard_index]
        self._run.outcome.bytes_pushed += header.payload.num_bytes
        conditions = self._run.conditions
        delay = PUSH + conditions.delay
        if self._drops.random() < conditions.drop:
            self._run.outcome.dropped += 1
            delay += conditions.retry
        self.after(delay, lambda: self._arrive(rig, header, payload))

    def _arrive(self, rig: ShardRig, header: PushHeader, payload: Payload) -> None:
        answer = self._hand_in(rig, header, payload)
        self._inbox.append(lambda core: core.answered(header.fragment_id, header.round, answer))

    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Payload) -> PushAnswer:
        return rig.push(rig.shard.check(self.learner_id, self.generations[rig], EPOCH), header, payload)

    def _pull(self, rig: ShardRig, committed: Committed) -> None:
        version, values, num_bytes = self._fetch(rig, committed.fragment_id)
        merged_version = rig.shard.versions.owned(committed.fragment_id).status(self.learner_id).merged_version
        self._run.outcome.bytes_pulled += num_bytes

        @torch.no_grad()
        def apply(core: LearnerCore) -> None:
            core.arrived(committed.fragment_id, version, EPOCH, values, merged_version)

        self.after(self._run.pull_delay, lambda: self._inbox.append(apply))

    def _fetch(self, rig: ShardRig, fragment_id: int) -> tuple[int, Tensor, int]:
        """The latest version, its values, and the bytes it took on the wire, perhaps as a change."""
        version, payload = rig.shard.published(fragment_id)
        had, anchor = self._held.get(fragment_id, (None, None))
        change = rig.shard.change_since(fragment_id, None if had is None else VersionId(EPOCH, had))
        payload, base = (payload, None) if change is None else (change, anchor)
        values, _ = decode_version(payload, base)
        self._held[fragment_id] = version, values
        return version, values, payload.header.num_bytes

    def _header(
        self, fragment_id: int, round_number: int, base_version: int, tokens: int, steps: int, payload: Payload
    ) -> PushHeader:
        digest = self.core.manifest.digest
        return PushHeader(fragment_id, round_number, EPOCH, base_version, tokens, steps, payload.header, digest)


class LockstepRun:
    """The shards and learners of one run, and their common clock."""

    def __init__(self, settings: Settings, task: Task, conditions: Conditions) -> None:
        self.settings, self.task, self.conditions = settings, task, conditions
        self.clock = Clock()
        self.outcome = LockstepOutcome()
        self.pull_delay = OVERLAP_STEPS - 1.0 + conditions.delay
        self.inner = self.make_inner()
        self.shards = [ShardRig(self, i, conditions.shards) for i in range(conditions.shards)]
        self.learners = {rig.learner_id: rig for rig in (LearnerRig(self, i) for i in range(conditions.learners))}
        self._merged, self._merged_at = 0, 0.0  # tokens merged by all shards, and when that number last grew

    def make_inner(self) -> InnerSteps:
        """What trains the models. A benchmark may give each learner its own optimizer."""
        return InnerSteps(self.settings, self.task, self.conditions.learners)

    @property
    def fraction(self) -> float:
        """Progress as a learner sees it: the tokens merged by the shard that is furthest ahead."""
        return min(1.0, max(rig.shard.tokens_merged for rig in self.shards) / self.settings.run.tokens)

    def share_of(self, index: int) -> float:
        """The share of its highest learning rates for a learner's current step."""
        learner = self.learners[f"worker-{index}"]
        return share_at(
            fraction=self.fraction, inner_step=learner.core.inner_step, budget=self.settings.run.tokens,
            train=self.settings.train,
        )  # fmt: skip

    def run(self, on_progress: Callable[[float], None] | None = None) -> LockstepOutcome:
        """Train until every shard has merged the budget, or nothing has been merged for long."""
        self.begin()
        said = 0.0
        while not self.outcome.stalled and not all(rig.shard.done for rig in self.shards):
            self.clock.step()
            if on_progress is not None and self.fraction > said:
                said = self.fraction
                on_progress(said)
        return self._finish()

    def begin(self) -> None:
        """Let all learners join. From here on the clock decides what happens."""
        for learner in self.learners.values():
            learner.join(self.shards)
        for i, learner in enumerate(self.learners.values()):
            learner.after(1 + i / len(self.learners), learner.step)
        self.clock.after(TICK, self._tick)

    @torch.no_grad()
    def global_model(self) -> nn.Module:
        """The latest version of every fragment, in float32 as `diloco up` exports it."""
        model = self.task.model()
        replica = Replica(model)
        for rig in self.shards:
            for state in rig.shard.versions.of_model:
                assert state.values is not None
                replica.write(state.fragment, state.values.theta)
        return model

    def _tick(self) -> None:
        for rig in self.shards:
            rig.advance()
        merged = sum(rig.shard.tokens_merged for rig in self.shards)
        if merged > self._merged:
            self._merged, self._merged_at = merged, self.clock.now
        self.outcome.stalled |= self.clock.now - self._merged_at > STALLED * self.settings.sync.first_every
        every = self.conditions.kill_every
        if every and self._versions() >= every * (self.outcome.deaths + 1):
            self._kill_one()
        self.clock.after(TICK, self._tick)

    def _kill_one(self) -> None:
        """Kill the next learner in turn, unless it is the last one alive."""
        alive = [learner for learner in self.learners.values() if learner.alive]
        if len(alive) > 1:
            learner = alive[self.outcome.deaths % len(alive)]
            learner.die()
            self.clock.after(self.conditions.away, learner.come_back)

    def _versions(self) -> int:
        """Number of versions of the fragment that has the fewest."""
        return min(state.version for rig in self.shards for state in rig.shard.versions.of_model)

    def _finish(self) -> LockstepOutcome:
        out = self.outcome
        ledgers = [rig.shard.ledger for rig in self.shards]
        cores = [core for learner in self.learners.values() for core in learner.cores]
        out.tokens_trained = sum(core.tokens for core in cores)
        out.duration = round(self.clock.now, 2)
        out.versions = self._versions()
        out.participants = sum(x.participants for x in ledgers) / max(1, sum(x.rounds for x in ledgers))
        out.fates = dict(sum((core.contributions for core in cores), Counter[str]()))
        return out


def _step_times(speed: float, noise: float, key: str) -> Callable[[], float]:
    """Draws the durations of a learner's inner steps, which are equal in every run."""
    draw = random.Random(key)
    return lambda: (1.0 + noise * (2 * draw.random() - 1.0 if noise else 0.0)) / speed
