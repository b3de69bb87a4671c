"""One process per data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from diloco_common.errors import InUse
from diloco_server.storage.filesystem import open_private


class FolderLock:
    """Holds a folder until `release`, or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, and InUse with the name of the owner."""
        self._descriptor = open_private(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise InUse(
                f"{folder} belongs to a running shard (pid {owner}): stop it, or give this one a folder of its own "
                "(shard.data_dir)"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in. Repeating it is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
