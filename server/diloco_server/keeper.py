"""Makes versions durable on threads of its own, so that a slow disk holds up nothing but the fragment it writes.

Durability "version": `keep` returns once the version is on disk, however often it takes. "interval": it returns at
once, and the fragment is written when `interval_s` have passed since its last write. `hold` keeps values from changing
while they are written. What waits are references to values that are in memory anyhow, one per fragment: a disk that is
full or gone costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from diloco_common.logs import Log
from diloco_common.manifest import Manifest
from diloco_common.metrics import ShardMetrics
from diloco_common.ports import World
from diloco_common.settings import ShardSettings
from diloco_server.storage.store import Store
from diloco_server.storage.version import StoredVersion
from diloco_server.writers import Writers

RETRY_S = 1.0
WRITERS = 2
"""While one waits for the disk, another prepares its bytes; more only split the disk's bandwidth."""
SAY_AGAIN_S = 30.0
"""How often a disk that goes on failing is mentioned."""


class Keeper:
    """Saves versions. Owned by the shard's event loop."""

    def __init__(
        self,
        store: Store,
        settings: ShardSettings,
        world: World,
        metrics: ShardMetrics,
        log: Log,
        written: Callable[[int, int, Manifest], None] = lambda *_: None,
    ) -> None:
        """`written` is told fragment and version once they are on disk."""
        self._store = store
        self._clock = world.clock
        self._interval_s = settings.interval_s if settings.durability == "interval" else 0.0
        self._metrics = metrics
        self._written = written
        self._log = log
        self._threads = Writers(world.threads(WRITERS, "diloco-storage"))
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._due: dict[int, tuple[StoredVersion, Manifest]] = {}  # fragment -> announced but not on disk
        self._waiting = 0  # versions that are announced once they are on disk
        self._written_at: dict[int, float] = {}
        self._writing: dict[int, asyncio.Task[None]] = {}
        self._hurry = asyncio.Event()
        self._failing: dict[int, str] = {}  # fragment -> why its version is not durable
        self._said_at = 0.0
        self.bytes_saved = 0
        """Of versions that this process made durable."""
        self.free_bytes: int | None = None
        """Of the disk, after the last write; None: not known."""

    @property
    def failing(self) -> str:
        """What the disk says, while it takes no versions; else nothing."""
        return next(iter(self._failing.values()), "")

    @property
    def unwritten(self) -> int:
        """Fragments whose announced version is not on disk yet."""
        return len(self._due)

    @property
    def not_durable(self) -> int:
        """Versions that are computed but not on disk yet, announced or not."""
        return self._waiting + len(self._due)

    def hold(self, fragment_id: int) -> asyncio.Lock:
        """Hold this while the fragment's values change and until `keep` has returned."""
        return self._locks[fragment_id]

    async def keep(self, version: StoredVersion, manifest: Manifest) -> None:
        """Make a version durable, or see to it that it soon is. It may be announced when this returns."""
        fragment_id = version.record.fragment_id
        if not self._interval_s or fragment_id not in self._written_at:  # what a run begins with is always written
            self._waiting += 1
            try:
                while not await self._write(version, manifest):  # noqa: ASYNC110 - a disk tells nobody
                    await asyncio.sleep(RETRY_S)
            finally:
                self._waiting -= 1
            return
        self._due[fragment_id] = (version, manifest)
        if fragment_id not in self._writing:
            writing = asyncio.create_task(self._write_later(fragment_id), name=f"write-{fragment_id}")
            self._writing[fragment_id] = writing
            writing.add_done_callback(lambda _: self._writing.pop(fragment_id, None))

    def recovered(self, fragment_id: int) -> None:
        """This fragment's version is on disk already."""
        self._written_at[fragment_id] = self._clock()

    def drop(self, fragment_id: int) -> None:
        """What waits to be written of this fragment must not be: its values are no longer those of a version."""
        self._due.pop(fragment_id, None)

    async def flush(self, timeout_s: float) -> None:
        """Write what was announced but not written, if the disk takes it in time."""
        self._hurry.set()
        if self._writing:
            await asyncio.wait(self._writing.values(), timeout=timeout_s)

    def close(self) -> None:
        for writing in self._writing.values():
            writing.cancel()
        self._threads.close()

    async def ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no write is under way. False if one hangs for longer than `timeout_s` seconds."""
        return await self._threads.ended(timeout_s)

    # ------------------------------------------------------------ helpers

    async def _write_later(self, fragment_id: int) -> None:
        """Write what is newest once the fragment's time has come."""
        left_s = self._written_at[fragment_id] + self._interval_s - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left_s)):
                await self._hurry.wait()
        while True:
            async with self._locks[fragment_id]:
                due = self._due.get(fragment_id)
                if due is None:
                    return
                if await self._write(*due):
                    del self._due[fragment_id]
                    return
            await asyncio.sleep(RETRY_S)  # rounds of the fragment go on meanwhile

    async def _write(self, version: StoredVersion, manifest: Manifest) -> bool:
        """Try to write a version; False if the disk refused."""
        record, began = version.record, self._clock()
        try:
            num_bytes = await asyncio.wrap_future(self._threads.submit(partial(self._save, version, manifest)))
        except OSError as error:
            self._failed(version, error)
            return False
        now = self._clock()
        self._written_at[record.fragment_id] = now
        self._metrics.storage.save_seconds.observe(now - began)
        self.bytes_saved += num_bytes
        self._written(record.fragment_id, record.version, manifest)
        if self._failing.pop(record.fragment_id, None) and not self._failing:
            self._log.event("storage works again", fragment=record.fragment_id, version=record.version)
        return True

    def _save(self, version: StoredVersion, manifest: Manifest) -> int:
        """On a storage thread: looking at a disk may hang as writing to it may."""
        try:
            return self._store.save(version, manifest)
        finally:
            with contextlib.suppress(OSError):
                free = self._store.free_bytes()
                if free is not None:
                    self._metrics.storage.disk_free.set(free)
                    self.free_bytes = free

    def _failed(self, version: StoredVersion, error: OSError) -> None:
        self._metrics.storage.save_failures.inc()
        record, now = version.record, self._clock()
        if not self._failing or now - self._said_at > SAY_AGAIN_S:
            what = "version not durable" if self._interval_s else "version not durable, so not announced"
            self._log.error(
                f"{what}; trying again", code="STORAGE", fragment=record.fragment_id, version=record.version, why=error
            )
            self._said_at = now
        self._failing[record.fragment_id] = str(error)
