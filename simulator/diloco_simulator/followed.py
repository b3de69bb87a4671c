"""A learner of the product in a simulated process, or one rank of it, with an account of its training.

It is followed from the outside: by the acts at its step boundaries, and by the values of a model, which count tokens.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_common.errors import DilocoError
from diloco_common.wire.calls import SETTLE_S
from diloco_simulator.verify import invariants
from diloco_simulator.world.process import SimulatedProcess
from diloco_simulator.world.stage import QuietLog, Stage, StageSilence
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Act, Answered
from diloco_worker.core.fragment import LearnerFragment, PendingContribution
from diloco_worker.learner import Learner
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.telemetry import LearnerTelemetry

HAND_OVER_S = 0.05
"""Longest time that acts take from the training thread to the network thread, in seconds."""


@dataclass(eq=False)
class Account:
    """What a process has trained of one fragment, and how much of it is in versions. Each float32 [num_elements]."""

    base: Tensor
    """Trained before the process had a version."""
    merged: Tensor
    """Trained and, as far as the learner knows, merged."""
    lost: Tensor | None = None
    """Encoding errors of merged contributions."""
    largest: float = 0.0
    """The largest magnitude of a value in any of its anchors so far."""


class Trainer:
    """A process that trains. `state`: "joining", "training", "leaving", "left", "done" or "failed"."""

    learner: Any
    """The product's learner; for an island, the leader's."""

    def __init__(self, stage: Stage, learner_id: str) -> None:
        options = stage.options
        self.stage, self.learner_id = stage, learner_id
        self.name = f"{learner_id}.{stage.starts[learner_id]:03}"  # a process id; process ids sort by start time
        self.state = "joining"
        self.error: DilocoError | None = None
        self.hung_until = 0.0
        """Until this time the training loop does nothing, while its connections keep working."""
        self.not_finite = 0
        """Number of the next snapshots that will hold NaN."""
        self.poisoned = 0
        """Number of snapshots so far that held NaN."""
        self.process = SimulatedProcess(
            stage.timeline, self.name, stage.seed_of(learner_id), lambda _: options.codec_s, stutters=options.stutters
        )
        self._random = self.process.random
        self._step_s = options.step_s[stage.learner_ids.index(learner_id)]
        self._options = options

    @property
    def unresolved(self) -> dict[int, PendingContribution]:
        """Fragment -> contribution whose fate is not known. Leaves out buffers."""
        core = self.learner.core
        held = core.fragments.items() if core is not None else ()
        return {i: f.contribution for i, f in held if f.contribution is not None and f.fragment.kind != "buffer"}

    def thaw(self) -> None:
        self.process.thaw()

    async def _hang(self, due: float) -> float:
        """Wait while the loop hangs. Returns the time at which a step that was due at `due` must end."""
        while (hangs_s := self.hung_until - self.stage.timeline.now) > 0:
            due = self.hung_until
            await asyncio.sleep(hangs_s)
        return due


class FollowedRun(ABC):
    """The background of the product's learner, with an account of each of its fragments."""

    learner: Learner

    def __init__(self, stage: Stage, process: SimulatedProcess, name: str) -> None:
        """`name`: used in reports of broken promises."""
        self.stage, self.process, self._name = stage, process, name
        self.is_alive = True
        self._accounts: dict[int, Account] = {}
        self._refused: dict[PendingContribution, int] = {}
        self._connections: Connections | None = None
        self._running: asyncio.Task[None] | None = None
        self._handed_over = 0.0

    @abstractmethod
    def _watch(self, act: Act) -> None:
        """Follow an act of the product on a fragment."""

    @abstractmethod
    def _trained(self, fragment: LearnerFragment) -> Tensor:
        """Everything ever trained of the part of a fragment that is held here."""

    def start(self, connections: Connections) -> None:
        self._connections = connections
        self._running = self.process.start(connections.run(), f"connections of {self._name}")

    def post(self, acts: Sequence[Act]) -> None:
        """Look at the training thread's acts, and perform them a moment later, in order."""
        for act in acts:
            self._watch(act)
        now = self.stage.timeline.now
        self._handed_over = max(self._handed_over, now + HAND_OVER_S * self.process.random.random())
        self.process.loop.call_at(self._handed_over, self._perform, acts)

    def stop(self, settle_s: float) -> None:  # noqa: B027
        """Do nothing: the background ends with the process."""

    async def leave(self) -> None:
        """Leave, as the network thread does before it ends."""
        await asyncio.sleep(max(0.0, self._handed_over - self.stage.timeline.now))  # until posted acts are performed
        await self.learner.connections.leave(SETTLE_S)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self.learner.close()

    def begins(self) -> bool:
        begins = self.learner.begin()
        for fragment in self._fragments():
            if fragment.tensors.anchor is not None:  # if the shard is away, the anchor is the model's own values
                self._account(fragment)
        return begins

    def _telemetry(self, caller: Caller, history: Any) -> LearnerTelemetry:
        log: Any = QuietLog(caller.process_id, self._hear_error)
        silence: Any = StageSilence()
        return LearnerTelemetry(caller, self.process.clock, silence, log, history)

    def _perform(self, acts: Sequence[Act]) -> None:
        if self.is_alive and self._connections is not None:
            self._connections.perform(acts)

    def _check_refusals(self) -> None:
        """Count the steps for which refused contributions are still held.

        An answer waits behind versions while their fragments are read, or while it takes long to apply them. So steps
        count from the time when the answer was taken out of the inbox, or was lost there.
        """
        fragments = self.learner.core.fragments if self.learner.core is not None else {}
        held = (fragment.contribution for fragment in fragments.values())
        unread = {(e.fragment_id, e.round, e.tokens) for e in self.learner._inbox.unread() if isinstance(e, Answered)}
        self._refused = {
            c: self._refused.get(c, 0) + 1
            for c in held
            if c is not None and c.pushes.is_refused and (c.fragment_id, c.round, c.tokens) not in unread
        }
        for contribution, steps in self._refused.items():
            waits = 0 if self.learner._boundary._council.is_alone else len(fragments)
            invariants.refusals_are_heard(self._name, contribution.fragment_id, steps, waits)

    def _account(self, fragment: LearnerFragment) -> Account:
        fragment_id = fragment.fragment.fragment_id
        if fragment_id not in self._accounts:
            base = self._trained(fragment)
            self._accounts[fragment_id] = Account(base, torch.zeros_like(base))
        return self._accounts[fragment_id]

    def _unmerged(self, fragment: LearnerFragment) -> Tensor:
        """Trained work that is in no version, as far as the learner knows."""
        account = self._account(fragment)
        return self._trained(fragment) - account.base - account.merged

    def _measure(self, account: Account, fragment: LearnerFragment) -> None:
        anchor = fragment.tensors.anchor
        if anchor is not None and anchor.numel():
            account.largest = max(account.largest, float(anchor.float().abs().max()))

    def _fragments(self) -> list[LearnerFragment]:
        """Fragments whose values count tokens."""
        fragments = self.learner.core.fragments.values() if self.learner.core is not None else ()
        return [f for f in fragments if f.fragment.kind != "buffer"]

    def _hear_error(self, what: str, facts: dict[str, object]) -> None:
        error = facts.get("trace")
        if isinstance(error, BaseException) and self.process.alive:
            self.stage.timeline.fail(error)
