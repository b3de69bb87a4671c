"""One learner of the product in a simulated process, and the training loop around it.

The loop trains the model whose values count tokens, so what the product does to the values can be followed from the
outside: by the acts of its step boundaries, by what it pushes, and by the values themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload
from diloco_common.errors import Busy, DilocoError
from diloco_common.wire.messages import PushHeader
from diloco_simulator.verify import invariants
from diloco_simulator.world.model import Counting, TornReplica, part_of
from diloco_simulator.world.process import Process
from diloco_simulator.world.stage import Checkpoint, QuietLog, Silence, Stage
from diloco_simulator.world.transport import MemoryTransport
from diloco_worker.core.acts import Act, PushContribution, VersionApplied
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Answered
from diloco_worker.core.fragment import Contribution, Fate, LearnerFragment
from diloco_worker.learner import Learner, make_learner
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.telemetry import LearnerTelemetry

TOKENS_MAX = 4
"""Of a step, at most; at least one."""
LOOK_S = 0.2
"""How often a learner that is joining looks whether it can train."""
SETTLE_S = 5.0
HAND_OVER_S = 0.05
"""Until the network thread has what the training thread hands over."""
SAVES = 0.5
"""How often a step ends with a checkpoint."""
BUSY_LEASES, BUSY_S = 2.0, 2.0
"""How long a push may be answered BUSY beside hostile learners: as long as theirs may pause, twice, and a moment."""
TORN = 0.3
"""How often an optimizer step falls into the middle of a snapshot that the codec thread takes."""


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


@dataclass(eq=False)
class Taken:
    """A contribution that was taken."""

    low: Tensor
    """What it holds at least: trained until the step boundary, and not merged."""
    lost: Tensor | None = None
    """What the encoding lost of it, once it was pushed."""


def refused_since(before: Mapping[Contribution, int], learner: Learner) -> dict[Contribution, int]:
    """The contributions that were refused, and are held as if they were not: for how many steps.

    An answer waits behind versions that came before it, while their fragments are read or applying takes long. Steps
    count from when it was taken out of the inbox, or got lost there.
    """
    core = learner.core
    held = (fragment.contribution for fragment in core.fragments.values()) if core is not None else ()
    unread = {(e.fragment_id, e.round, e.tokens) for e in learner._inbox.unread() if isinstance(e, Answered)}
    return {
        c: before.get(c, 0) + 1
        for c in held
        if c is not None and c.pushes.is_refused and (c.fragment_id, c.round, c.tokens) not in unread
    }


class LearnerProcess:
    """A process that trains. `state`: "joining", "training", "leaving", "left", "done" or "failed"."""

    def __init__(self, cluster: Stage, learner_id: str, flat: Tensor, start: Start) -> None:
        number = cluster.starts[learner_id]
        self.learner_id = learner_id
        self.name = f"{learner_id}.{number}"
        self.state = "joining"
        self.error: DilocoError | None = None
        self.hung_until = 0.0
        """The training loop does nothing until then, while its connections go on."""
        self.is_warned = False
        """It is to hand over what it has trained, and leave."""
        self.not_finite = 0
        """So many snapshots to come hold a value that is NaN."""
        self.poisoned = 0
        """So many have held one."""
        self._cluster = cluster
        self._options = options = cluster.options
        self.process = Process(
            cluster.timeline, self.name, cluster.seed_of(learner_id), lambda _: options.codec_s,
            stutters=options.stutters,
        )  # fmt: skip
        self._random = self.process.random
        self.model = Counting(flat, has_buffer=options.has_buffer)
        self._step_s = options.step_s[cluster.learner_ids.index(learner_id)]
        self._tokens = 0  # of the step that is under way
        self._ahead = 0  # of these, the optimizer has put so many into the model already
        self._thawed_at = 0.0
        self._handed_over = 0.0
        self._accounts: dict[int, Account] = {}
        self._refused: dict[Contribution, int] = {}
        self._taken: dict[Contribution, Taken] = {}
        self._busy_since: dict[tuple[int, int], float] = {}  # fragment and round -> first of the BUSY answers in a row
        self.unresolved: dict[int, Contribution] = {}
        """Fragment -> contribution whose fate is not known."""
        caller = Caller("local", learner_id, self.name)
        log: Any = QuietLog(self.name, self._hear_error)
        silence: Any = Silence()
        telemetry = LearnerTelemetry(caller, self.process.clock, silence, log, cluster.history_of(learner_id))
        replica = TornReplica(self.model, self._during_a_read, has_companion=options.companions_every > 0)
        replica.reads_later = options.reads_later
        self.learner = make_learner(
            replica, [str(i) for i in range(options.shards)], caller, self._dial,
            self.process.world(), self, telemetry, start,
        )  # fmt: skip
        self._connections: Connections | None = None
        self._running: asyncio.Task[None] | None = None
        self.process.start(self._live(), self.name)

    # ------------------------------------------------------------ the product's background

    def start(self, connections: Connections) -> None:
        self._connections = connections
        self._running = self.process.start(connections.run(), "connections")

    def post(self, acts: Sequence[Act]) -> None:
        """The training thread hands over its acts: they are looked at here, and performed a moment later, in order."""
        for act in acts:
            self._watch(act)
        assert self._connections is not None
        now = self._cluster.timeline.now
        self._handed_over = max(self._handed_over, now + HAND_OVER_S * self._random.random())
        self.process.loop.call_at(self._handed_over, self._connections.perform, acts)

    def stop(self, settle_s: float) -> None:
        """Its end is that of the process."""

    def _dial(self, address: str) -> MemoryTransport:
        path = self.learner_id, int(address)
        return MemoryTransport(
            self._cluster.network, self.process, path, self._pushing, self._push_answered, self._options.call_s
        )

    # ------------------------------------------------------------ the training loop

    async def _live(self) -> None:
        try:
            self.learner.start()
            while not self._begins():  # noqa: ASYNC110 - as `join` asks in production
                await asyncio.sleep(LOOK_S)
            self.state = "training"
            while not (self.learner.done or self.is_warned):
                await self._step()
            self.state = "leaving"
            if self.is_warned:
                await self._hand_over()
            await self.learner.connections.leave(SETTLE_S)
            if self._running is not None:  # as the network thread does before it ends
                self._running.cancel()
                await asyncio.wait([self._running])
            self.learner.close()
            self.state = "left" if self.is_warned else "done"
        except DilocoError as error:
            self.error, self.state = error, "failed"

    async def _hand_over(self) -> None:
        """As `Learner.leave` does."""
        began = self._cluster.timeline.now
        while True:
            self.learner.poll()
            self._check()
            is_over, missing = self.learner.hand_over(self._cluster.timeline.now - began, None)
            if is_over:
                break
            await asyncio.sleep(LOOK_S)
        self._cluster.counts["left with everything merged" if not missing else "left with something"] += 1

    def _begins(self) -> bool:
        begins = self.learner.begin()
        for fragment in self._fragments():
            if fragment.tensors.anchor is not None:  # the model's own values, where the shard is away
                self._account(fragment)
        return begins

    async def _step(self) -> None:
        """One inner step, and its boundary."""
        takes_s = self._step_s * self._random.uniform(0.8, 1.2)
        due = self._cluster.timeline.now + takes_s
        self._tokens, self._ahead = self._random.randint(1, TOKENS_MAX), 0
        await asyncio.sleep(takes_s)
        while (hangs_s := self.hung_until - self._cluster.timeline.now) > 0:
            due = self.hung_until
            await asyncio.sleep(hangs_s)
        invariants.steps_keep_their_pace(self._cluster.timeline.now, max(due, self._thawed_at))
        self.model.train_on(self._tokens - self._ahead)
        tokens, self._tokens, self._ahead = self._tokens, 0, 0
        self.learner.step(tokens)
        self._check()
        core = self.learner.core
        assert core is not None
        if self._random.random() < SAVES:
            saved = Checkpoint(self.model.flat.clone(), core.inner_step, core.tokens)
            self._cluster.checkpoints[self.learner_id].append(saved)

    def _during_a_read(self, read: Tensor) -> None:
        """A snapshot is being taken, at a step boundary, or by the codec thread while the training goes on."""
        if self._tokens and not self._ahead and self._random.random() < TORN:
            self.model.train_on(self._tokens)
            self._ahead = self._tokens
        if self.not_finite:
            self.not_finite -= 1
            self.poisoned += 1
            read[0] = float("nan")

    # ------------------------------------------------------------ what must hold

    def _watch(self, act: Act) -> None:
        """What the product says that it did to a fragment."""
        match act:
            case PushContribution():
                contribution = act.contribution
                fragment = self.learner.core.fragments[contribution.fragment_id]  # type: ignore[union-attr]
                if fragment.fragment.kind == "buffer":
                    return
                self.unresolved[contribution.fragment_id] = contribution
                if contribution not in self._taken:
                    self._taken[contribution] = Taken(self._unmerged(fragment))
            case VersionApplied():
                fragment = self.learner.core.fragments[act.fragment_id]  # type: ignore[union-attr]
                if fragment.fragment.kind == "buffer":
                    return
                account = self._account(fragment)
                self._measure(account, fragment)
                if self._options.on_commit != "carry":  # what was trained is gone
                    account.base = part_of(self.model.trained, fragment.fragment)
                if act.contribution is not None and act.fate is not Fate.CARRIED:
                    self._merged(act.fragment_id, act.contribution)

    def _merged(self, fragment_id: int, contribution: Contribution) -> None:
        account, tensors = self._accounts[fragment_id], contribution.tensors
        if self._options.on_commit == "carry" and tensors.snapshot is not None:
            account.merged = account.merged - tensors.snapshot
        lost = self._taken[contribution].lost
        if lost is None and tensors.loss is not None:  # encoded, and forgotten before it was sent
            lost = tensors.loss.clone()
        account.lost = lost

    def _pushing(self, header: PushHeader, payload: Payload) -> None:
        """A contribution leaves the process: is it what was trained?"""
        contribution = self.unresolved.get(header.fragment_id)
        if header.is_seed or header.not_finite or contribution is None or contribution.round != header.round:
            return
        fragment_id, tensors, taken = header.fragment_id, contribution.tensors, self._taken[contribution]
        invariants.steps_fit_tokens(self.name, fragment_id, header.steps, header.tokens, TOKENS_MAX)
        assert tensors.snapshot is not None
        meant = tensors.snapshot.float()
        fragment = self.learner.core.fragments[fragment_id]  # type: ignore[union-attr]
        if self._options.on_commit == "carry":
            high = self._unmerged(fragment) if fragment.contribution is contribution else None
            if high is not None:
                invariants.contribution_is_what_was_trained(
                    self.name, fragment_id, meant, taken.low, high, self._accounts[fragment_id].largest
                )
        account = self._accounts[fragment_id]
        if self._options.error_feedback and taken.lost is None:
            lost_before = account.lost if account.lost is not None else torch.zeros_like(meant)
            taken.lost = torch.zeros_like(meant) if tensors.loss is None else tensors.loss.float()
            if fragment.fragment.traits.feeds_back:
                decoded = torch.empty_like(meant)
                decode_payload(payload, decoded)
                residual = decoded + taken.lost - meant
                invariants.error_feedback_is_whole(self.name, fragment_id, residual, lost_before, account.largest)

    def _push_answered(self, header: PushHeader, code: str) -> None:
        now, of = self._cluster.timeline.now, (header.fragment_id, header.round)
        if code != Busy.code:
            self._busy_since.pop(of, None)
        elif self._options.hostile:
            busy_s = now - self._busy_since.setdefault(of, now)
            at_most_s = BUSY_LEASES * self._options.lease_s + BUSY_S
            invariants.honest_pushes_find_a_place(self.name, header.fragment_id, busy_s, at_most_s)

    def _check(self) -> None:
        """After a step boundary."""
        core = self.learner.core
        assert core is not None
        self._refused = refused_since(self._refused, self.learner)
        for contribution, steps in self._refused.items():
            invariants.refusals_are_heard(self.name, contribution.fragment_id, steps)
        for fragment in self._fragments():
            pending = self.unresolved.get(fragment.fragment.fragment_id)
            if pending is not None and fragment.contribution is not pending:
                del self.unresolved[fragment.fragment.fragment_id]
                self._taken.pop(pending, None)
            if fragment.tensors.anchor is not None and self._options.on_commit != "blend":
                theta, unmerged = part_of(self.model.flat, fragment.fragment), self._unmerged(fragment)
                account, anchor = self._account(fragment), fragment.tensors.anchor.float()
                self._measure(account, fragment)
                invariants.progress_is_kept(
                    self.name, fragment.fragment.fragment_id, theta, anchor, unmerged, account.largest
                )

    @staticmethod
    def _measure(account: Account, fragment: LearnerFragment) -> None:
        if (anchor := fragment.tensors.anchor) is not None:
            account.largest = max(account.largest, float(anchor.float().abs().max()))

    def _unmerged(self, fragment: LearnerFragment) -> Tensor:
        """What was trained and is in no version, as far as the learner knows."""
        account = self._account(fragment)
        return part_of(self.model.trained, fragment.fragment) - account.base - account.merged

    def _account(self, fragment: LearnerFragment) -> Account:
        fragment_id = fragment.fragment.fragment_id
        if fragment_id not in self._accounts:
            base = part_of(self.model.trained, fragment.fragment)
            self._accounts[fragment_id] = Account(base, torch.zeros_like(base))
        return self._accounts[fragment_id]

    # ------------------------------------------------------------ for the cluster

    def thaw(self) -> None:
        self._thawed_at = self._cluster.timeline.now
        self.process.thaw()

    def _fragments(self) -> list[LearnerFragment]:
        """Those whose values count tokens."""
        fragments = self.learner.core.fragments.values() if self.learner.core is not None else ()
        return [f for f in fragments if f.fragment.kind != "buffer"]

    def _hear_error(self, what: str, facts: dict[str, object]) -> None:
        error = facts.get("trace")
        if isinstance(error, BaseException) and self.process.alive:
            self._cluster.timeline.fail(error)
