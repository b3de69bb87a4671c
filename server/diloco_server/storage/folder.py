"""Opens the store that the settings name."""

from __future__ import annotations

from diloco_common.errors import DataError
from diloco_common.settings import Settings
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.lock import FolderLock
from diloco_server.storage.store import FileStore, MemoryStore, Store
from diloco_server.storage.version import Origin


def open_store(settings: Settings, *, epoch_in_memory: int, first_epoch: int) -> tuple[Store, FolderLock | None]:
    """The store, and the lock on its folder. Raises InUse, and DataError if the disk refuses.

    `epoch_in_memory` is for a shard without a folder, `first_epoch` the least epoch of one that has a folder.
    """
    folder = settings.shard.data_dir
    if folder is None:
        return MemoryStore(epoch_in_memory), None
    lock = None
    try:
        disk = Disk(folder)
        lock = FolderLock(folder)
        return FileStore(disk, Origin.of(settings), first_epoch=first_epoch), lock
    except OSError as error:
        if lock is not None:
            lock.release()
        raise DataError(
            f"shard.data_dir {folder} cannot be used: {error.strerror}. Give a folder that this process may write to, "
            "on a disk with free space"
        ) from None
