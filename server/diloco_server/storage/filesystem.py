"""The few calls by which a store touches the disk, and the real disk behind them.

The simulator puts a disk of its own under the same store: one that loses what was not synced, tears and rots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class NewFile(Protocol):
    """A file that is being written, from its beginning. Every call raises OSError where the disk does."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`, bytes."""

    def sync(self) -> None:
        """Return once what was written outlives a crash of the machine. The file's name may not, see `sync_names`."""

    def close(self) -> None: ...


class OldFile(Protocol):
    """A file that is being read, from its beginning."""

    size: int
    """Bytes."""

    def read_into(self, out: memoryview, offset: int) -> int:
        """Read bytes from `offset`, as many as `out` takes; returns how many there were."""

    def close(self) -> None: ...


class Files(Protocol):
    """One folder of files without subfolders, to read. Every call raises OSError where the disk does."""

    def names(self) -> Sequence[str]: ...

    def open(self, name: str) -> OldFile: ...


class FileSystem(Files, Protocol):
    """One that is written, too."""

    def create(self, name: str) -> NewFile:
        """A new, empty file in place of any of that name."""

    def rename(self, old: str, new: str) -> None:
        """Replaces a file of the new name; whoever looks sees one of the two."""

    def remove(self, name: str) -> None: ...

    def sync_names(self) -> None:
        """Return once all created, renamed and removed names outlive a crash of the machine."""

    def free_bytes(self) -> int:
        """Room that is left."""


class Disk:
    """A folder of the machine. Made where there is none. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        new = [place for place in (folder, *folder.parents) if not place.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in new:  # a name outlives a power cut once the folder that it is in was synced
            _sync_folder(place.parent)

    def names(self) -> Sequence[str]:
        return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))

    def create(self, name: str) -> NewFile:
        return _NewDiskFile(self.folder / name)

    def open(self, name: str) -> OldFile:
        return _OldDiskFile(self.folder / name)

    def rename(self, old: str, new: str) -> None:
        (self.folder / old).rename(self.folder / new)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sync_names(self) -> None:
        _sync_folder(self.folder)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free


class _NewDiskFile:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _OldDiskFile:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, out: memoryview, offset: int) -> int:
        done = 0
        while done < len(out) and (count := os.preadv(self._descriptor, [out[done:]], offset + done)):
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
