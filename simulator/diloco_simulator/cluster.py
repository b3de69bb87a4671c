"""One schedule: shards, learners, a network, faults; run until it is over, healed, and well again, or has failed."""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from diloco_simulator import invariants
from diloco_simulator.arithmetic import arithmetic_of, computing_with
from diloco_simulator.disk import Crashed
from diloco_simulator.faults import Faults
from diloco_simulator.invariants import Violation
from diloco_simulator.keeper import RETRY_S, ShardDisk
from diloco_simulator.learner import SimulatedLearner
from diloco_simulator.network import Network, Path
from diloco_simulator.options import Options
from diloco_simulator.shard import SimulatedShard
from diloco_simulator.timeline import Process, Timeline
from diloco_simulator.truth import Truth

TAIL = 40


@dataclass(frozen=True)
class Result:
    """What a schedule came to."""

    seed: int
    events: int
    virtual_s: float
    counts: dict[str, int]
    faults: dict[str, int]
    """By kind."""
    happened: list[tuple[Any, ...]] = field(repr=False)
    """Everything, in order."""

    @property
    def trace(self) -> str:
        """sha256 over everything that happened."""
        return hashlib.sha256(repr(self.happened).encode()).hexdigest()


class ScheduleFailed(Exception):
    """An invariant does not hold. The message replays it."""

    def __init__(self, violation: Exception, options: Options, tail: list[str]) -> None:
        self.violation = violation
        lines = [
            f"{options.name}: {type(violation).__name__} {violation}",
            f"options: {options}",
            f"the last {len(tail)} events:",
            *tail,
            f"replay: python -m diloco_simulator --replay {options.name}",
        ]
        super().__init__("\n".join(lines))


def run_schedule(options: Options) -> Result:
    """Raises ScheduleFailed."""
    collects = gc.isenabled()
    gc.disable()  # a tenth of the time; what a schedule leaves behind is collected at its end
    try:
        with computing_with(options.arithmetic):
            cluster = Cluster(options)
            try:
                return cluster.run()
            except Exception as error:
                raise ScheduleFailed(error, options, cluster.tail()) from error
            finally:
                cluster.take_apart()
    finally:
        if collects:
            gc.enable()


class Cluster:
    """Everything of one schedule."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.timeline = Timeline()
        self.faults: Counter[str] = Counter()
        self.network = Network(self.timeline, options, self.faults)
        self.truth = Truth(arithmetic_of(options.arithmetic))
        self.learner_ids = tuple(f"w{i}" for i in range(options.learners))
        self.learners: list[SimulatedLearner] = []
        """Every process that was ever started."""
        self.shards: dict[int, SimulatedShard] = {}
        self.disks = {index: ShardDisk(index, options) for index, has in enumerate(options.disks) if has}
        self.healed = False
        self._random = random.Random(f"cluster {options.seed}")
        self._trace: list[tuple[Any, ...]] = []
        self._marks: dict[int, int] = {}  # fragment -> version when all had joined again
        self._to_resolve: list[Any] = []
        for index in range(options.shards):
            self.start_shard(index)
        for learner_id in self.learner_ids:
            self.timeline.later(self._random.random() * options.starts_s, self.start_learner, learner_id)
        self.timeline.later(self.options.look_every_s, self._look_after)
        Faults(self)

    def run(self) -> Result:
        events = self.timeline.run()
        counts, faults = (dict(sorted(c.items())) for c in (self.truth.counts, self.faults))
        return Result(self.options.seed, events, self.timeline.now, counts, faults, self._trace)

    def take_apart(self) -> None:
        """Its parts refer to each other: apart, their memory is free for the next one without a collection."""
        processes: list[SimulatedLearner | SimulatedShard] = [*self.learners, *self.shards.values()]
        for part in processes:
            part.process.kill()
        links = [link for learner in self.learners for link in learner.links]
        owners: list[Any] = [*links, *processes, *(part.process for part in processes), *self.network.streams]
        for owner in (*owners, self.network, self.truth, self.timeline, self):
            vars(owner).clear()

    def note(self, *what: Any) -> None:
        """Something happened, for the trace."""
        self._trace.append((self.timeline.now, *what))

    def tail(self) -> list[str]:
        return [f"  {t:9.3f} {' '.join(map(str, what))}" for t, *what in self._trace[-TAIL:]]

    # ------------------------------------------------------------ processes

    def start_shard(self, index: int) -> None:
        if index in self.shards and self.shards[index].process.alive:
            return
        disk, life = self.disks.get(index), None
        if disk is None:
            epoch = self._random.randrange(1, 2**31)
        else:
            try:
                life = disk.start(self.options.settings[index])
            except (Crashed, OSError) as error:
                self.note("no start", index, repr(error))
                self.timeline.later(RETRY_S, self.start_shard, index)
                return
            epoch = life[0].epoch
        process = Process(self.timeline, f"shard {index}")
        self.note("start shard", index, epoch)
        self.shards[index] = self.network.shards[index] = SimulatedShard(
            index, epoch, process, self.options, self.truth, self.note, disk, life
        )

    def start_learner(self, learner_id: str) -> None:
        process_id = f"{learner_id}.{sum(p.learner_id == learner_id for p in self.learners)}"
        process = Process(self.timeline, process_id)
        self.note("start learner", process_id)
        self.learners.append(
            SimulatedLearner(
                learner_id, process_id, self.learner_ids.index(learner_id), process, self.network, self.options,
                self.truth, self.note,
            )
        )  # fmt: skip

    def running(self, learner_id: str) -> list[SimulatedLearner]:
        return [p for p in self.learners if p.learner_id == learner_id and p.process.alive]

    # ------------------------------------------------------------ faults

    def crash_learner(self, learner_id: str, *, noticed: bool, back_after_s: float) -> None:
        for learner in self.running(learner_id)[:1]:
            self._end(learner.process, noticed)
            self.timeline.later(back_after_s, self._start_if_none, learner_id)

    def freeze_learner(self, learner_id: str, lasts_s: float) -> None:
        for learner in self.running(learner_id)[:1]:
            learner.process.freeze()
            self.timeline.later(lasts_s, self._thaw_learner, learner)

    def hang_learner(self, learner_id: str, lasts_s: float) -> None:
        for learner in self.running(learner_id):
            learner.hung_until = self.timeline.now + lasts_s

    def crash_shard(self, index: int, *, noticed: bool, back_after_s: float) -> None:
        shard = self.shards.get(index)
        if shard is not None and shard.process.alive:
            disk = self.disks.get(index)
            power = disk is not None and disk.random.random() < 0.5
            shard.crash(power=power)
            self.network.gone(shard.process, noticed)
            self.truth.counts["memory losses" if disk is None else "power cuts" if power else "kills"] += 1
            self.timeline.later(back_after_s, self.start_shard, index)

    def fill_disk(self, index: int, lasts_s: float) -> None:
        """It takes nothing more for a while, or fails to sync."""
        disk = self.disks.get(index)
        if disk is not None:
            disk.refuse()
            self.timeline.later(lasts_s, disk.accept)

    def hurt_file(self, which: float, *, noticed: bool, back_after_s: float) -> None:
        """The newest version file of one fragment is damaged, and its shard crashes: nobody reads it before."""
        fragments = [(i, p) for i in sorted(self.disks) for p in sorted(self.truth.fragments_of[i])]
        if fragments:
            index, fragment_id = fragments[int(which * len(fragments))]
            if self.disks[index].hurt_newest(fragment_id):
                self.note("hurt", index, fragment_id, self.disks[index].hurt[fragment_id])
                self.crash_shard(index, noticed=noticed, back_after_s=back_after_s)

    def freeze_shard(self, index: int, lasts_s: float) -> None:
        shard = self.shards.get(index)
        if shard is not None and shard.process.alive:
            shard.freeze()
            self.timeline.later(lasts_s, self._thaw_shard, shard)

    def cut(self, path: Path, up: bool, lasts_s: float) -> None:
        self.network.cuts[path, up] = self.network.cuts.get((path, up), 0) + 1
        self.timeline.later(lasts_s, self._mend, path, up)

    def break_stream(self, path: Path, tell_client: bool, tell_shard: bool) -> None:
        for stream in self.network.streams:
            if stream.path == path:
                stream.break_off(tell_client=tell_client, tell_shard=tell_shard)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.note("healed")
        self.healed = True
        for learner in self.learners:
            self._thaw_learner(learner)
            learner.hung_until = 0.0
        for shard in self.shards.values():
            self._thaw_shard(shard)
        for disk in self.disks.values():
            disk.heal()
        for index in range(self.options.shards):
            self.start_shard(index)
        for learner_id in self.learner_ids:
            self._start_if_none(learner_id)
        self.network.heal()
        self._to_resolve = [o for p in self.learners if p.process.alive for o in p.unresolved.values()]

    def _end(self, process: Process, noticed: bool) -> None:
        process.kill()
        self.network.gone(process, noticed)

    def _thaw_learner(self, learner: SimulatedLearner) -> None:
        if learner.process.alive and learner.process.frozen:
            learner.thaw()

    def _thaw_shard(self, shard: SimulatedShard) -> None:
        if shard.process.alive and shard.process.frozen:
            shard.thaw()

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
        for learner in self.learners:
            if learner.process.alive and not learner.process.frozen and learner.state in ("failed", "done"):
                self._bury(learner)
        if self.healed:
            well, why = self._is_well()
            if well:
                self.timeline.stop()
            elif self.timeline.now > self.options.faults_s + self.options.well_within_s:
                words = f"not after {self.options.well_within_s:.0f} s: {why}"
                raise Violation("well_again_after_faults", words)
        self.timeline.later(self.options.look_every_s, self._look_after)

    def _bury(self, learner: SimulatedLearner) -> None:
        if learner.error is not None:
            started = sum(p.learner_id == learner.learner_id for p in self.learners)
            invariants.superseded_only_by_another(learner.learner_id, learner.error.code, started)
        self._end(learner.process, noticed=True)
        if learner.state == "failed":
            self.timeline.later(self.options.look_every_s, self._start_if_none, learner.learner_id)

    def _is_well(self) -> tuple[bool, str]:
        """Liveness, or what is missing: all joined, versions go on, everybody has them, no contribution is in limbo."""
        if self.options.budget:
            late = [i for i in self.learner_ids if not self._is_over(i)]
            return not late, f"{late} are not done"
        for learner_id in self.learner_ids:
            running = self.running(learner_id)
            if len(running) != 1 or running[0].state != "training":
                return False, f"{learner_id}: {[p.state for p in running]}"
            for link in running[0].links:
                shard = self.shards.get(link.shard_index)
                if shard is None or not shard.process.alive:
                    return False, f"shard {link.shard_index} does not run"
                member = shard.core.membership.get(learner_id)
                if not link.connected or member is None or not member.live or member.generation != link.generation:
                    return False, f"{learner_id} is not with shard {link.shard_index}"
        if self.options.norm_factor < 100:
            return True, "with a narrow norm guard nobody may be let in any more"
        if any(not o.belief for o in self._to_resolve if self._instance_runs(o.process_id)):
            return False, "contributions from before the healing are in limbo"
        return self._versions_go_on()

    def _versions_go_on(self) -> tuple[bool, str]:
        if not self._marks:
            self._marks = {
                fragment_id: state.version
                for shard in self.shards.values()
                for fragment_id, state in shard.core.fragments.items()
            }
        for shard in self.shards.values():
            for fragment_id, state in shard.core.fragments.items():
                marked = self._marks[fragment_id]
                if state.version <= marked:
                    return False, f"fragment {fragment_id} stays at version {state.version}"
                for learner_id in self.learner_ids:
                    core = self.running(learner_id)[0].core
                    assert core is not None
                    has = core.fragments[fragment_id]
                    name = (has.epoch, has.version)
                    mine = self.truth.versions[fragment_id, name]
                    if has.version <= marked or not self.truth.heads[fragment_id].descends_from(mine):
                        return False, f"{learner_id} stays at version {name} of fragment {fragment_id}"
        return True, "well"

    def _instance_runs(self, process_id: str) -> bool:
        return any(p.process_id == process_id and p.process.alive for p in self.learners)
