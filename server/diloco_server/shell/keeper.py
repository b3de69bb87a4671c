"""Writes a shard's versions to disk on its own threads, and recovers them at the start.

A slow disk delays only the fragment that it writes. `Keeper.keep` returns once the version is on disk, after any number
of attempts. Waiting versions are references to values in memory, one per fragment, so a full or missing disk costs no
memory.

Regular checkpoints run on another thread, so neither rounds nor version writes wait for them. A checkpoint that fails
is logged and tried again with the next version; training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from diloco_common.errors import DataError, Draining, WrongFolder
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.ports import World
from diloco_common.settings import Settings
from diloco_common.wire.calls import LONGEST_S, SAY_EVERY_S
from diloco_common.wire.manifest import Fragment, Manifest, model_digest
from diloco_server.core import arithmetic
from diloco_server.core.arithmetic import Values, VersionRules
from diloco_server.core.fragment import Restored
from diloco_server.core.outer import OuterOptimizer
from diloco_server.storage.folders import RegularCheckpoints
from diloco_server.storage.store import Found, Store
from diloco_server.storage.version_file import StoredVersion

T = TypeVar("T")


class Writers:
    """Threads that write to a data folder. Owned by one event loop.

    Tracks whether a thread still writes, since a write that hangs cannot be cancelled.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._under_way: set[Future[Any]] = set()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._threads.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def close(self) -> None:
        """Start no more work, and do not wait for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no thread writes. False if one still does after `timeout_s` seconds."""
        waits = [asyncio.wrap_future(future) for future in self._under_way.copy()]
        if not waits:
            return True
        done, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in done:
            if not wait.cancelled():
                wait.exception()  # already reported to the submitter
        for wait in pending:
            wait.cancel()  # the write itself continues
        return not pending


class Keeper:
    """Writes versions to disk. Owned by the shard's event loop."""

    def __init__(
        self,
        store: Store,
        world: World,
        metrics: ShardMetrics,
        log: Log,
        written: Callable[[int, int, Manifest], None] = lambda *_: None,
    ) -> None:
        """`written`: called with fragment, version and manifest once they are on disk."""
        self._store = store
        self._clock = world.clock
        self._metrics = metrics
        self._written = written
        self._log = log
        # One thread prepares its bytes while the other waits for the disk; more would only share the disk's bandwidth.
        self._threads = Writers(world.threads(2, "diloco-storage"))
        self.not_durable = 0
        """How many versions are computed but not on disk yet; they are announced once they are."""
        self._failing: dict[int, str] = {}  # fragment -> why its version is not durable
        self._said_at = 0.0
        self.bytes_saved = 0
        """Bytes of versions that this process made durable."""
        self.free_bytes: int | None = None
        """Free bytes on the disk after the last write; None: unknown."""

    @property
    def failing(self) -> str:
        """The disk's error while it refuses versions; otherwise empty."""
        return next(iter(self._failing.values()), "")

    async def keep(self, version: StoredVersion, manifest: Manifest) -> None:
        """Make a version durable. It may be announced once this returns."""
        self.not_durable += 1
        try:
            while not await self._write(version, manifest):  # noqa: ASYNC110 - a disk sends no event
                await asyncio.sleep(LONGEST_S)
        finally:
            self.not_durable -= 1

    async def read(self, work: Callable[[], T]) -> T:
        """Run work on a storage thread, such as a read. Raises Draining after `close`."""
        try:
            looking = self._threads.submit(work)
        except RuntimeError:  # closed
            raise Draining("this shard has ended; call again when it is back") from None
        return await asyncio.wrap_future(looking)

    def close(self) -> None:
        self._threads.close()

    async def ended(self, timeout_s: float) -> bool:
        """See `Writers.ended`."""
        return await self._threads.ended(timeout_s)

    # ------------------------------------------------------------ helpers

    async def _write(self, version: StoredVersion, manifest: Manifest) -> bool:
        """Try to write a version; False if the disk refused."""
        record, began = version.record, self._clock()
        try:
            num_bytes = await asyncio.wrap_future(self._threads.submit(partial(self._save, version, manifest)))
        except OSError as error:
            self._failed(version, error)
            return False
        self._metrics.storage.save_seconds.observe(self._clock() - began)
        self.bytes_saved += num_bytes
        self._written(record.fragment_id, record.version, manifest)
        if self._failing.pop(record.fragment_id, None) and not self._failing:
            self._log.event("storage works again", fragment=record.fragment_id, version=record.version)
        return True

    def _save(self, version: StoredVersion, manifest: Manifest) -> int:
        """Save a version. Runs on a storage thread, because even reading the free space may hang."""
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
        if not self._failing or now - self._said_at > SAY_EVERY_S:
            self._log.error(
                "version not durable, so not announced; trying again", code="STORAGE", fragment=record.fragment_id,
                version=record.version, why=error,
            )  # fmt: skip
            self._said_at = now
        self._failing[record.fragment_id] = str(error)


class Checkpointer:
    """Makes regular checkpoints, if the settings ask for them. Owned by the shard's event loop."""

    def __init__(self, settings: Settings, world: World, metrics: ShardMetrics, log: Log) -> None:
        self._index = settings.shard.index
        self._metrics, self._log = metrics, log
        self._regular: RegularCheckpoints | None = None
        if settings.checkpoint.every and settings.shard.data_dir is not None:
            checkpoint = settings.checkpoint
            self._regular = RegularCheckpoints(settings.shard.data_dir, checkpoint.every, checkpoint.keep)
        self._thread = Writers(world.threads(1, "diloco-checkpoint"))

    def begin(self, recovered: Mapping[int, int], manifest: Manifest) -> None:
        """Continue after a start. `recovered`: fragment -> the version that the shard restored."""
        if self._regular is not None:
            self._submit(partial(self._regular.begin, recovered, manifest, self._index))

    def written(self, fragment_id: int, version: int, manifest: Manifest) -> None:
        if self._regular is not None:
            self._submit(partial(self._regular.written, fragment_id, version, manifest, self._index))

    def close(self) -> None:
        self._thread.close()

    async def ended(self, timeout_s: float) -> bool:
        """See `Writers.ended`."""
        return await self._thread.ended(timeout_s)

    def _submit(self, work: Callable[[], list[int]]) -> None:
        self._thread.submit(partial(self._work, work))

    def _work(self, work: Callable[[], list[int]]) -> None:
        try:
            for number in work():
                self._metrics.storage.checkpoint_version.set(number)
                self._log.event("checkpoint made", version=number)
        except (OSError, DataError) as error:
            self._metrics.storage.checkpoint_failures.inc()
            self._log.error("checkpoint failed; the next version tries again", code="CHECKPOINT", why=error)


def recover(
    store: Store, settings: Settings, rules_of: Callable[[Fragment], VersionRules], log: Log
) -> tuple[Manifest, list[Restored]] | None:
    """The manifest and the versions to continue from; None if there are none. May take seconds.

    Raises DataError if no version can be used, or if one cannot be read now.
    """
    try:
        recovered = store.recover()
    except OSError as error:
        raise DataError(
            f"a version in shard.data_dir cannot be read or put aside now ({error.filename}: {error.strerror}). It may "
            "be intact, so the shard does not skip it: fix the cause, and start the shard again"
        ) from None
    for words in recovered.damage:
        log.error("version damaged or missing; using the one before", code="VERSION_DAMAGED", why=words)
    if recovered.manifest is None:
        return None
    if settings.run.model not in ("", found := model_digest(recovered.manifest.tensors)):
        raise WrongFolder(
            f"the data folder holds versions of the model {found}, but run.model is {settings.run.model}: give the "
            "settings that made the folder, or another folder (shard.data_dir)"
        )
    fragments = {f.fragment_id: f for f in recovered.manifest.fragments}
    restored = [
        _restored(found, settings, fragment, rules_of(fragment).optimizer)
        for found in recovered.versions
        for fragment in [fragments[found.stored.record.fragment_id]]
    ]
    for r in restored:
        log.event(
            "fragment recovered", fragment=r.record.fragment_id, epoch=r.record.epoch, version=r.record.version,
            new_line=r.is_new_line,
        )  # fmt: skip
    _name_missing(recovered.manifest, restored, settings, log)
    return recovered.manifest, restored


def _name_missing(manifest: Manifest, restored: list[Restored], settings: Settings, log: Log) -> None:
    """Log fragments that have no file: they were never seeded, or their files were removed."""
    there = {r.record.fragment_id for r in restored}
    missing = [f.fragment_id for f in manifest.owned_by(settings.shard.index) if f.fragment_id not in there]
    if missing and any(r.record.version > 0 for r in restored):
        log.error(
            "fragments have no file, although others have versions: learners that hold them will seed them again, as "
            "version 0. If they had versions, stop this shard and restore a checkpoint",
            code="VERSION_DAMAGED", fragments=missing,
        )  # fmt: skip


def _restored(found: Found, settings: Settings, fragment: Fragment, optimizer: OuterOptimizer) -> Restored:
    stored, pull = found.stored, settings.sync.pull
    if len(stored.values.buffers) != optimizer.num_buffers:
        raise WrongFolder(
            f"the data folder holds {len(stored.values.buffers)} buffers of the outer optimizer per fragment, but "
            f"outer.optimizer {settings.outer.optimizer} with momentum {settings.outer.momentum} has "
            f"{optimizer.num_buffers}: give the settings that made the folder, or another folder (shard.data_dir)"
        )
    buffers = [b.to(optimizer.buffer_dtype) for b in stored.values.buffers]
    values = Values(stored.values.theta, buffers, stored.values.average)
    is_same_encoding = found.pull == pull
    if stored.anchor is not None and is_same_encoding:
        published = arithmetic.Published(stored.anchor)
    else:
        published = arithmetic.publish(values, fragment.encoding(pull))
    return Restored(stored.record, values, published, found.is_behind or not is_same_encoding)
