"""Whole clusters of pure cores in one process: no network, no threads, one order, time passed by hand.

`ShardShell` is one shard and what it said; `Lockstep` couples shards with `LearnerCore`s. At every boundary
everything that can be said is said, unless a learner's pushes are held back, or a shard's merges are.

    cluster = Lockstep(settings, num_shards=2)
    cluster.join("a", model)
    ... train model ...
    cluster.stepped("a", tokens=48)
    cluster.exchange()
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from builders import asking
from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.settings import Settings, ShardSettings
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import (
    Collect,
    Committed,
    Directive,
    Evicted,
    Progress,
    PushAnswer,
    PushHeader,
    Stop,
    VersionId,
)
from diloco_lab.shard import LockstepShard, run_to_end
from diloco_server.core.effects import Tell
from diloco_server.core.ledger import Fact
from diloco_server.core.membership import Member
from diloco_server.shell.driver import Job
from diloco_worker.core.copies import FindCopies
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.momentum import Companion
from diloco_worker.core.replica import NONE, Replica


class ShardShell(LockstepShard):
    def __init__(self, settings: Settings, epoch: int = 1) -> None:
        self.now = 0.0
        super().__init__(settings, epoch, lambda: self.now)
        self.told: dict[str, list[Directive]] = defaultdict(list)
        """Directives by learner, since they were taken last."""
        self.events: list[Fact] = []
        self.jobs: list[Job] = []
        """What the compute thread would have to do, while `holds_jobs`."""
        self.holds_jobs = False

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass, and everything happen that is due."""
        self.now += seconds
        super().advance()
        while self.jobs and not self.holds_jobs:
            self.finish_jobs()
            self.driver.carry_out_all()

    def finish_jobs(self) -> None:
        """Compute and announce the versions that wait."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            run_to_end(job)
            self.shard.tick(self.now)

    def take_told(self, learner_id: str) -> list[Directive]:
        """What the learner was told since the last call."""
        return self.told.pop(learner_id, [])

    def tell(self, tell: Tell) -> None:
        self.told[tell.learner_id].append(tell.directive)

    def start(self, job: Job, name: str) -> None:
        self.jobs.append(job)

    def note(self, event: Fact) -> None:
        self.events.append(event)


@dataclass
class LockstepLearner:
    """One learner core, its leases, and what it has not sent yet."""

    learner_id: str
    core: LearnerCore
    members: dict[int, Member]
    """Shard index -> lease."""
    replica: Replica
    outbox: list[PendingContribution] = field(default_factory=list)
    answers: list[PushAnswer] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    """Shards that have reached their budget."""
    held: bool = False
    """Whether its pushes stay in the outbox."""
    encoded: dict[int, tuple[PendingContribution, Payload]] = field(default_factory=dict)
    versions: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Fragment -> version and values pulled last."""
    pulled: Counter[str] = field(default_factory=Counter)
    """Pulls by the encoding that came."""


class Lockstep:
    """Shards and learners that speak only in `exchange`, in a fixed order."""

    def __init__(self, settings: Settings, num_shards: int = 1, epoch: int = 1) -> None:
        self.settings = settings
        self.shards = [
            ShardShell(settings.model_copy(update={"shard": ShardSettings(index=i, count=num_shards)}), epoch)
            for i in range(num_shards)
        ]
        self.learners: dict[str, LockstepLearner] = {}

    def join(
        self, learner_id: str, model: nn.Module, companions: Mapping[str, Companion] = NONE,
        copies: FindCopies | None = None,
    ) -> LockstepLearner:  # fmt: skip
        """Join every shard, seed what is empty, and take over the versions. `copies`: those that its optimizer steps
        on."""
        replica = Replica(model, companions=companions)
        if copies is not None:
            replica.keep_copies(copies)
        members = {
            i: shell.shard.join(learner_id, asking(replica.specs, f"{learner_id}-process"), shell.now)
            for i, shell in enumerate(self.shards)
        }
        manifest = cut(replica.specs, self.settings.sync.fragments, len(self.shards))
        core = LearnerCore(replica, manifest, self.shards[0].shard.join_answer().policy)
        learner = self.learners[learner_id] = LockstepLearner(learner_id, core, members, replica)
        for index, shell in enumerate(self.shards):
            for status in shell.shard.join_answer(learner_id).fragments:
                if not status.seeded:
                    payload = encode_payload(core.fragments[status.fragment_id].tensors.values(), "float32")
                    header = self._header(learner, status.fragment_id, 0, payload, tokens=0, steps=0, base_version=0)
                    shell.push(members[index], header, payload)
            shell.shard.attend(members[index])
            shell.advance()
        self._report(learner)
        self._hear(learner)
        return learner

    def stepped(self, learner_id: str, tokens: int) -> None:
        """The learner has trained its model on `tokens` tokens; the shards are told."""
        learner = self.learners[learner_id]
        learner.core.stepped(tokens)
        self._report(learner)

    def leaving(self, learner_id: str) -> None:
        """The learner leaves, and asks for rounds of what it has trained."""
        learner = self.learners[learner_id]
        self._report(learner, learner.core.last_rounds)

    def leave(self, learner_id: str) -> None:
        learner = self.learners.pop(learner_id)
        for index, shell in enumerate(self.shards):
            shell.shard.leave(learner.members[index])

    def exchange(self, order: Sequence[str] | None = None) -> None:
        """Let everybody say and hear everything, learners in the given order, until nothing moves."""
        for shell in self.shards:
            shell.advance()
        moved = True
        while moved:
            moved = False
            for learner_id in order or sorted(self.learners):
                learner = self.learners[learner_id]
                moved |= self._hear(learner)
                taken = learner.core.contribute()
                learner.outbox += taken
                if not learner.held:
                    moved |= self.send(learner_id)

    def send(self, learner_id: str) -> bool:
        """Push what the learner holds back; says whether there was anything."""
        learner = self.learners[learner_id]
        outbox, learner.outbox = learner.outbox, []
        for contribution in outbox:
            payload = self._encode(learner, contribution)
            header = self._header(
                learner, contribution.fragment_id, contribution.round, payload,
                tokens=contribution.tokens, steps=contribution.steps, base_version=contribution.base_version,
            )  # fmt: skip
            index = learner.core.manifest.fragments[contribution.fragment_id].shard_index
            answer = self.shards[index].push(learner.members[index], header, payload)
            learner.answers.append(answer)
            learner.core.answered(contribution.fragment_id, contribution.round, answer)
        return bool(outbox)

    def _report(self, learner: LockstepLearner, last_rounds: frozenset[int] | None = None) -> None:
        for index, shell in enumerate(self.shards):
            progress = Progress(learner.core.inner_step, learner.core.tokens, last_rounds=last_rounds)
            shell.shard.progress(learner.members[index], progress, shell.now)

    @torch.no_grad()
    def _hear(self, learner: LockstepLearner) -> bool:
        heard = False
        for index, shell in enumerate(self.shards):
            for directive in shell.take_told(learner.learner_id):
                heard = True
                match directive:
                    case Collect():
                        learner.core.collect(directive, shell.shard.epoch)
                    case Committed():
                        self._pull(learner, shell, directive.fragment_id)
                    case Stop():
                        learner.stopped.add(index)
                    case Evicted():
                        raise AssertionError(f"{learner.learner_id} was evicted: {directive.message}")
                    case _:
                        pass
        return heard

    def _pull(self, learner: LockstepLearner, shell: ShardShell, fragment_id: int) -> None:
        version, payload = shell.shard.published(fragment_id)
        had, anchor = learner.versions.get(fragment_id, (None, None))
        change = shell.shard.change_since(fragment_id, None if had is None else VersionId(shell.shard.epoch, had))
        payload, base = (payload, None) if change is None else (change, anchor)
        values, _ = decode_version(payload, base, learner.replica.device)
        learner.versions[fragment_id] = version, values
        learner.pulled[payload.header.encoding] += 1
        merged = shell.shard.fragments[fragment_id].status(learner.learner_id).merged_version
        learner.core.arrived(fragment_id, version, shell.shard.epoch, values, min(merged, version))

    def _encode(self, learner: LockstepLearner, contribution: PendingContribution) -> Payload:
        """Once per contribution: encoding leaves in it what was lost."""
        known = learner.encoded.get(contribution.fragment_id)
        if known is None or known[0] is not contribution:
            policy = learner.core.policy
            payload = contribution.tensors.encode(policy.push_encoding)
            learner.encoded[contribution.fragment_id] = known = (contribution, payload)
        return known[1]

    def _header(
        self, learner: LockstepLearner, fragment_id: int, round_number: int, payload: Payload, *,
        tokens: int, steps: int, base_version: int,
    ) -> PushHeader:  # fmt: skip
        manifest = learner.core.manifest
        epoch = self.shards[manifest.fragments[fragment_id].shard_index].shard.epoch
        return PushHeader(
            fragment_id, round_number, epoch, base_version, tokens, steps, payload.header, manifest.digest
        )
