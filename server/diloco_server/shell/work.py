"""The means by which a host makes versions: one compute thread, jobs in the event loop, and the disk.

Arithmetic on whole fragments (seeds, merges, encodings) runs on one thread, because two OpenMP teams on the same cores
are slower than one. `Keeper` writes versions on its own threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from diloco_common.errors import Draining
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ComputePhase, ShardMetrics
from diloco_common.ports import Clock, World
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Committed
from diloco_server.core.effects import MergeRound, Tell
from diloco_server.core.shard import Shard
from diloco_server.shell.driver import Job
from diloco_server.shell.keeper import Checkpointer, Keeper
from diloco_server.shell.streams import ControlStreams, Readers
from diloco_server.storage.store import Store
from diloco_server.storage.version_file import StoredVersion

T = TypeVar("T")


class VersionWork:
    """Carries out a shard's effects: the `driver.Shell` of a host. Owned by its event loop."""

    def __init__(
        self, shard: Shard, store: Store, world: World, clock: Clock, metrics: ShardMetrics, log: Log,
        advance: Callable[[], None],
    ) -> None:  # fmt: skip
        """`advance`: lets the core decide; called after a job."""
        self.clock, self.stopwatch = clock, world.clock
        self.streams, self.readers = ControlStreams(), Readers()
        self.checkpointer = Checkpointer(shard.settings, world, metrics, log)
        self.keeper = Keeper(store, world, metrics, log, self._written)
        self.closed = False
        self.broken = asyncio.Event()
        """Set when this process must end: ticks stopped, or a failed merge left values that belong to no version."""
        self.why_broken = ""
        self._shard, self._metrics, self._log, self._advance = shard, metrics, log, advance
        self.thread = world.threads(1, "diloco-compute")
        self._cpu_clock = world.cpu_clock
        self._give_back = world.give_back
        self._computed_last: ComputePhase | None = None  # owned by the compute thread
        self._jobs: dict[asyncio.Task[None], None] = {}
        # Not a set: `close` cancels them in the order of their start, which is the same in every run with one seed.
        self._moved = asyncio.Event()  # set when a condition of `until` may have changed

    def __len__(self) -> int:
        """The number of running jobs."""
        return len(self._jobs)

    def moved(self) -> None:
        self._moved.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition that only the host's events change."""
        while not is_so():
            self._moved.clear()
            await self._moved.wait()

    def tell(self, tell: Tell) -> None:
        self.streams.tell(tell)

    def start(self, job: Job, name: str) -> None:
        """Run a job, then advance. Does nothing once the shard has ended."""
        if self.closed:  # the last pushes may have closed a round
            return
        task = asyncio.create_task(self._run(job), name=name)
        self._jobs[task] = None
        task.add_done_callback(self._finished)

    async def _run(self, job: Job) -> None:
        await job()
        self._advance()

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        if not task.cancelled() and task.exception() is not None:
            self._log.error("job failed", trace=task.exception(), job=task.get_name())
        self.moved()

    async def compute(self, phase: ComputePhase, work: Callable[[], T]) -> T:
        """Run arithmetic on the compute thread, in the order of the calls. Raises Draining once the shard has ended."""
        self.check_open()

        def timed() -> T:
            if self._computed_last == "seed":  # the seed's bytes are free, and contributions are smaller
                self._give_back()
            self._computed_last = phase
            began = self._cpu_clock()
            try:
                return work()
            finally:
                self._metrics.rounds.computed(phase, self._cpu_clock() - began)

        return await asyncio.get_running_loop().run_in_executor(self.thread, timed)

    def check_open(self) -> None:
        if self.closed:
            raise Draining("this shard has ended; call again when it is back")

    def failed(self, merge: MergeRound, error: Exception) -> None:
        self.end(f"version {merge.version} of fragment {merge.fragment_id} cannot be made: {error}")

    def end(self, why: str) -> None:
        """Make this process end. Only the first reason counts."""
        self.why_broken = self.why_broken or why
        self.broken.set()

    async def keep(self, version: StoredVersion) -> None:
        """Make a version durable. It may be announced once this returns.

        By then, a standby that keeps pace has the previous version. This waits for one that lags as long as a lease,
        and then no longer until it has caught up.
        """
        assert self._shard.manifest is not None
        await self.keeper.keep(version, self._shard.manifest)
        fragment_id, number, copies = version.record.fragment_id, version.record.version, self.readers.copies
        began = self.stopwatch()
        try:
            async with asyncio.timeout(self._shard.settings.lease.lease_s):
                await self.until(
                    lambda: self.closed or self._shard.draining or copies.may_announce(fragment_id, number)
                )
        except TimeoutError:
            self._log.warning("the standby does not keep pace", fragment=fragment_id, version=number)
            copies.falls_behind(fragment_id)
        if self.readers.has_standby:
            self._metrics.storage.standby_wait_seconds.observe(self.stopwatch() - began)

    def _written(self, fragment_id: int, version: int, manifest: Manifest) -> None:
        self.checkpointer.written(fragment_id, version, manifest)
        self.readers.is_on_disk(Committed(fragment_id, version, self._shard.epoch))

    def copied(self, fragment_id: int, version: int) -> None:
        """A standby has this version."""
        self.readers.copied(fragment_id, version, self._shard.versions.owned(fragment_id).version)
        self.moved()

    def close(self) -> None:
        """End all streams, the compute thread, and unfinished work."""
        self.closed = True
        for job in self._jobs:
            job.cancel()
        self.streams.end_all()
        self.readers.end_all()
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.keeper.close()
        self.checkpointer.close()
        self.moved()

    async def writes_ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no thread writes to the data folder. False if one still does after `timeout_s`."""
        ended = await asyncio.gather(self.keeper.ended(timeout_s), self.checkpointer.ended(timeout_s))
        return all(ended)
