"""One shard of the product in a simulated process: host, service and store as they are, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_server.host import ShardHost
from diloco_server.service import Service
from diloco_server.storage.store import FileStore, MemoryStore, NothingIntact, Store
from diloco_server.storage.version import Origin
from diloco_simulator import invariants
from diloco_simulator.disk import Crashed
from diloco_simulator.process import Process
from diloco_simulator.shard_disk import ShardDisk
from diloco_simulator.silence import QuietLog, Silence

if TYPE_CHECKING:
    from diloco_simulator.cluster import Cluster

EPOCH_OF_A_NEW_FOLDER = 1000
DRAIN_S = 1.0


class ShardProcess:
    """A process that serves one shard: from a disk, or from memory, and then with it everything is lost."""

    def __init__(self, cluster: Cluster, index: int, disk: ShardDisk | None) -> None:
        self.index = index
        self.name = f"shard-{index}"
        self.host: ShardHost | None = None
        """None until it has begun an epoch."""
        self.is_serving = False
        self._cluster = cluster
        self._options = options = cluster.options
        self._disk = disk
        self.process = Process(
            cluster.timeline, self.name, cluster.seed_of(self.name), self._takes_s, stutters=options.stutters / 10
        )
        self._grace_s_max = 0.0
        self.process.start(self._run(options.settings[index]), self.name)

    async def _run(self, settings: Any) -> None:
        """From its start until it is killed."""
        store = self._open(settings)
        if store is None:
            self._cluster.crash_shard(self.index, noticed=True, back_after_s=self._options.look_every_s)
            return
        history = self._cluster.history_of(self.name)
        log: Any = QuietLog(self.name, self._hear_error)
        silence: Any = Silence()
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
        self._cluster.begins(self)
        self.is_serving = True
        self._cluster.network.serving[self.index] = self.process, Service(host)
        await host.run()

    def _open(self, settings: Any) -> Store | None:
        """Begin an epoch. None: the disk refuses, or the power goes meanwhile."""
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
        """End as on SIGTERM: finish what is under way, then call `ended`."""

        async def end() -> None:
            if self.host is not None:
                await self.host.drain(DRAIN_S)
                self.host.close()
            ended()

        self.process.start(end(), "drain")

    def kill(self, *, power: bool) -> None:
        """The process ends where it is, and perhaps its machine."""
        self.process.kill()
        if self._disk is not None:
            writes = [job for t in self.process.threads if t.name == "diloco-storage" for job in t.under_way]
            self._disk.cut_off(writes, power=power)

    def thaw(self) -> None:
        self.process.thaw()

    def check(self) -> None:
        """What must hold at any moment, of rounds."""
        host = self.host
        if host is None or self.process.frozen or not self.process.alive:
            return
        now = host.clock()
        for state in host.shard.fragments.values():
            collecting = state.round
            if collecting is None:
                continue
            invariants.rounds_make_the_next_version(state, collecting)
            invariants.rounds_are_bounded(state, collecting, self._options.learners_max)
            invariants.halves_are_bounded(state, collecting)
            invariants.contributions_are_whole(state, collecting)
            if collecting.quorum_at is not None:
                self._grace_s_max = max(self._grace_s_max, host.shard.grace_s())
                invariants.nobody_delays_a_round_beyond_its_grace(
                    state, collecting, host.shard.quorum(collecting), now - collecting.quorum_at,
                    self._grace_s_max + self._options.tick_s,
                )  # fmt: skip

    def _takes_s(self, threads: str) -> float:
        match threads:
            case "diloco-compute":
                return self._options.compute_s
            case "diloco-storage":
                return self._options.save_s
        return 0.0

    def _hear_error(self, what: str, facts: dict[str, Any]) -> None:
        """A shard says that something is wrong: is there a cause for it?"""
        match facts.get("code"):
            case "VERSION_DAMAGED":
                was_hurt = self._disk is not None and self._disk.was_hurt
                invariants.damage_has_a_cause(f"{what}: {facts.get('why')}", was_hurt=was_hurt)
            case "STORAGE":
                self._cluster.counts["saves refused"] += 1
        if (error := facts.get("trace")) is not None and self.process.alive:
            self._cluster.timeline.fail(error)
