"""A learner of the product in a simulated process, or one rank of it, and what is known of its training.

It is followed from the outside: by the acts of its step boundaries, and by the values of a model that count tokens.
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
from diloco_simulator.verify import invariants
from diloco_simulator.world.process import SimulatedProcess
from diloco_simulator.world.stage import QuietLog, Stage, StageSilence
from diloco_worker.core.acts import Act
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Answered
from diloco_worker.core.fragment import LearnerFragment, PendingContribution
from diloco_worker.learner import Learner
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.telemetry import LearnerTelemetry

SETTLE_S = 5.0
HAND_OVER_S = 0.05
"""Until the network thread has what the training thread hands over."""


@dataclass(eq=False)
class Account:
    """What one process has trained of one fragment, and what of it is in versions. float32 [num_elements] each."""

    base: Tensor
    """Trained before it had a version."""
    merged: Tensor
    """Trained, and merged as far as the learner knows."""
    lost: Tensor | None = None
    """What encoders lost of the contributions that are merged."""
    largest: float = 0.0
    """Of all values that its anchors have had."""


class Trainer:
    """A process that trains. `state`: "joining", "training", "leaving", "left", "done" or "failed"."""

    learner: Any
    """Of the product; an island's is its leader's."""

    def __init__(self, stage: Stage, learner_id: str) -> None:
        options = stage.options
        self.stage, self.learner_id = stage, learner_id
        self.name = f"{learner_id}.{stage.starts[learner_id]}"
        self.state = "joining"
        self.error: DilocoError | None = None
        self.hung_until = 0.0
        """The training loop does nothing until then, while its connections go on."""
        self.not_finite = 0
        """So many snapshots to come hold a value that is NaN."""
        self.poisoned = 0
        """So many have held one."""
        self.process = SimulatedProcess(
            stage.timeline, self.name, stage.seed_of(learner_id), lambda _: options.codec_s, stutters=options.stutters
        )
        self._random = self.process.random
        self._step_s = options.step_s[stage.learner_ids.index(learner_id)]
        self._options = options

    @property
    def unresolved(self) -> dict[int, PendingContribution]:
        """Fragment -> contribution whose fate is not known; without those of buffers."""
        core = self.learner.core
        held = core.fragments.items() if core is not None else ()
        return {i: f.contribution for i, f in held if f.contribution is not None and f.fragment.kind != "buffer"}

    def thaw(self) -> None:
        self.process.thaw()

    async def _hang(self, due: float) -> float:
        """When a step ends that was due at this time."""
        while (hangs_s := self.hung_until - self.stage.timeline.now) > 0:
            due = self.hung_until
            await asyncio.sleep(hangs_s)
        return due


class FollowedRun(ABC):
    """What the product's learner asks of its background, and an account of each of its fragments."""

    learner: Learner

    def __init__(self, stage: Stage, process: SimulatedProcess, name: str) -> None:
        """`name`: for whoever reads of a broken promise."""
        self.stage, self.process, self._name = stage, process, name
        self.is_alive = True
        self._accounts: dict[int, Account] = {}
        self._refused: dict[PendingContribution, int] = {}
        self._connections: Connections | None = None
        self._running: asyncio.Task[None] | None = None
        self._handed_over = 0.0

    @abstractmethod
    def _watch(self, act: Act) -> None:
        """What the product says that it did to a fragment."""

    @abstractmethod
    def _trained(self, fragment: LearnerFragment) -> Tensor:
        """All that was ever trained of a fragment, as far as it is held here."""

    def start(self, connections: Connections) -> None:
        self._connections = connections
        self._running = self.process.start(connections.run(), f"connections of {self._name}")

    def post(self, acts: Sequence[Act]) -> None:
        """The training thread hands over its acts: they are looked at here, and performed a moment later, in order."""
        for act in acts:
            self._watch(act)
        now = self.stage.timeline.now
        self._handed_over = max(self._handed_over, now + HAND_OVER_S * self.process.random.random())
        self.process.loop.call_at(self._handed_over, self._perform, acts)

    def stop(self, settle_s: float) -> None:  # noqa: B027
        """Its end is that of the process."""

    async def leave(self) -> None:
        """As the network thread does before it ends."""
        await asyncio.sleep(max(0.0, self._handed_over - self.stage.timeline.now))  # all that was posted is performed
        await self.learner.connections.leave(SETTLE_S)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self.learner.close()

    def begins(self) -> bool:
        begins = self.learner.begin()
        for fragment in self._fragments():
            if fragment.tensors.anchor is not None:  # the model's own values, where the shard is away
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
        """Contributions that were refused, and are held as if they were not: for how many steps.

        An answer waits behind versions, while their fragments are read or applying takes long.
        Steps count from when it was taken out of the inbox, or got lost there.
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
        """What was trained and is in no version, as far as the learner knows."""
        account = self._account(fragment)
        return self._trained(fragment) - account.base - account.merged

    def _measure(self, account: Account, fragment: LearnerFragment) -> None:
        anchor = fragment.tensors.anchor
        if anchor is not None and anchor.numel():
            account.largest = max(account.largest, float(anchor.float().abs().max()))

    def _fragments(self) -> list[LearnerFragment]:
        """Those whose values count tokens."""
        fragments = self.learner.core.fragments.values() if self.learner.core is not None else ()
        return [f for f in fragments if f.fragment.kind != "buffer"]

    def _hear_error(self, what: str, facts: dict[str, object]) -> None:
        error = facts.get("trace")
        if isinstance(error, BaseException) and self.process.alive:
            self.stage.timeline.fail(error)
