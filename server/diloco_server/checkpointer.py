"""Makes a shard's regular checkpoints on a thread of its own, so that neither rounds nor the writing of versions wait.

A checkpoint that fails is told and tried again with the next version; training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from diloco_common.errors import DataError
from diloco_common.logs import Log
from diloco_common.manifest import Manifest
from diloco_common.metrics import ShardMetrics
from diloco_common.ports import World
from diloco_common.settings import Settings
from diloco_server.storage.regular import RegularCheckpoints
from diloco_server.writers import Writers


class Checkpointer:
    """Owned by the shard's event loop; does nothing where the settings ask for no checkpoints."""

    def __init__(self, settings: Settings, world: World, metrics: ShardMetrics, log: Log) -> None:
        self._index = settings.shard.index
        self._metrics, self._log = metrics, log
        self._regular: RegularCheckpoints | None = None
        if settings.checkpoint.every and settings.shard.data_dir is not None:
            checkpoint = settings.checkpoint
            self._regular = RegularCheckpoints(settings.shard.data_dir, checkpoint.every, checkpoint.keep)
        self._thread = Writers(world.threads(1, "diloco-checkpoint"))

    def begin(self, recovered: Mapping[int, int], manifest: Manifest) -> None:
        """What the shard came back with: fragment -> version."""
        if self._regular is not None:
            self._submit(partial(self._regular.begin, recovered, manifest, self._index))

    def written(self, fragment_id: int, version: int, manifest: Manifest) -> None:
        """A version is on disk."""
        if self._regular is not None:
            self._submit(partial(self._regular.written, fragment_id, version, manifest, self._index))

    def close(self) -> None:
        self._thread.close()

    async def ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no checkpoint is being made. False if one hangs for longer than `timeout_s`
        seconds."""
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
