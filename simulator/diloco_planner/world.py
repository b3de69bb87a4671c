"""Production cores in simulated time: only steps, pushes, merges and pulls take time.

`PlannedWorld.run` goes from event to event. Inner steps between two events are taken at once. Shards tick after each
event, as in production, and while a round waits.

Of P equal fragments, only as many are simulated as the budget of events allows (`decided`), evenly spread over H. Each
is as large as in the run, and keeps a link as busy as all the fragments that it stands for.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from diloco_common.codec import num_payload_bytes
from diloco_common.errors import Refusal
from diloco_common.settings import LeaseSettings, RunSettings, Settings, ShardSettings
from diloco_common.wire.calls import NOTICE_S
from diloco_common.wire.messages import (
    PROTOCOL,
    Collect,
    Committed,
    Directive,
    Evicted,
    JoinRequest,
    LearnerPolicy,
    Progress,
    PushAnswer,
    PushHeader,
)  # fmt: skip
from diloco_planner.chips import uptime
from diloco_planner.plans import (
    CONTRIBUTIONS_MAX,
    LearnerPlan,
    RunOutcome,
    ShardPlan,
    decided_fragments,
)
from diloco_planner.weightless import (
    NO_BYTES,
    NOTHING,
    PUBLISHED,
    Headers,
    advance,
    learner_core,
    manifest_of,
    seeded_shard,
)  # fmt: skip
from diloco_server.core.effects import MergeRound, Tell, TellAll
from diloco_server.core.membership import Member
from diloco_worker.core.fragment import Lease, PendingContribution

TICKS_PER_STEP = 8
"""Ticks of the shard while a round waits. In production there is one every 20 ms."""


class PlannedWorld:
    """One run. Times are in seconds since its beginning."""

    def __init__(
        self, settings: Settings, params: float, learners: Sequence[LearnerPlan], shards: ShardPlan, until: float,
        seed: int, *, decided: int | None = None,
    ) -> None:  # fmt: skip
        sync = settings.sync
        self.shortest_s = step_s = min(plan.step_s for plan in learners)
        contributions = until / step_s / sync.first_every * sync.fragments * len(learners)
        self.decided = decided or decided_fragments(sync.fragments, contributions)
        self.stands_for = sync.fragments / self.decided
        self.stride = max(1, sync.first_every // self.decided) if self.decided < sync.fragments else 1
        lease = settings.lease
        if self.stride * step_s > lease.heartbeat_s or until / lease.heartbeat_s * len(learners) > CONTRIBUTIONS_MAX:
            beat = max(lease.heartbeat_s, 10.0, self.stride * step_s)
            lease = LeaseSettings(lease_s=3 * beat, heartbeat_s=beat)
        most = max(settings.shard.max_learners, 2 * len(learners))
        self.settings = settings.model_copy(update={
            "sync": sync.model_copy(update={"fragments": self.decided}), "lease": lease,
            "run": RunSettings(tokens=0), "shard": ShardSettings(max_learners=2 * most),
        })  # fmt: skip
        self.elements = max(1, round(params / sync.fragments))
        self.manifest = manifest_of(self.elements, self.decided)
        self.plan, self.until, self.now = shards, until, 0.0
        self.headers = Headers(self.manifest, sync.push)
        self.pull_bytes = num_payload_bytes(sync.pull, self.elements)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._ticking = False
        alike = [m for m in range(1, self.decided + 1) if self.decided % m == 0 and m <= (shards.count or 0)]
        self._free = [0.0] * max(alike, default=0)  # when each machine of a shard is
        self._merging_s = 0.0
        self.shard = seeded_shard(self.settings, self.manifest)
        self.learners = [PlannedLearner(self, plan, plan.chance(seed)) for plan in learners]
        self._by_name = {learner.plan.name: learner for learner in self.learners}

    # ------------------------------------------------------------ time

    def at(self, when: float, act: Callable[[], None]) -> None:
        if when <= self.until:
            self._count += 1
            heapq.heappush(self._events, (when, self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, told: Callable[[float], None] | None = None) -> RunOutcome:
        """`told` is called now and then with the time."""
        for learner in self.learners:
            learner.begin()
        handled = 0
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
            handled += 1
            if told is not None:
                told(self.now)
        return self._outcome(handled)

    def all_report(self) -> None:
        """One learner reaches a boundary: let the others report their progress."""
        for learner in self.learners:
            learner.catch_up()

    # ------------------------------------------------------------ the shard

    def touched(self) -> None:
        """The core was told something: carry out what it asks for, and let it decide again now."""
        self._carry_out()
        if not self._ticking:
            self._ticking = True
            self.at(self.now, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.shard.tick(self.now)
        self._carry_out()
        collecting = self.shard.versions.phases.collecting.values()
        if any(state.round is not None and state.round.contributions for state in collecting):
            self._ticking = True
            self.after(self.shortest_s / TICKS_PER_STEP, self._tick)

    def _carry_out(self) -> None:
        for effect in self.shard.take_effects():
            match effect:
                case Tell(learner_id, generation, directive):
                    self._tell(learner_id, generation, directive)
                case TellAll(members, directive):
                    for member in members:
                        self._tell(member.learner_id, member.generation, directive)
                case MergeRound():
                    self.at(self._merged_at(effect), partial(self._commit, effect))
                case _:
                    pass  # a fact: the ledger has it

    def _merged_at(self, merge: MergeRound) -> float:
        """When the version is ready. A machine is busy until all contributors have pulled it, or it is written."""
        many, written_s = len(merge.contributions), 8.0 * self.elements / self.plan.disk_bytes_s
        merged_s = (many * self.headers.num_bytes + self.pull_bytes) / self.plan.merge_bytes_s
        if self.plan.count is None:
            return self.now + merged_s + written_s
        pulled_s = (many - 1) * self.pull_bytes / self.plan.merge_bytes_s
        machine = merge.fragment_id % len(self._free)
        begins, busy_s = max(self.now, self._free[machine]), max(merged_s + pulled_s, written_s) * self.stands_for
        self._free[machine] = begins + busy_s * len(self._free) / self.plan.count  # it stands for some of them
        self._merging_s += busy_s
        return begins + merged_s + written_s

    def _tell(self, learner_id: str, generation: int, directive: Directive) -> None:
        learner = self._by_name[learner_id]
        self.after(learner.plan.to_shards.round_trip_s / 2, partial(learner.hear, generation, directive))

    def _commit(self, merge: MergeRound) -> None:
        self.shard.committed(self.shard.versions.next_record(merge.fragment_id), PUBLISHED, self.now)
        self.touched()

    # ------------------------------------------------------------ what it came to

    def _outcome(self, handled: int) -> RunOutcome:
        ended, ledger = self.until, self.shard.ledger
        paces = [one.plan.tokens_per_step * ended / one.plan.step_s for one in self.learners]
        trained = sum(pace * one.line.computed for pace, one in zip(paces, self.learners, strict=True))
        computing = sum(one.line.work_at(ended) for one in self.learners)
        up, down = (sum(getattr(one, way) for one in self.learners) * self.stands_for for way in ("sent", "taken"))
        return RunOutcome(
            hours=ended / 3600,
            goodput=trained / sum(paces),
            uptime=uptime([one.line for one in self.learners], ended),
            rounds=round(ledger.rounds * self.stands_for),
            participants_mean=ledger.participants / ledger.rounds if ledger.rounds else 0.0,
            tokens_share_merged=ledger.tokens_merged / self.decided / trained if trained else 0.0,
            gbit_per_learner_up=8e-9 * up / computing if computing else 0.0,
            gbit_per_learner_down=8e-9 * down / computing if computing else 0.0,
            late_share=ledger.late / (ledger.late + ledger.accepted) if ledger.accepted else 0.0,
            shards_busy=self._merging_s / (self.plan.count * ended) if self.plan.count else 0.0,
            evictions=ledger.evictions.total(),
            joins=ledger.joins,
            events=handled,
            decided=self.decided,
        )  # fmt: skip


class PlannedPush(NamedTuple):
    """A push on its way."""

    member: Member
    process: int
    """Number of the process that sent it."""
    contribution: PendingContribution
    header: PushHeader
    norms: tuple[float, ...]


class PlannedLearner:
    """One learner: its core, its lease, its links. Its timeline and its pace say when steps happen."""

    def __init__(self, world: PlannedWorld, plan: LearnerPlan, chance: random.Random) -> None:
        self.world, self.plan, self._chance = world, plan, chance
        self.line = plan.drawn(world.until, chance)
        sync = world.settings.sync
        self._policy = LearnerPolicy(sync.first_every, sync.push, sync.pull)
        self._process = 0
        self._begun_step = self._end_step = 0
        self._begun_work = self._end_work = 0.0
        """The steps drawn so far: from, to, in seconds of work."""
        self._looked_at = -1
        self.member: Member | None = None
        self.sent = self.taken = self._reported_at = 0.0
        self._free_up = self._free_down = 0.0
        self._wanted: dict[int, int] = {}
        """Fragment -> version that it is pulling."""
        self._inbox: list[tuple[int, int, int, int, int]] = []
        self._is_away = self._is_leaving = False
        self._fresh()

    def _fresh(self) -> None:
        """Start a new process."""
        self._process += 1
        self.core = learner_core(self.world.manifest, self._policy)
        self._steps_from, self._tokens_from = 0, 0
        self._wanted.clear()
        self._inbox.clear()

    # ------------------------------------------------------------ steps

    def _draw(self) -> None:
        """Draw the next steps together: where they begin and end, in seconds of work."""
        self._begun_step, self._begun_work = self._end_step, self._end_work
        noise = self.plan.noise * self.plan.step_s
        steps = self.world.stride if noise == 0 else 1
        work = steps * self.plan.step_s + (noise * self._chance.gauss(0, 1) if noise else 0.0)
        self._end_step += steps
        self._end_work += max(work, 0.05 * self.plan.step_s)

    def _drawn_steps(self) -> tuple[float, float]:
        """Seconds of work of each drawn step, and how many of them are over by now."""
        per_step = (self._end_work - self._begun_work) / (self._end_step - self._begun_step)
        return per_step, (self.line.work_at(self.world.now) - self._begun_work) / per_step

    def begin(self) -> None:
        self._draw()
        self.join()
        self.world.after(self._chance.random() * self.world.settings.lease.heartbeat_s, self._beat)
        self._schedule()
        for begun, ended, says_goodbye in self.line.away:
            if says_goodbye:
                self.world.at(begun, self._say_goodbye)
                begun = min(begun + NOTICE_S, ended)
            self.world.at(begun, self._go)
            self.world.at(ended, self._come_back)

    def _schedule(self) -> None:
        self.world.at(self.line.at_work(self._end_work), self._boundary)

    def _boundary(self) -> None:
        """The drawn steps are over."""
        if self.world.stride > 1:
            self.world.all_report()
        self._look(self._end_step, self._end_work)
        self._draw()
        self._schedule()

    def _between(self, step: int, work: float) -> None:
        if step > self._looked_at:
            self._look(step, work)

    def _look(self, step: int, work: float) -> None:
        """Handle a step boundary at which something may happen."""
        if self._is_away:
            return
        self._looked_at = step
        self._advance(step, work)
        inbox, self._inbox = self._inbox, []
        for fragment_id, version, epoch, merged, forgotten in inbox:
            self.core.arrived(fragment_id, version, epoch, NOTHING, merged, None, forgotten)
        self._report()
        for contribution in self.core.contribute():
            self._push(contribution)

    def _look_soon(self) -> None:
        """Schedule a look at the next step boundary."""
        steps = self._end_step - self._begun_step
        if self._is_away or steps < 2:
            return  # it is scheduled
        per_step, done = self._drawn_steps()
        ahead = max(1, math.ceil(done - 1e-9))
        if ahead < steps:
            work = self._begun_work + ahead * per_step
            self.world.at(self.line.at_work(work), partial(self._between, self._begun_step + ahead, work))

    def _look_now(self) -> None:
        """The learner has stopped: handle what came between two steps."""
        per_step, done = self._drawn_steps()
        self._look(self._begun_step + int(done + 1e-9), self._begun_work + done * per_step)

    # ------------------------------------------------------------ what it says

    def _report(self) -> None:
        if self.member is None:
            return
        last = self.core.last_rounds if self._is_leaving else None
        if last is not None and not last and not self.core.unmerged:
            self._go()
            return
        progress = Progress(self.core.inner_step, self.core.tokens, None, self.plan.step_s, last_rounds=last)
        self.world.shard.progress(self.member, progress, self.world.now)
        self._reported_at = self.world.now
        self.world.touched()

    def _beat(self) -> None:
        """If there is nothing else to say, report now and then."""
        every_s = self.world.settings.lease.heartbeat_s
        if not self._is_away:
            if self.member is None:
                self.join()
            elif self.world.now - self._reported_at > every_s / 2:
                self._report()
        self.world.after(every_s, self._beat)

    def join(self) -> None:
        shard, plan = self.world.shard, self.plan
        if self._is_away:
            return
        asking = JoinRequest(PROTOCOL, f"{plan.name}.{self._process}", self.world.manifest.tensors)
        self.member = shard.join(plan.name, asking, self.world.now)
        self.lease = Lease(shard.epoch, self.member.generation)
        self.core.rejoined([s.status(plan.name) for s in shard.fragments.values()], shard.epoch)
        self._wanted.clear()
        shard.attend(self.member)
        self._report()
        self.world.touched()

    def catch_up(self) -> None:
        """Report the steps that are over by now, since rounds count the progress at the moment they open."""
        steps = self._end_step - self._begun_step
        if self._is_away or self.member is None or steps < 2:
            return
        per_step, done = self._drawn_steps()
        taken = int(done + 1e-9)
        step = self._begun_step + taken
        if self._looked_at < step < self._end_step:
            self._advance(step, self._begun_work + taken * per_step)
            self._report()

    def _advance(self, step: int, work: float) -> None:
        tokens = round(self.line.trained_at(work) / self.plan.step_s * self.plan.tokens_per_step)
        advance(self.core, step - self._steps_from, tokens - self._tokens_from)

    def _say_goodbye(self) -> None:
        """It has stopped, and stays until all of its work is in versions."""
        if not self._is_away:
            self._is_leaving = True
            self._look_now()

    def _go(self) -> None:
        if self._is_leaving and self.member is not None:
            self.world.shard.leave(self.member)
            self.world.touched()
        self._is_away, self._is_leaving, self.member = True, False, None

    def _come_back(self) -> None:
        """Another process replaces it."""
        self._is_away = False
        self._fresh()
        work = self.line.work_at(self.world.now)
        self._steps_from = self._begun_step
        self._tokens_from = round(self.line.trained_at(work) / self.plan.step_s * self.plan.tokens_per_step)
        self.join()

    # ------------------------------------------------------------ what it hears

    def hear(self, generation: int, directive: Directive) -> None:
        if self.member is None or generation != self.member.generation:
            return
        match directive:
            case Collect():
                self.core.collect(directive, self.world.shard.epoch)
                self._look_now() if self._is_leaving else self._look_soon()
            case Committed():
                self._pull(directive.fragment_id)
            case Evicted():
                self.member = None
            case _:
                pass

    def _pull(self, fragment_id: int) -> None:
        if fragment_id in self._wanted:
            return
        state = self.world.shard.versions.owned(fragment_id)
        version, status = state.version, state.status(self.plan.name)
        self._wanted[fragment_id] = version
        took = 8 * self.world.pull_bytes / self.plan.to_shards.down
        begins = max(self.world.now, self._free_down) + self.plan.to_shards.round_trip_s
        self._free_down = begins + took * self.world.stands_for
        what = fragment_id, version, status.epoch, status.merged_version, status.forgotten_version
        self.world.at(begins + took, partial(self._pulled, self._process, what))

    def _pulled(self, process: int, what: tuple[int, int, int, int, int]) -> None:
        self.taken += self.world.pull_bytes
        if process != self._process or self._wanted.pop(what[0], None) is None:
            return
        self._inbox.append(what)
        if self._is_leaving:
            self._look_now()
        elif what[1] == 0:
            self._look_soon()
        if self.world.shard.versions.owned(what[0]).version > what[1]:
            self._pull(what[0])

    def _push(self, contribution: PendingContribution) -> None:
        if self.member is None or not contribution.begin_push(self.lease):
            return
        contribution.pushes.sending_values()
        header, norms = self.world.headers.of(contribution, self.world.elements)
        begins = max(self.world.now, self._free_up) + self.plan.to_shards.round_trip_s / 2
        self.world.at(
            begins, partial(self._arrives, PlannedPush(self.member, self._process, contribution, header, norms))
        )

    def _arrives(self, push: PlannedPush) -> None:
        """The header of a push is at the shard."""
        shard = self.world.shard
        if push.member is not self.member:
            return
        try:
            shard.check(push.member.learner_id, push.member.generation, self.lease.epoch)
            answer = shard.taking.admit(push.member, push.header, self.world.now)
        except Refusal:
            return
        if answer is not None:
            self._answer(push, answer)
            return
        took = 8 * push.header.payload.num_bytes / self.plan.to_shards.up
        self._free_up = max(self.world.now, self._free_up) + took * self.world.stands_for
        self.world.after(took, partial(self._lands, push))

    def _lands(self, push: PlannedPush) -> None:
        """All bytes of a push are at the shard."""
        self.sent += push.header.payload.num_bytes
        if push.member is not self.member:
            return
        try:
            answer = self.world.shard.taking.contribute(push.member, push.header, NO_BYTES, push.norms, self.world.now)
        except Refusal:
            return
        self._answer(push, answer)

    def _answer(self, push: PlannedPush, answer: PushAnswer) -> None:
        def heard() -> None:
            contribution = push.contribution
            if push.process == self._process:
                contribution.pushes.ended(self.lease, answer)
                self.core.answered(contribution.fragment_id, contribution.round, answer, contribution.tokens)

        self.world.after(self.plan.to_shards.round_trip_s / 2, heard)
        self.world.touched()
