"""The few disk calls of a store, their implementation on a real disk, and the lock on its folder.

Files are private to their owner, whatever the umask: files 0600, folders 0700. The model and its training data are only
as private as the weights, and every byte of the weights is here.

The simulator puts its own disk under the same store. That disk loses unsynced data, tears writes and rots.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from diloco_common.errors import InUse


class NewFile(Protocol):
    """A file being written from its beginning. Every call may raise OSError."""

    def write(self, data: memoryview) -> None:
        """Append all bytes of `data`."""

    def sync(self) -> None:
        """Return once the written bytes would survive a crash of the machine. For the file's name, see `sync_names`."""

    def close(self) -> None: ...


class OldFile(Protocol):
    """A file being read."""

    size: int

    def read_into(self, out: memoryview, offset: int) -> int:
        """Read from `offset` until `out` is full or the file ends; return the number of bytes read."""

    def close(self) -> None: ...


class Files(Protocol):
    """The files of one folder without subfolders, to be read only. Every call may raise OSError."""

    def names(self) -> Sequence[str]: ...

    def open(self, name: str) -> OldFile: ...


class FileSystem(Files, Protocol):
    """A folder that can also be written to."""

    def create(self, name: str) -> NewFile:
        """Create an empty file. It replaces any file of that name."""

    def rename(self, old: str, new: str) -> None:
        """Replace any file of the new name, atomically: readers see the old file or the new one."""

    def remove(self, name: str) -> None: ...

    def sync_names(self) -> None:
        """Return once all created, renamed and removed names would survive a crash of the machine."""

    def free_bytes(self) -> int:
        """Free space, in bytes."""


class Disk:
    """A real folder, created for its owner alone if it is missing. Raises OSError.

    An existing folder keeps its mode, because it may be a volume that a group uses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        new = [place for place in (folder, *folder.parents) if not place.is_dir()]
        for place in reversed(new):
            with contextlib.suppress(FileExistsError):  # another process was faster
                place.mkdir(mode=0o700)
        folder.mkdir(exist_ok=True)  # raises if it is not a folder
        for place in new:  # a name survives a power cut once its folder is synced
            sync_path(place.parent)

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
        sync_path(self.folder)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free


class _NewDiskFile:
    def __init__(self, path: Path) -> None:
        self._descriptor = open_private(path, os.O_WRONLY | os.O_TRUNC)

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


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner can use, creating it if needed. Returns its descriptor. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_mode & 0o077:  # it was there before
        with contextlib.suppress(PermissionError):  # some disks have no modes (vfat)
            os.fchmod(descriptor, 0o600)
    return descriptor


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a crash. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def owner_lives(folder: Path) -> bool:
    """Whether the process that last locked a folder is alive. Takes no lock, which would keep others out."""
    try:
        return Path("/proc", (folder / "lock").read_text().strip()).is_dir()
    except OSError:
        return False


class FolderLock:
    """Locks a folder until `release`, or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, and an InUse that names the owner."""
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
        """Unlock the folder. Calls after the first do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
