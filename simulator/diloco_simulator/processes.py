"""The processes of a schedule, and everything that can be done to them: start, kill, freeze, cut off, and heal."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from functools import partial
from typing import Any

from torch import Tensor

from diloco_common.wire.manifest import Fragment, TensorSpec, cut
from diloco_server.core.fragment import FragmentState
from diloco_simulator.followed import Trainer
from diloco_simulator.hostile import HostileLearner
from diloco_simulator.island_process import RESTART_S, IslandProcess
from diloco_simulator.learner_process import LearnerProcess
from diloco_simulator.lies import Plot
from diloco_simulator.options import SOMETIMES, Options
from diloco_simulator.reader_processes import SimulatedReaders
from diloco_simulator.shard_process import ShardProcess
from diloco_simulator.verify import invariants
from diloco_simulator.world.disk import ShardDisk
from diloco_simulator.world.network import Path
from diloco_simulator.world.process import SimulatedProcess
from diloco_simulator.world.stage import AVERAGED, PATTERN, SHAPES, Checkpoint, Stage, part_of
from diloco_simulator.world.transport import UntrustedTransport
from diloco_worker.shell.boundary import Start

TENSORS = tuple(
    TensorSpec(name, shape, "mean" if name in AVERAGED else "run") for name, shape in sorted(SHAPES.items())
)


class HostileProcess:
    """A process that does harm until it is killed."""

    def __init__(self, cluster: Stage, number: int) -> None:
        options, name = cluster.options, f"x{number}"
        self.process = SimulatedProcess(cluster.timeline, name, cluster.seed_of(name), lambda _: 0.0)
        plot = Plot(
            "local", cut(TENSORS, options.fragments, options.shards), options.push, options.pull, _honest,
            lambda: cluster.network.sniffed, options.tactics, options.manners, options.answers,
            min(options.step_s), options.call_s,
        )  # fmt: skip
        transports = [
            UntrustedTransport(
                cluster.network, self.process, (name, shard), name if options.identities_proven else None,
                cluster.has_model, options.call_s,
            )
            for shard in range(options.shards)
        ]  # fmt: skip
        self.learner = HostileLearner(name, transports, plot, self.process.random, cluster.count)
        self._begins_s = self.process.random.random() * options.starts_s
        self.process.start(self._live(), name)

    async def _live(self) -> None:
        await asyncio.sleep(self._begins_s)
        await self.learner.run()


def _honest(fragment: Fragment, tokens: int) -> Tensor:
    """The contribution of a learner that trained on this many tokens, with its sign."""
    return -tokens * part_of(PATTERN, fragment)


TURNS_BEFORE_A_KILL = 60
"""Maximum number of callbacks that a process still runs before it is killed at an await point."""


class Processes(Stage):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.learners: list[Trainer] = []
        """Every process ever started."""
        self.shards: dict[int, ShardProcess] = {}
        """The latest process of each shard."""
        self.hostile: list[HostileProcess] = []
        self.disks = {index: ShardDisk(index, options) for index, has in enumerate(options.disks) if has}
        self.healed = False
        self._excused: set[tuple[int, int]] = set()
        self._fragments: defaultdict[int, set[int]] = defaultdict(set)  # shard -> fragments that it ever had
        self._to_resolve: list[Any] = []
        self._random = random.Random(f"cluster {options.seed}")
        self.readers = SimulatedReaders(self, self.shards, self.disks, self.start_shard)

    @property
    def claimants(self) -> set[str]:
        """Learner ids under which somebody lies."""
        return set().union(*(hostile.learner.spoke_as for hostile in self.hostile))

    # ------------------------------------------------------------ processes

    def start_shard(self, index: int) -> None:
        if index not in self.shards or not self.shards[index].process.alive:
            name = f"shard-{index}"
            self.note("start", name)
            self.shards[index] = ShardProcess(self, index, self.disks.get(index))
            self.processes.append(self.shards[index].process)
            self.starts[name] += 1

    def has_model(self, index: int) -> bool:
        """Whether a shard's model can no longer be replaced."""
        host = self.shards[index].host
        if host is None:
            return False
        return any(s.seeded for s in host.shard.fragments.values()) or bool(host.shard.membership.live())

    def fragment(self, shard: str, fragment_id: int) -> FragmentState:
        host = self.shards[int(shard.removeprefix("shard-"))].host
        assert host is not None
        return host.shard.fragments[fragment_id]

    def begins(self, index: int) -> None:
        """A shard is about to serve what it read from its disk. Note which losses are excused."""
        shard = self.shards[index]
        assert shard.host is not None
        epoch, disk = shard.host.shard.epoch, self.disks.get(shard.index)
        self.counts["recoveries"] += disk is not None and bool(shard.host.shard.fragments)
        keeps = None if shard.index in self.readers.promoted else disk
        lost = self._fragments[shard.index] if keeps is None else set(keeps.hurt)
        self._excused |= {(epoch, fragment_id) for fragment_id in lost}
        for fragment_id, state in shard.host.shard.fragments.items():
            if disk is not None and state.seeded and (how := disk.hurt.pop(fragment_id, None)) is not None:
                is_lost = state.version < disk.hurt_versions.get(fragment_id, 0)  # a write may have finished since
                if is_lost:
                    invariants.lost_versions_are_noticed(fragment_id, how, is_renamed=state.epoch == epoch)

    def start_learner(self, learner_id: str) -> None:
        drawn = self._random
        saved = self.checkpoints[learner_id]
        if not saved and drawn.random() < SOMETIMES:  # it finds a checkpoint of an earlier run
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
        self.processes.append(self.learners[-1].process)
        self.starts[learner_id] += 1

    def running(self, learner_id: str) -> list[Trainer]:
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
        """One rank of an island dies; its launcher soon ends the others, and later restarts all of them."""
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
        """The learner's machine is about to go away; another one soon takes its place."""
        for learner in self.running(learner_id):
            if isinstance(learner, LearnerProcess):
                learner.is_warned = True

    def diverge(self, learner_id: str, snapshots: int) -> None:
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
        shard = self.shards[index]
        if shard.process.alive and not shard.process.frozen and shard.is_serving:

            def ended() -> None:
                if shard.process.alive:
                    self.crash_shard(index, noticed=True, back_after_s=back_after_s)

            self.counts["drains"] += 1
            shard.drain(ended)

    def _kill_soon(self, what: Trainer | ShardProcess, kill: Any, *, at_await: bool) -> None:
        """Kill now, or after some more callbacks, between any two awaits."""
        if at_await and what.process.kill_at is None and not what.process.frozen:
            what.process.kill_at = what.process.turns + self._random.randint(1, TURNS_BEFORE_A_KILL), kill
        else:
            kill()

    def fill_disk(self, index: int, lasts_s: float) -> None:
        """A disk accepts nothing for a while, or fails to sync."""
        disk = self.disks.get(index)
        if disk is not None:
            disk.refuse()
            self.timeline.later(lasts_s, disk.accept)

    def hurt_file(self, which: float, *, noticed: bool, back_after_s: float) -> None:
        """Damage the newest version file of one fragment, and crash its shard, so that nobody reads it before that."""
        fragments = [(i, p) for i in sorted(self.disks) for p in sorted(self._fragments[i])]
        if fragments:
            index, fragment_id = fragments[int(which * len(fragments))]
            if self.disks[index].hurt_newest(fragment_id):
                self.note("hurt", index, fragment_id, self.disks[index].hurt[fragment_id])
                self.crash_shard(index, noticed=noticed, back_after_s=back_after_s)

    def wipe_disk(self, index: int, *, noticed: bool, back_after_s: float) -> None:
        """A shard crashes, and somebody empties its folder before the restart."""
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
        for disk in (*self.disks.values(), *self.readers.replaced_disks):
            disk.heal()
        for index in range(self.options.shards):
            self.start_shard(index)
        self.readers.thaw()
        for learner_id in self.learner_ids:
            self._start_if_none(learner_id)
        self.network.heal()
        self.readers.reunite()
        self._to_resolve = [(p, c) for p in self.learners if p.process.alive for c in p.unresolved.values()]

    def _end(self, learner: Trainer, *, noticed: bool) -> None:
        self.note("killed", learner.name)
        learner.process.kill()
        self.network.gone(learner.process, noticed)

    def _thaw(self, what: Trainer | ShardProcess) -> None:
        if what.process.alive and what.process.frozen:
            what.thaw()

    def _mend(self, path: Path, up: bool) -> None:
        if not self.healed:
            self.network.cuts[path, up] -= 1
            self.network.flush()

    def _start_if_none(self, learner_id: str) -> None:
        if not self.running(learner_id) and not self._is_over(learner_id):
            self.start_learner(learner_id)

    def _is_over(self, learner_id: str) -> bool:
        """Whether this learner knows that the run is done; then nobody starts it again."""
        return any(p.learner_id == learner_id and p.state == "done" for p in self.learners)
