"""One shard of the product in a simulated process: host, service and store as they are, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from diloco_common.messages import Committed
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
RECOVER_AGAIN_S = 0.3


class ShardProcess:
    """A process that serves one shard: from a disk, or from memory, and then with it everything is lost."""

    def __init__(self, cluster: Cluster, index: int, disk: ShardDisk | None) -> None:
        self.index = index
        self.name = f"shard-{index}"
        self.host: ShardHost | None = None
        """None until it has begun an epoch."""
        self.is_serving = False
        self._cluster = cluster
        self._options = cluster.options
        self._disk = disk
        seed = f"{self._options.seed} {self.name} {cluster.starts[self.name]}"
        self.process = Process(cluster.timeline, self.name, seed, self._takes_s)
        self._grace_s_max = 0.0
        self.process.start(self._run(), self.name)

    async def _run(self) -> None:
        """From its start until it is killed."""
        store = await self._open()
        if store is None:
            return
        history = self._cluster.history(self.name)
        log: Any = QuietLog(self.name, self._on_error)
        metrics: Any = Silence()
        settings = self._options.settings[self.index]
        host = ShardHost(settings, store, self.process.world(), metrics=metrics, log=log, history=history)
        if self._options.forgets:
            host.shard.membership.max_gone = 0
        self.host = host
        try:
            await host.recover()
        except NothingIntact as error:
            invariants.damage_has_a_cause(str(error), was_hurt=bool(self._disk and self._disk.hurt))
            assert self._disk is not None
            self._disk.remove_named(error)
            self._cluster.stop_shard(self)
            return
        self._cluster.serve(self.index, self.process, Service(host))
        self.is_serving = True
        await host.run()

    async def _open(self) -> Store | None:
        """Begin an epoch. None: the disk, or its power, fails meanwhile, and this process ends."""
        if self._disk is None:
            return MemoryStore(self.process.random.randrange(1, 2**31))
        self._disk.plan_interruption()
        try:
            unknown = EPOCH_OF_A_NEW_FOLDER + int(1000 * self._cluster.timeline.now)
            return FileStore(self._disk.fake, Origin.of(self._options.settings[self.index]), epoch_unknown=unknown)
        except Crashed:
            self._disk.fake.crash()
        except OSError:
            pass
        finally:
            self._disk.fake.crash_at = None
        self._cluster.stop_shard(self)
        return None

    def kill(self, *, power: bool) -> None:
        """The process ends where it is, and perhaps its machine."""
        if self._disk is not None:
            writes = [job for threads in self.process.threads if threads.name in STORAGE for job in threads.under_way]
            self.process.kill()
            self._disk.cut_off(writes, power=power)
        self.process.kill()
