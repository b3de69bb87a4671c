"""One shard of the product in a simulated process: its host, service and store, unchanged, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from diloco_common.errors import NothingIntact
from diloco_common.settings import OVERLAP_STEPS
from diloco_common.wire.calls import LONG_S, NOTICE_S
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member
from diloco_server.core.patience import OVERDUE, SLACK
from diloco_server.core.round import Round
from diloco_server.core.shard import Shard
from diloco_server.shell.host import ShardHost
from diloco_server.shell.service import Service
from diloco_server.storage.store import FileStore, MemoryStore, Store
from diloco_server.storage.version_file import Origin
from diloco_simulator.verify import invariants
from diloco_simulator.world.disk import Crashed, ShardDisk
from diloco_simulator.world.process import SimulatedProcess
from diloco_simulator.world.stage import QuietLog, Stage, StageSilence

EPOCH_OF_A_NEW_FOLDER = 1000
DRAIN_S = 1.0


class ShardProcess:
    """A process that serves one shard, from a disk, or from memory that is lost with it."""

    def __init__(self, cluster: Stage, index: int, disk: ShardDisk | None) -> None:
        self.index = index
        self.name = f"shard-{index}"
        self.host: ShardHost | None = None
        """None until the shard's epoch has begun."""
        self.is_serving = False
        self._cluster = cluster
        self._options = options = cluster.options
        self._disk = disk
        self.process = SimulatedProcess(
            cluster.timeline, self.name, cluster.seed_of(self.name), self._takes_s, stutters=options.stutters / 10
        )
        self._waits = Waits()
        self._can_since: dict[tuple[Any, ...], float] = {}
        """Something that a round can do -> the time since when it can."""
        self._before_freeze: list[tuple[str, int, float]] = []
        """Learner, generation and remaining lease time at the last freeze."""
        self._thawed_at = 0.0
        self.process.start(self._run(options.settings[index]), self.name)

    async def _run(self, settings: Any) -> None:
        store = self._open(settings)
        if store is None:
            self._cluster.crash_shard(self.index, noticed=True, back_after_s=self._options.look_every_s)
            return
        history = self._cluster.history_of(self.name)
        log: Any = QuietLog(self.name, self._hear_error)
        silence: Any = StageSilence()
        self.host = host = ShardHost(
            settings, store, self.process.world(), metrics=silence, log=log, history=history,
            tick_s=self._options.tick_s,
        )  # fmt: skip
        if self._options.forgets:
            host.shard.membership.max_gone = 0
        try:
            await host.recover()
        except NothingIntact as error:
            assert self._disk is not None
            invariants.damage_has_a_cause(str(error), was_hurt=bool(self._disk.hurt))
            self._disk.remove_named(error)
            self._cluster.crash_shard(self.index, noticed=True, back_after_s=self._options.look_every_s)
            return
        self._cluster.begins(self.index)
        self.is_serving = True
        self._cluster.network.serving[self.index] = self.process, Service(host)
        await host.run()

    def _open(self, settings: Any) -> Store | None:
        """Begin an epoch. None: the disk refuses, or the power fails."""
        if self._disk is None:
            return MemoryStore(self.process.random.randrange(1, 2**31))
        self._disk.plan_interruption()
        try:
            unknown = EPOCH_OF_A_NEW_FOLDER + int(1000 * self._cluster.timeline.now)
            return FileStore(self._disk.fake, Origin.of(settings), first_epoch=unknown)
        except Crashed:
            self._disk.fake.crash()
            return None
        except OSError:
            return None
        finally:
            self._disk.fake.crash_at = None

    def drain(self, ended: Callable[[], None]) -> None:
        """End as on SIGTERM: finish work in progress, then call `ended`."""

        async def end() -> None:
            if self.host is not None:
                await self.host.drain(DRAIN_S)
                self.host.close()
            ended()

        self.process.start(end(), "drain")

    def kill(self, *, power: bool) -> None:
        """End the process, and perhaps its machine, at once."""
        self.process.kill()
        if self._disk is not None:
            writes = [job for t in self.process.threads if t.name == "diloco-storage" for job in t.under_way]
            self._disk.cut_off(writes, power=power)

    def freeze(self) -> None:
        if self.host is not None and not self.process.frozen:
            now = self._cluster.timeline.now - getattr(self.host.clock, "_asleep_s", 0.0)
            spare_s = self._options.heartbeat_s + 2 * self._options.tick_s  # the shard does not notice so short a sleep
            self._before_freeze = [
                (m.learner_id, m.generation, m.last_heard + self._options.lease_s - now - spare_s)
                for m in self.host.shard.membership.live()
            ]
        self.process.freeze()

    def thaw(self) -> None:
        self._thawed_at = self._cluster.timeline.now
        self.process.thaw()

    def check(self) -> None:
        host = self.host
        if host is None or self.process.frozen or not self.process.alive:
            return
        now = host.clock()
        self._check_window(host)
        could, self._can_since = self._can_since, {}
        for state in host.shard.fragments.values():
            collecting = state.round
            if collecting is None:
                continue
            for can, at_most_s in self._can(host, state, collecting):
                since = self._can_since.setdefault(can, could.get(can, now))
                invariants.no_round_stands_still(state, str(can[3:]), now - since, at_most_s)
            invariants.rounds_make_the_next_version(state, collecting)
            invariants.rounds_are_bounded(state, collecting, self._options.learners_max)
            invariants.halves_are_bounded(state, collecting)
            invariants.contributions_are_whole(state, collecting)
            if collecting.quorum_at is not None:
                waits_s = self._waits.of(host.shard, state, collecting)
                invariants.nobody_delays_a_round_beyond_its_grace(
                    state, collecting, host.shard.rounds.patience.quorum(collecting), now - collecting.quorum_at,
                    waits_s + self._options.tick_s,
                )  # fmt: skip

    def _can(self, host: ShardHost, state: FragmentState, collecting: Round) -> Iterator[tuple[tuple[Any, ...], float]]:
        """Things that an open round can do, each with the state it depends on, and the time within which to do it."""
        live = {m.learner_id: m for m in host.shard.membership.live()}
        held, name = collecting.contributions, (state.fragment.fragment_id, collecting.round, collecting.opened_at)
        expected = {i for i, g in collecting.asked.items() if i in live and live[i].generation == g}
        expected -= held.keys() | collecting.refused
        there, enough = invariants.towards_its_quorum(collecting, host.shard.rounds.patience.quorum(collecting))
        soon_s = 2 * self._options.tick_s + self._options.look_every_s
        if not expected:
            yield (*name, "nobody is expected any more", *sorted(held)), soon_s
        elif there >= enough:
            yield (*name, "it has its quorum"), self._waits.of(host.shard, state, collecting) + soon_s
        else:
            for i in live.keys() - expected - held.keys():
                if live[i].takes_part(state.fragment.fragment_id) and live[i].first_step is not None:
                    can = (*name, f"{i} can be asked", live[i].generation, live[i].asked)
                    yield can, self._options.lease_s + soon_s

    def lost(self, learner_id: str, generation: int) -> None:
        """A lease has run out: check that no freeze took its remaining time."""
        since_s = self._cluster.timeline.now - self._thawed_at
        for other_id, other, left_s in self._before_freeze:
            if (other_id, other) == (learner_id, generation):
                invariants.nobody_is_lost_to_a_freeze(learner_id, left_s, since_s)

    def _check_window(self, host: ShardHost) -> None:
        options, sync = self._options, self._options.settings[0].sync
        at_most_s = options.grace
        if at_most_s == "adaptive":
            slowest_s = max((m.reports.step_time_s for m in host.shard.membership.live() if m.reports), default=0.0)
            steps = 2.5 * max(sync.first_every, OVERLAP_STEPS)  # patience, and a margin for steps of uneven length
            at_most_s = slowest_s * steps
        invariants.windows_are_as_set(host.shard.rounds.patience.grace_s(), at_most_s)

    def _takes_s(self, threads: str) -> float:
        match threads:
            case "diloco-compute":
                return self._options.compute_s
            case "diloco-storage":
                return self._options.save_s
        return 0.0

    def _hear_error(self, what: str, facts: dict[str, Any]) -> None:
        """The shard logs an error: check that it has a cause."""
        match facts.get("code"):
            case "VERSION_DAMAGED":
                was_hurt = self._disk is not None and self._disk.was_hurt
                invariants.damage_has_a_cause(f"{what}: {facts.get('why')}", was_hurt=was_hurt)
            case "STORAGE":
                self._cluster.counts["saves refused"] += 1
        if (error := facts.get("trace")) is not None and self.process.alive:
            self._cluster.timeline.fail(error)


class Waits:
    """The wait limits of one shard's rounds."""

    def __init__(self) -> None:
        self._grace_s = 0.0
        """The longest window so far."""
        self._step_s: dict[str, float] = defaultdict(float)
        """The longest step so far, by learner."""
        self._longest_s: dict[int, tuple[float, float]] = {}
        """Fragment -> when its round was opened, and how long it may wait."""
        self._overdue: dict[tuple[str, int], tuple[Member, int, int]] = {}
        """Learner and fragment -> the member, the last round that waited for it while overdue, and its step then."""

    def of(self, shard: Shard, state: FragmentState, collecting: Round) -> float:
        """Longest wait in seconds: the grace window; if a learner sends its last work, also the time for that; for an
        overdue learner, until its next step ends. Raises Violation."""
        self._grace_s = max(self._grace_s, shard.rounds.patience.grace_s())
        waits_s = self._grace_s
        if collecting.last_of.intersection(collecting.missing):
            waits_s += NOTICE_S
        for learner_id in collecting.missing:
            member = shard.membership.get(learner_id)
            if member is not None and member.reports is not None:
                self._step_s[learner_id] = max(self._step_s[learner_id], member.reports.step_s)
                if self._is_overdue(shard, state, collecting, member):
                    waits_s = max(waits_s, min((1 + 2 * SLACK) * self._step_s[learner_id], LONG_S))
        fragment_id = state.fragment.fragment_id
        opened_at, longest_s = self._longest_s.get(fragment_id, (-1.0, 0.0))
        if opened_at == collecting.opened_at:
            waits_s = max(waits_s, longest_s)
        self._longest_s[fragment_id] = collecting.opened_at, waits_s
        return waits_s

    def _is_overdue(self, shard: Shard, state: FragmentState, collecting: Round, member: Member) -> bool:
        fragment, sync = state.fragment, shard.settings.sync
        waits_in, step = member.waited_for.get(fragment.fragment_id, (0, 0))
        if waits_in != collecting.round:
            return False
        before, in_round, since = self._overdue.get((member.learner_id, fragment.fragment_id), (None, 0, 0))
        if before is member and in_round != waits_in:
            at_least = OVERDUE * sync.first_every * fragment.traits.times(sync)
            invariants.nobody_is_waited_for_again_and_again(state, member.learner_id, step - since, at_least)
        self._overdue[member.learner_id, fragment.fragment_id] = member, waits_in, step
        return True
