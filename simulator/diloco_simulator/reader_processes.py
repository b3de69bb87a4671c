"""Mirrors and standbys of the product in simulated processes. Mirrors may lie; standbys may be promoted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

from diloco_common.codec import Chunk
from diloco_common.codec.frames import framed
from diloco_common.errors import Superseded, WrongFolder
from diloco_common.trust.identity import Identity
from diloco_common.wire.follower import Follower
from diloco_common.wire.messages import FollowRequest, PullHeader, PullRequest, Role
from diloco_server.shell.host import ShardHost
from diloco_server.shell.readers import Mirror, Standby, tell_replaced
from diloco_server.shell.service import Service
from diloco_server.storage.standby import StandbyFolder, promote
from diloco_server.storage.store import FileStore, MemoryStore
from diloco_server.storage.version_file import Origin
from diloco_simulator.options import SOMETIMES
from diloco_simulator.shard_process import ShardProcess
from diloco_simulator.world.disk import ShardDisk
from diloco_simulator.world.process import SimulatedProcess
from diloco_simulator.world.stage import QuietLog, Stage, StageSilence
from diloco_simulator.world.transport import MemoryTransport

SITE = "here"
MIRRORS = 100
REPLACED = 2 * MIRRORS
"""Added to a shard's index: for the address of its mirror, and for the shard's own address after it was replaced."""
STANDBY_DISKS = 4
"""Added to the index of a disk, which is part of its seed. Each schedule has 8 indexes."""


def _nothing(*_: Any) -> None:
    """Readers push nothing."""


class _ReaderProcess:
    def __init__(self, cluster: Stage, role: Role, shard: int) -> None:
        self.name, self.shard = f"{role}-{shard}", shard
        self._cluster, self._options = cluster, cluster.options
        takes_s = {"diloco-compute": self._options.compute_s, "diloco-storage": self._options.save_s}
        self.process = SimulatedProcess(
            cluster.timeline, self.name, cluster.seed_of(self.name), lambda name: takes_s.get(name, 0.0)
        )
        log: Any = QuietLog(self.name, _nothing)
        self._log = log
        self.follower = Follower(self._dial(shard), Identity("local"), FollowRequest(role), self.process.world(), log)

    def _dial(self, address: int) -> MemoryTransport:
        network, path = self._cluster.network, (self.name, address)
        return MemoryTransport(network, self.process, path, _nothing, _nothing, self._options.call_s)


class MirrorProcess(_ReaderProcess):
    def __init__(self, cluster: Stage, shard: int) -> None:
        super().__init__(cluster, Role.MIRROR, shard)
        self.process.start(self._run(), self.name)

    async def _run(self) -> None:
        settings = self._options.settings[self.shard]
        placed = settings.shard.model_copy(update={"mirror_of": "its shard"})
        silence: Any = StageSilence()
        host = ShardHost(
            settings.model_copy(update={"shard": placed}), MemoryStore(1), self.process.world(), metrics=silence,
            log=self._log, tick_s=self._options.tick_s,
        )  # fmt: skip
        address = MIRRORS + self.shard
        self._cluster.network.serving[address] = self.process, _Liar(host, self._cluster, self.process)
        ticking = asyncio.create_task(host.run())
        await Mirror(host, self.follower).run(SITE, str(address))
        ticking.cancel()


class _Liar(Service):
    """Serves what its host holds, and sometimes something else."""

    def __init__(self, host: ShardHost, cluster: Stage, process: SimulatedProcess) -> None:
        super().__init__(host)
        self._cluster, self._process = cluster, process

    def pull(
        self, caller: Identity, request: PullRequest, ends_in_s: float = 0.0
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        true = super().pull(caller, request, ends_in_s)
        is_lie = not self._cluster.network.healed and self._process.random.random() < SOMETIMES
        self._cluster.count("answers of mirrors that are lies" if is_lie else "answers of mirrors")
        return self._bent(true) if is_lie else true

    async def _bent(self, parts: AsyncGenerator[PullHeader | Chunk, None]) -> AsyncGenerator[PullHeader | Chunk, None]:
        chance = self._process.random
        async for part in parts:
            if isinstance(part, PullHeader):
                other = [replace(part, epoch=part.epoch + 1), replace(part, version=part.version + 1)]
                changed = replace(part, base_version=None if part.base_version is not None else 1)
                yield chance.choice([part, changed, *other])
            else:
                bent = bytearray(part)
                bent[chance.randrange(len(bent))] ^= 1 << chance.randrange(8)
                yield framed(bytes(bent), chance.getrandbits(32)) if chance.random() < 0.3 else bytes(bent)


class StandbyProcess(_ReaderProcess):
    """Becomes the shard after `promote`."""

    def __init__(self, cluster: Stage, shard: int) -> None:
        super().__init__(cluster, Role.STANDBY, shard)
        self.disk = ShardDisk(STANDBY_DISKS + shard, cluster.options)
        self._origin = Origin.of(cluster.options.settings[shard])
        self._folder = StandbyFolder(self.disk.fake)
        threads = self.process.world().threads(1, "diloco-storage")
        self.standby = Standby(self.follower, self._folder, self._origin, threads, self._log)
        self._running = self.process.start(self.standby.run(), self.name)

    @property
    def is_ready(self) -> bool:
        """Whether it holds a version of every fragment."""
        return self.standby.ready()[0] and bool(self.follower.held)

    def promote(self) -> None:
        promote(self.disk.fake)
        self.process.kill()

    def tell(self, new: ShardProcess, old: ShardProcess, old_disk: ShardDisk, ended: Any) -> None:
        """The partition has healed: the promoted shard reaches the one that it replaced, which must end."""
        self._cluster.network.serving[REPLACED + self.shard] = old.process, Service(_host(old))

        async def until_told() -> None:
            path = f"promoted-{self.shard}", REPLACED + self.shard
            transport = MemoryTransport(
                self._cluster.network, new.process, path, _nothing, _nothing, self._options.call_s
            )
            told = await tell_replaced(_host(new), transport, Identity("local"))
            assert isinstance(told, Superseded), "the promoted shard stays"
            assert _host(old).replaced is not None
            ended()
            try:
                FileStore(old_disk.fake, self._origin, first_epoch=1)
            except WrongFolder:
                self._cluster.count("replaced shards that stay ended")
            else:
                raise AssertionError("the folder of a replaced shard serves again")

        new.process.start(until_told(), "telling")


def _host(shard: ShardProcess) -> ShardHost:
    assert shard.host is not None
    return shard.host


class SimulatedReaders:
    """The mirrors and standbys of a schedule, the shards that standbys have replaced, and what can be done to them."""

    def __init__(
        self, cluster: Stage, shards: dict[int, ShardProcess], disks: dict[int, ShardDisk],
        start_shard: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`shards`, `disks`: the current ones, by index. A promotion replaces one; `start_shard` starts the new one."""
        self._cluster, self._shards, self._disks, self._start_shard = cluster, shards, disks, start_shard
        self.promoted: dict[int, StandbyProcess] = {}
        self._mirrors: dict[int, MirrorProcess] = {}
        self._standbys: dict[int, StandbyProcess] = {}
        """Those that are not promoted yet."""
        self._replaced: dict[int, tuple[ShardProcess, ShardDisk]] = {}
        """Shards that live on beside the promoted ones."""

    @property
    def replaced_disks(self) -> Iterator[ShardDisk]:
        return (disk for _, disk in self._replaced.values())

    def start_mirror(self, index: int) -> None:
        if (mirror := self._mirrors.get(index)) is None or not mirror.process.alive:
            self._cluster.starts[f"mirror-{index}"] += 1
            self._mirrors[index] = MirrorProcess(self._cluster, index)
            self._cluster.processes.append(self._mirrors[index].process)

    def start_standby(self, index: int) -> None:
        self._standbys[index] = StandbyProcess(self._cluster, index)
        self._cluster.processes.append(self._standbys[index].process)

    def crash_mirror(self, index: int, *, noticed: bool, back_after_s: float) -> None:
        if (mirror := self._mirrors.get(index)) is not None and mirror.process.alive:
            mirror.process.kill()
            self._cluster.network.gone(mirror.process, noticed)
            self._cluster.timeline.later(back_after_s, self.start_mirror, index)

    def freeze_mirror(self, index: int, lasts_s: float) -> None:
        if (mirror := self._mirrors.get(index)) is not None and mirror.process.alive:
            mirror.process.freeze()
            self._cluster.timeline.later(lasts_s, _thaw, mirror)

    def promote(self, index: int, *, still_lives: bool, noticed: bool) -> None:
        """Promote a standby. The old shard is gone with its machine, or lives on for a while for some learners."""
        cluster, standby, old = self._cluster, self._standbys.get(index), self._shards[index]
        if standby is None or not standby.process.alive or not standby.is_ready or old.process.frozen:
            return
        if still_lives and not (old.process.alive and old.is_serving):
            return
        if old.host is None or old.host.shard.draining:
            return
        cluster.note("promote", index, still_lives)
        cluster.count("standbys promoted" if not still_lives else "standbys promoted beside their shard")
        standby.promote()
        if still_lives:
            for learner_id in cluster.learner_ids[::2]:
                cluster.network.apart[learner_id, index] = cluster.network.serving[index]
            self._replaced[index] = old, self._disks[index]
        else:
            self._end(old, noticed=noticed)
        del self._standbys[index], self._shards[index]
        self._disks[index] = standby.disk
        self.promoted[index] = standby
        self._start_shard(index)

    def thaw(self) -> None:
        """Thaw all mirrors and standbys, and restart dead mirrors."""
        for index, mirror in self._mirrors.items():
            _thaw(mirror)
            self.start_mirror(index)
        for standby in self._standbys.values():
            _thaw(standby)

    def reunite(self) -> None:
        """The network is whole again: promoted shards can reach the shards that they replaced."""
        for index in self._replaced:
            self._reunite(index)

    def _reunite(self, index: int) -> None:
        """Once the promoted shard serves, let it reach the one that it replaced."""
        new, (old, disk), apart = self._shards[index], self._replaced[index], self._cluster.network.apart
        if not new.is_serving:
            self._cluster.timeline.later(self._cluster.options.look_every_s, self._reunite, index)
            return

        def ended() -> None:
            if old.process.alive:
                self._end(old, noticed=True)
            for path in [path for path in apart if path[1] == index]:
                del apart[path]

        if old.process.alive:
            self.promoted[index].tell(new, old, disk, ended)
        else:
            self._cluster.count("replaced shards that died meanwhile")
            ended()

    def _end(self, shard: ShardProcess, *, noticed: bool) -> None:
        shard.kill(power=False)
        self._cluster.network.gone(shard.process, noticed)


def _thaw(reader: MirrorProcess | StandbyProcess) -> None:
    if reader.process.alive and reader.process.frozen:
        reader.process.thaw()
