"""One learner of the product in a simulated process, with a training loop around it.

The loop trains a model whose values count tokens. So the product's effect on them can be followed from the outside: by
the acts at step boundaries, by the pushes, and by the values themselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload
from diloco_common.errors import Busy, DilocoError
from diloco_common.wire.calls import AGAIN_S
from diloco_common.wire.messages import PushHeader
from diloco_simulator.followed import FollowedRun, Trainer
from diloco_simulator.lies import Spoiler
from diloco_simulator.reader_processes import SITE
from diloco_simulator.verify import invariants
from diloco_simulator.world.stage import Checkpoint, Counting, Stage, TornReplica, part_of
from diloco_simulator.world.transport import MemoryTransport
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Act, PushContribution, VersionApplied
from diloco_worker.core.fragment import Fate, LearnerFragment, PendingContribution
from diloco_worker.learner import make_learner
from diloco_worker.shell.boundary import Start

TOKENS_MAX = 4
"""Maximum number of tokens of a step; the minimum is one."""
SAVES = 0.5
"""Share of steps that end with a checkpoint."""
BUSY_LEASES = 2.0
"""A push beside hostile learners may be answered BUSY for at most this many times the lease time plus a second."""


@dataclass(eq=False)
class Taken:
    low: Tensor
    """The minimum that it holds: what was trained until the step boundary, and not merged."""
    lost: Tensor | None = None
    """Its encoding error. Set by the first push."""
    leaves: Payload | None = None
    """What really leaves the process, if the learner is sick. Set by the first push."""


class LearnerProcess(Trainer, FollowedRun):
    def __init__(self, cluster: Stage, learner_id: str, flat: Tensor, start: Start) -> None:
        Trainer.__init__(self, cluster, learner_id)
        FollowedRun.__init__(self, cluster, self.process, self.name)
        options = self._options
        self.is_warned = False
        """Whether it must hand over its work and leave."""
        self.model = Counting(flat, has_buffer=options.has_buffer)
        self._thawed_at = 0.0
        self._taken: dict[PendingContribution, Taken] = {}
        sickness = options.sickness
        is_ever_sick = sickness is not None and cluster.learner_ids[sickness.learner] == learner_id
        self._spoiler = Spoiler(sickness, self.name) if sickness is not None and is_ever_sick else None
        self._busy_since: dict[tuple[int, int], float] = {}  # fragment and round -> time of the first BUSY in a row
        caller = Caller("local", learner_id, self.name, born=self.process.clock())
        telemetry = self._telemetry(caller, cluster.history_of(learner_id))
        replica = TornReplica(self.model, self._during_a_read, has_companion=options.companions_every > 0)
        self.learner = make_learner(
            replica, [str(i) for i in range(options.shards)], caller, self._dial,
            self.process.world(), self, telemetry, start, site=SITE if options.mirrors else "",
        )  # fmt: skip
        self.process.start(self._live(), self.name)

    def _dial(self, address: str) -> MemoryTransport:
        path = self.learner_id, int(address)
        return MemoryTransport(
            self.stage.network, self.process, path, self._pushing, self._push_answered, self._options.call_s,
            self._leaving,
        )  # fmt: skip

    # ------------------------------------------------------------ the training loop

    async def _live(self) -> None:
        try:
            self.learner.start()
            while not self.begins():  # noqa: ASYNC110 - as `join` asks in production
                await asyncio.sleep(AGAIN_S)
            self.state = "training"
            while not (self.learner.done or self.is_warned):
                await self._step()
            self.state = "leaving"
            if self.is_warned:
                await self._hand_over()
            await self.leave()
            self.state = "left" if self.is_warned else "done"
        except DilocoError as error:
            self.error, self.state = error, "failed"

    async def _hand_over(self) -> None:
        """Hand over its work, as `Learner.leave` does."""
        began = self.stage.timeline.now
        while True:
            self.learner.poll()
            self._check()
            is_over, missing = self.learner.hand_over(self.stage.timeline.now - began, None)
            if is_over:
                break
            await asyncio.sleep(AGAIN_S)
        self.stage.counts["left with everything merged" if not missing else "left with something"] += 1

    async def _step(self) -> None:
        takes_s = self._step_s * self._random.uniform(0.8, 1.2)
        due = self.stage.timeline.now + takes_s
        tokens = self._random.randint(1, TOKENS_MAX)
        await asyncio.sleep(takes_s)
        due = await self._hang(due)
        invariants.steps_keep_their_pace(self.stage.timeline.now, max(due, self._thawed_at))
        self.model.train_on(tokens)
        self.learner.step(tokens)
        self._check()
        core = self.learner.core
        assert core is not None
        if self._random.random() < SAVES:
            saved = Checkpoint(self.model.flat.clone(), core.inner_step, core.tokens)
            self.stage.checkpoints[self.learner_id].append(saved)

    def _during_a_read(self, read: Tensor) -> None:
        """A snapshot is being taken at a step boundary."""
        if self.not_finite:
            self.not_finite -= 1
            self.poisoned += 1
            read[0] = float("nan")

    # ------------------------------------------------------------ what must hold

    def _watch(self, act: Act) -> None:
        """Follow an act of the product on a fragment."""
        match act:
            case PushContribution():
                contribution = act.contribution
                fragment = self.learner.core.fragments[contribution.fragment_id]
                if fragment.fragment.kind == "buffer":
                    return
                if contribution not in self._taken:
                    self._taken[contribution] = Taken(self._unmerged(fragment))
            case VersionApplied():
                fragment = self.learner.core.fragments[act.fragment_id]
                if fragment.fragment.kind == "buffer":
                    return
                account = self._account(fragment)
                self._measure(account, fragment)
                if act.contribution is not None and act.fate is not Fate.CARRIED:
                    self._merged(act.fragment_id, act.contribution)

    def _merged(self, fragment_id: int, contribution: PendingContribution) -> None:
        account, tensors = self._accounts[fragment_id], contribution.tensors
        if tensors.snapshot is not None:
            account.merged = account.merged - tensors.snapshot
        lost = self._taken[contribution].lost
        if lost is None and tensors.loss is not None:  # encoded, but forgotten before it was sent
            lost = tensors.loss.clone()
        account.lost = lost

    def _pushing(self, header: PushHeader, payload: Payload) -> None:
        """Check that a contribution that leaves the process is what was trained."""
        contribution = self.unresolved.get(header.fragment_id)
        if header.is_seed or header.not_finite or contribution is None or contribution.round != header.round:
            return
        fragment_id, tensors, taken = header.fragment_id, contribution.tensors, self._taken[contribution]
        invariants.steps_fit_tokens(self.name, fragment_id, header.steps, header.tokens, TOKENS_MAX)
        assert tensors.snapshot is not None
        meant = tensors.snapshot.float()
        fragment = self.learner.core.fragments[fragment_id]
        high = self._unmerged(fragment) if fragment.contribution is contribution else None
        if high is not None:
            invariants.contribution_is_what_was_trained(
                self.name, fragment_id, meant, taken.low, high, self._accounts[fragment_id].largest
            )
        account = self._accounts[fragment_id]
        if taken.lost is None:
            lost_before = account.lost if account.lost is not None else torch.zeros_like(meant)
            taken.lost = torch.zeros_like(meant) if tensors.loss is None else tensors.loss.float()
            if fragment.fragment.traits.feeds_back:
                decoded = torch.empty_like(meant)
                decode_payload(payload, decoded)
                invariants.error_feedback_is_whole(
                    self.name, fragment_id, decoded + taken.lost - meant, lost_before, taken.lost, account.largest
                )

    def _leaving(self, header: PushHeader, payload: Payload) -> tuple[PushHeader, Payload]:
        """What leaves the process. A retry sends the same bytes again, or it would be another contribution."""
        contribution = self.unresolved.get(header.fragment_id)
        is_seed = header.is_seed or header.not_finite or contribution is None or contribution.round != header.round
        if self._spoiler is None or contribution is None or is_seed:
            return header, payload
        taken = self._taken[contribution]
        if taken.leaves is None:
            taken.leaves = self._spoiler.leaving(header.fragment_id, payload, self.stage.timeline.now)
        return replace(header, payload=taken.leaves.header), taken.leaves

    def _push_answered(self, header: PushHeader, code: str) -> None:
        now, of = self.stage.timeline.now, (header.fragment_id, header.round)
        if code != Busy.code:
            self._busy_since.pop(of, None)
        elif self._options.hostile:
            busy_s = now - self._busy_since.setdefault(of, now)
            at_most_s = BUSY_LEASES * (self._options.lease_s + 1.0)
            invariants.honest_pushes_find_a_place(self.name, header.fragment_id, busy_s, at_most_s)

    def _check(self) -> None:
        """Checks after a step boundary."""
        core = self.learner.core
        assert core is not None
        self._check_refusals()
        under_way = self.unresolved.values()
        self._taken = {c: taken for c, taken in self._taken.items() if c in under_way}
        for fragment in self._fragments():
            if fragment.tensors.anchor is not None:
                theta, unmerged = part_of(self.model.flat, fragment.fragment), self._unmerged(fragment)
                account, anchor = self._account(fragment), fragment.tensors.anchor.float()
                self._measure(account, fragment)
                invariants.progress_is_kept(
                    self.name, fragment.fragment.fragment_id, theta, anchor, unmerged, account.largest
                )

    def _trained(self, fragment: LearnerFragment) -> Tensor:
        return part_of(self.model.trained, fragment.fragment)

    # ------------------------------------------------------------ for the cluster

    def thaw(self) -> None:
        self._thawed_at = self.stage.timeline.now
        super().thaw()
