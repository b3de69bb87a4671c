"""One schedule: the product's shards and learners, a network, faults; run until it is over, healed, and well again.

The processes run production code in virtual time. Their histories go to the judge that looks at real processes too
(`diloco_simulator.verify.judge`); what histories do not tell is checked while the schedule runs (`invariants.py`).
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco_common.errors import LeaseExpired
from diloco_common.observe.histories import Histories, gather
from diloco_common.observe.history import MemoryHistory
from diloco_common.wire.messages import Committed
from diloco_server.core.fragment import FragmentState
from diloco_simulator import invariants
from diloco_simulator.fairness import Fairness
from diloco_simulator.faults import Faults
from diloco_simulator.hostile_process import HostileProcess
from diloco_simulator.invariants import Violation
from diloco_simulator.island_process import RESTART_S, IslandProcess
from diloco_simulator.learner_process import Checkpoint, LearnerProcess
from diloco_simulator.model import PATTERN
from diloco_simulator.network import Network, Path
from diloco_simulator.options import Options, draw
from diloco_simulator.process import Process
from diloco_simulator.published import PublishedFormula
from diloco_simulator.shard_disk import ShardDisk
from diloco_simulator.shard_process import ShardProcess
from diloco_simulator.timeline import Timeline
from diloco_simulator.verify.judge import violations
from diloco_worker.shell.boundary import Start

TAIL = 60
OF_AN_EARLIER_RUN = 0.3
"""Share of the learners that find a checkpoint although they were never started in this schedule."""
TURNS_BEFORE_A_KILL = 60
"""A process that is killed at an await point runs up to so many more callbacks."""


@dataclass(frozen=True)
class Result:
    """What a schedule came to."""

    seed: int
    events: int
    virtual_s: float
    counts: dict[str, int]
    faults: dict[str, int]
    """By kind."""
    trace: str
    """sha256 over everything that happened: all histories, and all faults."""


class ScheduleFailed(Exception):
    """An invariant does not hold, or a promise is not kept. The message replays it."""

    def __init__(self, violation: Exception, options: Options, tail: Sequence[str]) -> None:
        self.violation = violation
        lines = [
            f"{options.name}: {type(violation).__name__} {violation}",
            f"options: {options}",
            f"the last {len(tail)} events:",
            *tail,
            f"replay: {_replay(options)}",
        ]
        super().__init__("\n".join(lines))


def _replay(options: Options) -> str:
    """What runs this schedule again. A test may have changed what the name draws."""
    if draw(options.name) == options:
        return f"python -m diloco_simulator --replay {options.name}"
    return f"run_schedule({options.name} with the options above)"


def run_schedule(options: Options) -> Result:
    """Raises ScheduleFailed."""
    collects = gc.isenabled()
    gc.disable()  # what a schedule leaves behind is collected at its end, or goes with the process
    try:
        cluster = Cluster(options)
        try:
            return cluster.run()
        except Exception as error:
            raise ScheduleFailed(cluster.broken_promise() or error, options, cluster.tail()) from error
        finally:
            cluster.bury()
    finally:
        if collects:
            gc.enable()


class Chronicle(MemoryHistory):
    """The history of one process, which the cluster follows while it is written."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(lambda: cluster.timeline.now)
        self.name = name
        self._cluster = cluster

    def write(self, what: str, **facts: Any) -> None:
        super().write(what, **facts)
        self._cluster.heard(self.name, what, facts)


class Cluster:
    """Everything of one schedule."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.timeline = Timeline()
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """What came about, for the report of a run."""
        self.network = Network(self.timeline, options, self.faults, self._said)
        self.learner_ids = tuple(f"w{i}" for i in range(options.learners))
        self.learners: list[LearnerProcess | IslandProcess] = []
        """Every process that was ever started."""
        self.shards: dict[int, ShardProcess] = {}
        """Those that were started last."""
        self._processes: list[Process] = []
        self.disks = {index: ShardDisk(index, options) for index, has in enumerate(options.disks) if has}
        self.starts: Counter[str] = Counter()
        """Of shards and learners, by name."""
        self.checkpoints: defaultdict[str, list[Checkpoint]] = defaultdict(list)
        """Learner -> what its processes have saved, oldest first."""
        self.healed = False
        self._is_buried = False
        self._chronicles: list[Chronicle] = []
        self._events: list[tuple[Any, ...]] = []
        self._announced: dict[invariants.Name, str] = {}  # -> checksum of its values
        self._excused: set[tuple[int, int]] = set()
        self._fragments: defaultdict[int, set[int]] = defaultdict(set)  # shard -> those it ever had a version of
        self._marks: dict[int, int] = {}  # fragment -> version when all had joined again
        self._to_resolve: list[Any] = []
        self._random = random.Random(f"cluster {options.seed}")
        for index in range(options.shards):
            self.start_shard(index)
        for learner_id in self.learner_ids:
            self.timeline.later(self._random.random() * options.starts_s, self.start_learner, learner_id)
        self.timeline.later(options.look_every_s, self._look_after)
        Faults(self)
        self._watches: Fairness | PublishedFormula = Fairness(self) if options.hostile else PublishedFormula(self)
        self.hostile = [HostileProcess(self, number) for number in range(options.hostile)]
        self._processes += [hostile.process for hostile in self.hostile]

    def run(self) -> Result:
        """Raises a Violation, and whatever the product raises where nothing may be raised."""
        try:
            self.timeline.run()
        finally:
            for process in self._processes:
                process.kill()
        if (broken := self.broken_promise()) is not None:
            raise broken
        trace = hashlib.sha256(repr(self._events).encode()).hexdigest()
        counts, faults = (dict(sorted(c.items())) for c in (self.counts, self.faults))
        return Result(self.options.seed, self.timeline.events, self.timeline.now, counts, faults, trace)

    def bury(self) -> None:
        """Nothing that is left of the processes says anything any more."""
        self._is_buried = True
        for process in self._processes:
            process.bury()

    def broken_promise(self) -> Violation | None:
        """The first thing that the judge finds in the histories so far."""
        found = violations(
            self.histories(), excused=self._excused, gapless=self.options.on_commit == "carry", claimants=self.claimants
        )
        return Violation(found[0].check, found[0].what) if found else None

    def histories(self) -> Histories:
        """Of all processes so far; hostile ones write none."""
        return gather((chronicle.name, chronicle.lines) for chronicle in self._chronicles if chronicle.lines)

    @property
    def claimants(self) -> set[str]:
        """Learner ids under which somebody lies."""
        return set().union(*(hostile.learner.spoke_as for hostile in self.hostile))

    # ------------------------------------------------------------ what happens

    def note(self, *what: Any) -> None:
        """Something happened, for the trace."""
        self._events.append((self.timeline.now, *what))

    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        """A process has written a line of its history."""
        if self._is_buried:
            return
        self.note(name, what, *facts.items())
        if what in ("announced", "restored"):
            version = facts["fragment"], facts["epoch"], facts["version"]
            self._announced[version] = facts["checksum"]
            shard = int(name.removeprefix("shard-"))
            self._fragments[shard].add(facts["fragment"])
            if what == "announced" and shard in self.disks:
                self.disks[shard].hurt.pop(facts["fragment"], None)
        self._watches.heard(name, what, facts)
        match what:
            case "gone" if facts["code"] == LeaseExpired.code:
                self.shards[int(name.removeprefix("shard-"))].lost(facts["learner"], facts["generation"])
            case "announced":
                self.counts["versions"] += 1
            case "restored":
                self.counts["fragments restored"] += 1
            case "merging":
                self.counts["contributions merged"] += len(facts["contributions"])
            case "carried":
                self.counts["learned that carried"] += 1
            case "applied" if facts["merged"] is not None:
                self.counts["learned that merged"] += 1
            case "applied" if facts["forgotten"] is not None:
                self.counts["learned that forgotten"] += 1

    def count(self, what: str) -> None:
        """Something came about, for the report of a run."""
        self.counts[what] += 1

    def tail(self) -> list[str]:
        return [f"  {t:9.3f} {' '.join(map(str, what))}" for t, *what in self._events[-TAIL:]]

    def history_of(self, name: str) -> Chronicle:
        """Of a process that is being started."""
        chronicle = Chronicle(self, name)
        self._chronicles.append(chronicle)
        return chronicle

    def seed_of(self, name: str) -> str:
        """Of the next process of this name."""
        return f"{self.options.seed} {name} {self.starts[name]}"

    def _said(self, item: Any, shard: int) -> None:
        """A shard says something to a learner."""
        if self.hostile:
            invariants.what_is_said_fits_the_wire(item)
        if isinstance(item, Committed):
            name = item.fragment_id, item.epoch, item.version
            if name not in self._announced:
                self._learn_name(name, shard)
            invariants.announced_versions_are_there(self._announced, name)

    def _learn_name(self, name: invariants.Name, shard: int) -> None:
        """A version that may be taken for one that was lost goes under a name of its own: the shard's epoch."""
        host = self.shards[shard].host
        fragment_id, epoch, version = name
        if host is None or epoch != host.shard.epoch:
            return
        state = host.shard.fragments[fragment_id]
        if state.recovered is not None and state.recovered[1] == version == state.version:
            self._announced[name] = self._announced[fragment_id, *state.recovered]
            self.counts["versions renamed"] += 1

    # ------------------------------------------------------------ processes

    def start_shard(self, index: int) -> None:
        if index not in self.shards or not self.shards[index].process.alive:
            name = f"shard-{index}"
            self.note("start", name)
            self.shards[index] = ShardProcess(self, index, self.disks.get(index))
            self._processes.append(self.shards[index].process)
            self.starts[name] += 1

    def has_model(self, index: int) -> bool:
        """Whether a shard's model cannot be replaced any more."""
        host = self.shards[index].host
        if host is None:
            return False
        return any(s.seeded for s in host.shard.fragments.values()) or bool(host.shard.membership.live())

    def fragment(self, shard: str, fragment_id: int) -> FragmentState:
        """Of a shard that serves."""
        host = self.shards[int(shard.removeprefix("shard-"))].host
        assert host is not None
        return host.shard.fragments[fragment_id]

    def begins(self, shard: ShardProcess) -> None:
        """A shard is about to serve, with what its disk has given back to it. What may have been lost is excused."""
        assert shard.host is not None
        epoch, disk = shard.host.shard.epoch, self.disks.get(shard.index)
        if disk is None or self.options.interval_s:
            lost = self._fragments[shard.index]
        else:
            self.counts["recoveries"] += bool(shard.host.shard.fragments)
            lost = set(disk.hurt)
        self._excused |= {(epoch, fragment_id) for fragment_id in lost}
        for fragment_id, state in shard.host.shard.fragments.items():
            if disk is not None and state.seeded and (how := disk.hurt.pop(fragment_id, None)) is not None:
                is_lost = state.version < disk.hurt_versions.get(fragment_id, 0)  # a write may have ended since
                if is_lost:
                    invariants.lost_versions_are_noticed(fragment_id, how, is_renamed=state.epoch == epoch)

    def start_learner(self, learner_id: str) -> None:
        drawn = self._random
        saved = self.checkpoints[learner_id]
        if not saved and drawn.random() < OF_AN_EARLIER_RUN:
            steps = drawn.randint(1, 9)
            saved.append(Checkpoint(PATTERN * drawn.randint(1, 30), steps, 2 * steps))
        resumes = bool(saved) and drawn.random() < self.options.resumes
        self.note("start", learner_id, "resumed" if resumes else "new")
        self.counts["learners resumed"] += resumes
        index = self.learner_ids.index(learner_id)
        flat, start = PATTERN * (10.0 + index), Start()
        if resumes:
            found = drawn.choice(saved)
            flat, start = found.flat, Start(found.inner_step, found.tokens, resumed=True)
        kind = IslandProcess if index < self.options.islands else LearnerProcess
        self.learners.append(kind(self, learner_id, flat, start))
        self._processes.append(self.learners[-1].process)
        self.starts[learner_id] += 1

    def running(self, learner_id: str) -> list[LearnerProcess | IslandProcess]:
        return [p for p in self.learners if p.learner_id == learner_id and p.process.alive]

    # ------------------------------------------------------------ faults

    def crash_learner(self, learner_id: str, *, noticed: bool, back_after_s: float, at_await: bool = False) -> None:
        running = self.running(learner_id)
        if running:

            def kill() -> None:
                self._end(running[0], noticed=noticed)
                self.timeline.later(back_after_s, self._start_if_none, learner_id)

            self._kill_soon(running[0], kill, at_await=at_await)

    def lose_rank(self, learner_id: str, *, noticed: bool, back_after_s: float) -> None:
        """One rank of an island dies; its launcher ends the others soon, and starts all again later."""
        for learner in self.running(learner_id):
            if isinstance(learner, IslandProcess) and learner.state in ("joining", "training"):
                learner.lose_rank()
                self.counts["ranks lost"] += 1
                ends = partial(self.crash_learner, noticed=noticed, back_after_s=back_after_s)
                self.timeline.later(self._random.random() * RESTART_S, ends, learner_id)

    def freeze_learner(self, learner_id: str, lasts_s: float) -> None:
        for learner in self.running(learner_id)[:1]:
            learner.process.freeze()
            self.timeline.later(lasts_s, self._thaw, learner)

    def hang_learner(self, learner_id: str, lasts_s: float) -> None:
        for learner in self.running(learner_id):
            learner.hung_until = self.timeline.now + lasts_s

    def warn_learner(self, learner_id: str) -> None:
        """Its machine is about to be taken away; another one takes its place soon."""
        for learner in self.running(learner_id):
            if isinstance(learner, LearnerProcess):
                learner.is_warned = True

    def diverge(self, learner_id: str, snapshots: int) -> None:
        """So many of its next snapshots hold a value that is not finite."""
        for learner in self.running(learner_id):
            learner.not_finite = snapshots

    def crash_shard(self, index: int, *, noticed: bool, back_after_s: float, at_await: bool = False) -> None:
        shard = self.shards[index]
        if shard.process.alive:

            def kill() -> None:
                disk = self.disks.get(index)
                power = disk is not None and disk.random.random() < 0.5
                self.note("killed", shard.name, "power" if power else "")
                shard.kill(power=power)
                self.network.gone(shard.process, noticed)
                self.counts["memory losses" if disk is None else "power cuts" if power else "kills"] += 1
                self.timeline.later(back_after_s, self.start_shard, index)

            self._kill_soon(shard, kill, at_await=at_await)

    def drain_shard(self, index: int, *, back_after_s: float) -> None:
        """A shard is told to end, and is started again."""
        shard = self.shards[index]
        if shard.process.alive and not shard.process.frozen and shard.is_serving:

            def ended() -> None:
                if shard.process.alive:
                    self.crash_shard(index, noticed=True, back_after_s=back_after_s)

            self.counts["drains"] += 1
            shard.drain(ended)

    def _kill_soon(self, what: LearnerProcess | IslandProcess | ShardProcess, kill: Any, *, at_await: bool) -> None:
        """Now, or after some more callbacks: between any two awaits."""
        if at_await and what.process.kill_at is None and not what.process.frozen:
            what.process.kill_at = what.process.turns + self._random.randint(1, TURNS_BEFORE_A_KILL), kill
        else:
            kill()

    def fill_disk(self, index: int, lasts_s: float) -> None:
        """It takes nothing more for a while, or fails to sync."""
        disk = self.disks.get(index)
        if disk is not None:
            disk.refuse()
            self.timeline.later(lasts_s, disk.accept)

    def hurt_file(self, which: float, *, noticed: bool, back_after_s: float) -> None:
        """The newest version file of one fragment is damaged, and its shard crashes: nobody reads it before."""
        fragments = [(i, p) for i in sorted(self.disks) for p in sorted(self._fragments[i])]
        if fragments:
            index, fragment_id = fragments[int(which * len(fragments))]
            if self.disks[index].hurt_newest(fragment_id):
                self.note("hurt", index, fragment_id, self.disks[index].hurt[fragment_id])
                self.crash_shard(index, noticed=noticed, back_after_s=back_after_s)

    def wipe_disk(self, index: int, *, noticed: bool, back_after_s: float) -> None:
        """A shard crashes, and somebody empties its folder before it is started again."""
        if index in self.disks and self.shards[index].process.alive:
            self.crash_shard(index, noticed=noticed, back_after_s=back_after_s)
            self.disks[index].wipe(self._fragments[index])

    def freeze_shard(self, index: int, lasts_s: float) -> None:
        shard = self.shards[index]
        if shard.process.alive:
            shard.freeze()
            self.timeline.later(lasts_s, self._thaw, shard)

    def cut(self, path: Path, up: bool, lasts_s: float) -> None:
        self.network.cuts[path, up] += 1
        self.timeline.later(lasts_s, self._mend, path, up)

    def break_calls(self, path: Path, tell_client: bool, tell_shard: bool) -> None:
        for call in self.network.calls:
            if call.path == path:
                call.break_off(tell_client=tell_client, tell_shard=tell_shard)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.note("healed")
        self.healed = True
        for hostile in self.hostile:
            hostile.learner.calm = True
        for learner in self.learners:
            self._thaw(learner)
            learner.hung_until = 0.0
            learner.not_finite = 0
            learner.process.kill_at = None
        for shard in self.shards.values():
            self._thaw(shard)
            shard.process.kill_at = None
        for disk in self.disks.values():
            disk.heal()
        for index in range(self.options.shards):
            self.start_shard(index)
        for learner_id in self.learner_ids:
            self._start_if_none(learner_id)
        self.network.heal()
        self._to_resolve = [(p, c) for p in self.learners if p.process.alive for c in p.unresolved.values()]

    def _end(self, learner: LearnerProcess | IslandProcess, *, noticed: bool) -> None:
        self.note("killed", learner.name)
        learner.process.kill()
        self.network.gone(learner.process, noticed)

    def _thaw(self, what: LearnerProcess | IslandProcess | ShardProcess) -> None:
        if what.process.alive and what.process.frozen:
            what.thaw()

    def _mend(self, path: Path, up: bool) -> None:
        if not self.healed:
            self.network.cuts[path, up] -= 1
            self.network.flush()

    def _start_if_none(self, learner_id: str) -> None:
        if not self.running(learner_id) and not self._is_over(learner_id):
            self.start_learner(learner_id)

    # ------------------------------------------------------------ looking after it

    def _is_over(self, learner_id: str) -> bool:
        """The run is done as far as this learner knows; nobody starts it again."""
        return any(p.learner_id == learner_id and p.state == "done" for p in self.learners)

    def _look_after(self) -> None:
        """Every now and then: what ended is started again; when all is well, the schedule is over."""
        for shard in self.shards.values():
            shard.check()
        for learner in self.learners:
            if learner.process.alive and not learner.process.frozen and learner.state in ("failed", "left", "done"):
                self._bury(learner)
        if self.healed:
            well, why = self._is_well()
            if well:
                self.timeline.stop()
            elif self.timeline.now > self.options.faults_s + self.options.well_within_s:
                words = f"not after {self.options.well_within_s:.0f} s: {why}"
                raise Violation("well_again_after_faults", words)
        self.timeline.later(self.options.look_every_s, self._look_after)

    def _bury(self, learner: LearnerProcess | IslandProcess) -> None:
        if learner.error is not None:
            self.note("failed", learner.name, learner.error.code)
            invariants.superseded_only_by_another(
                learner.learner_id, learner.error.code,
                self.starts[learner.learner_id] + (learner.learner_id in self.claimants), learner.poisoned,
            )  # fmt: skip
        self._end(learner, noticed=True)
        if learner.state in ("failed", "left"):
            self.timeline.later(self.options.look_every_s, self._start_if_none, learner.learner_id)

    def _is_well(self) -> tuple[bool, str]:
        """Liveness, or what is missing: all joined, versions go on, everybody has them, no contribution is in limbo."""
        if self.options.budget:
            late = [i for i in self.learner_ids if not self._is_over(i)]
            return not late, f"{late} are not done"
        for index, shard in self.shards.items():
            if not shard.process.alive or not shard.is_serving:
                return False, f"shard {index} does not serve"
        for learner_id in self.learner_ids:
            running = self.running(learner_id)
            if len(running) != 1 or running[0].state != "training":
                return False, f"{learner_id}: {[p.state for p in running]}"
            for index, figures in enumerate(running[0].learner.connections.figures()):
                host = self.shards[index].host
                assert host is not None
                member = host.shard.membership.get(learner_id)
                if not figures["connected"] or member is None or not member.live:
                    return False, f"{learner_id} is not with shard {index}"
                if member.generation != figures["generation"]:
                    return False, f"{learner_id} has another lease with shard {index}"
        if self.options.norm_factor < 100:
            return True, "with a narrow norm guard nobody may be let in any more"
        if any(p.process.alive and c in p.unresolved.values() for p, c in self._to_resolve):
            return False, "contributions from before the healing are in limbo"
        return self._versions_go_on()

    def _versions_go_on(self) -> tuple[bool, str]:
        states = {i: state for s in self.shards.values() if s.host for i, state in s.host.shard.fragments.items()}
        self._marks = self._marks or {fragment_id: state.version for fragment_id, state in states.items()}
        for fragment_id, state in states.items():
            marked = self._marks[fragment_id]
            if state.version <= marked:
                return False, f"fragment {fragment_id} stays at version {state.version}"
            for learner_id in self.learner_ids:
                core = self.running(learner_id)[0].learner.core
                assert core is not None
                has = core.fragments[fragment_id]
                if has.version <= marked:
                    return False, f"{learner_id} stays at version {has.version} of fragment {fragment_id}"
        return True, "well"
