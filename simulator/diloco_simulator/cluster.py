"""One schedule: the product's shards and learners, a network and faults. It runs until everything is healed and works.

The processes run production code in virtual time. Their histories go to the judge that also judges real processes
(`diloco_simulator.verify.judge`). What the histories do not show is checked during the schedule (`invariants.py`).
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diloco_common.errors import LeaseExpired
from diloco_common.wire.messages import Committed, Role
from diloco_simulator.followed import Trainer
from diloco_simulator.options import Options, draw
from diloco_simulator.processes import HostileProcess, Processes
from diloco_simulator.verify import invariants
from diloco_simulator.verify.bounded import BoundedInfluence, Fairness
from diloco_simulator.verify.histories import Histories, gather
from diloco_simulator.verify.invariants import Violation
from diloco_simulator.verify.judge import violations
from diloco_simulator.verify.published import PublishedFormula
from diloco_simulator.world.network import Path


class Faults:
    """Breaks a cluster repeatedly until `faults_s`, then heals it."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._options = cluster.options
        self._random = random.Random(f"faults {cluster.options.seed}")
        cluster.timeline.later(cluster.options.faults_s, cluster.heal)
        cluster.timeline.later(cluster.options.faults_from_s, self._plan_next)

    def _plan_next(self) -> None:
        wait_s = self._random.expovariate(1 / self._options.fault_every_s)
        if self._options.faults and self._cluster.timeline.now + wait_s < self._options.faults_s:
            self._cluster.timeline.later(wait_s, self._strike)

    def _strike(self) -> None:
        kind = self._random.choice(self._options.faults)
        cluster, r = self._cluster, self._random
        lease_s = self._options.lease_s
        learner = r.choice(cluster.learner_ids)
        shard = r.randrange(self._options.shards)
        lasts_s = lease_s * r.choice((0.2, 0.8, 1.5, 3.0))
        cluster.faults[kind] += 1
        cluster.note("fault", kind, learner, shard, round(lasts_s, 3))
        match kind:
            case "crash learner":
                cluster.crash_learner(
                    learner, noticed=r.random() < 0.6, back_after_s=lasts_s, at_await=r.random() < 0.5
                )
            case "freeze learner":
                cluster.freeze_learner(learner, lasts_s)
            case "replace frozen learner":
                cluster.freeze_learner(learner, lasts_s)
                cluster.timeline.later(lasts_s * r.random(), cluster.start_learner, learner)
            case "hang learner":
                cluster.hang_learner(learner, lasts_s)
            case "warn learner":
                cluster.warn_learner(learner)
            case "crash shard":
                cluster.crash_shard(
                    shard, noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s), at_await=r.random() < 0.5
                )
            case "drain shard":
                cluster.drain_shard(shard, back_after_s=min(lasts_s, lease_s))
            case "freeze shard":
                cluster.freeze_shard(shard, lasts_s)
            case "cut" | "cut one way":
                ways = (True, False) if kind == "cut" else (r.random() < 0.5,)
                shards = range(self._options.shards) if r.random() < 0.4 else (shard,)
                for index in shards:
                    for up in ways:
                        cluster.cut((learner, index), up, lasts_s)
            case "fill disk":
                cluster.fill_disk(shard, lasts_s)
            case "hurt file":
                cluster.hurt_file(r.random(), noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s))
            case "wipe disk":
                cluster.wipe_disk(shard, noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s))
            case "break calls":
                cluster.break_calls((learner, shard), r.random() < 0.5, r.random() < 0.5)
            case "lose rank":
                cluster.lose_rank(learner, noticed=r.random() < 0.6, back_after_s=lasts_s)
            case "crash mirror":
                cluster.readers.crash_mirror(shard, noticed=r.random() < 0.6, back_after_s=lasts_s)
            case "freeze mirror":
                cluster.readers.freeze_mirror(shard, lasts_s)
            case "promote":
                cluster.readers.promote(shard, still_lives=r.random() < 0.5, noticed=r.random() < 0.6)
            case "not finite":
                cluster.diverge(learner, r.randint(1, 3))
        self._plan_next()


TAIL = 60


@dataclass(frozen=True)
class Result:
    seed: int
    events: int
    virtual_s: float
    counts: dict[str, int]
    faults: dict[str, int]
    trace: str
    """SHA-256 over everything that happened: all histories, and all faults."""


class ScheduleFailed(Exception):
    """An invariant or a promise was broken. The message says how to replay it."""

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
    """How to run this schedule again. A test may have changed the options that the name draws."""
    if draw(options.name) == options:
        return f"python -m diloco_simulator --replay {options.name}"
    return f"run_schedule({options.name} with the options above)"


def run_schedule(options: Options) -> Result:
    """Raises ScheduleFailed."""
    collects = gc.isenabled()
    gc.disable()  # the garbage of a schedule is collected at its end, or freed when the process ends
    try:
        cluster = SimulatedCluster(options)
        try:
            return cluster.run()
        except Exception as error:
            raise ScheduleFailed(cluster.broken_promise() or error, options, cluster.tail()) from error
        finally:
            cluster.bury()
    finally:
        if collects:
            gc.enable()


class SimulatedCluster(Processes):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._is_buried = False
        self._announced: dict[invariants.Name, str] = {}  # -> checksum of its values
        self._marks: dict[int, int] = {}  # fragment -> version when all had rejoined
        for index in range(options.shards):
            self.start_shard(index)
        for learner_id in self.learner_ids:
            self.timeline.later(self._random.random() * options.starts_s, self.start_learner, learner_id)
        self.timeline.later(options.look_every_s, self._look_after)
        for index in range(options.shards):
            if options.mirrors:
                self.readers.start_mirror(index)
            if options.standbys and index in self.disks:
                self.readers.start_standby(index)
        Faults(self)
        self._watches: Sequence[Fairness | PublishedFormula | BoundedInfluence] = ()
        if not options.standbys:  # with standbys, two processes may serve one shard, and the formula follows only one
            self._watches = [Fairness(self)] if options.hostile else [PublishedFormula(self), BoundedInfluence(self)]
        self.hostile = [HostileProcess(self, number) for number in range(options.hostile)]
        self.processes += [hostile.process for hostile in self.hostile]

    def run(self) -> Result:
        """Raises a Violation, and any error that the product must not raise."""
        try:
            self.timeline.run()
        finally:
            for process in self.processes:
                process.kill()
        if (broken := self.broken_promise()) is not None:
            raise broken
        trace = hashlib.sha256(repr(self.events).encode()).hexdigest()
        counts, faults = (dict(sorted(c.items())) for c in (self.counts, self.faults))
        return Result(self.options.seed, self.timeline.events, self.timeline.now, counts, faults, trace)

    def bury(self) -> None:
        """Silence everything that is left of the processes."""
        self._is_buried = True
        for process in self.processes:
            process.bury()

    def broken_promise(self) -> Violation | None:
        """The first thing that the judge finds in the histories so far."""
        found = violations(self.histories(), excused=self._excused, claimants=self.claimants)
        return Violation(found[0].check, found[0].what) if found else None

    def histories(self) -> Histories:
        """The histories of all processes so far; hostile ones write none."""
        return gather((chronicle.name, chronicle.lines) for chronicle in self.chronicles if chronicle.lines)

    # ------------------------------------------------------------ what happens

    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        if self._is_buried:
            return
        self.note(name, what, *facts.items())
        if what in ("announced", "restored"):
            version = facts["fragment"], facts["epoch"], facts["version"]
            self._announced[version] = facts["checksum"]
            shard = int(name.removeprefix("shard-"))
            self._fragments[shard].add(facts["fragment"])
            host = self.shards[shard].host  # of the process started last: an older one may still be running
            if what == "announced" and shard in self.disks and host and host.shard.epoch == facts["epoch"]:
                self.disks[shard].hurt.pop(facts["fragment"], None)
        for watch in self._watches:
            watch.heard(name, what, facts)
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

    def tail(self) -> list[str]:
        return [f"  {t:9.3f} {' '.join(map(str, what))}" for t, *what in self.events[-TAIL:]]

    def said(self, item: Any, path: Path) -> None:
        """A shard sends something to a learner, or to a standby, which hears of a version once it is on disk."""
        if self.hostile:
            invariants.what_is_said_fits_the_wire(item)
        if isinstance(item, Committed):
            name, (caller, shard) = (item.fragment_id, item.epoch, item.version), path
            if name not in self._announced:
                self._learn_name(name, shard)
            if not caller.startswith(Role.STANDBY):
                invariants.announced_versions_are_there(self._announced, name)

    def _learn_name(self, name: invariants.Name, shard: int) -> None:
        """Note the new name of a version. It has the shard's epoch if the version could be mistaken for a lost one."""
        host = self.shards[shard].host
        fragment_id, epoch, version = name
        if host is None or epoch != host.shard.epoch:
            return
        state = host.shard.fragments[fragment_id]
        if state.recovered is not None and state.recovered[1] == version == state.version:
            self._announced[name] = self._announced[fragment_id, *state.recovered]
            self.counts["versions renamed"] += 1

    # ------------------------------------------------------------ looking after the cluster

    def _look_after(self) -> None:
        """Called at intervals: restart processes that have ended, and end the schedule when all is well."""
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

    def _bury(self, learner: Trainer) -> None:
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
        """Whether all have joined, versions advance and reach all, and every fate is known; or else what is missing."""
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
        left_out = {i for shard in self.shards.values() if shard.host for i in shard.host.shard.influence.left_out}
        if left_out:
            return False, f"{sorted(left_out)} are healed, and do not take part"
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
