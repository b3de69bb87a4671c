"""Small disks that can be filled, for the data folders of shards: tmpfs, in a mount namespace of this process alone.

Needs root. The mounts vanish when this process and its children end in any way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from diloco_common.errors import ConfigError

DISK_MIB = 64
_BALLAST = "ballast"
_NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS. (os.unshare exists only from Python 3.12 on.)"""


class SmallDisks:
    """One disk per shard."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Mount a disk at each folder. `folders`: name of a shard -> its data folder. Raises ConfigError."""
        self._folders = dict(folders)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
            raise _refused(os.strerror(ctypes.get_errno()))
        _mount("--make-rprivate", "/")
        for folder in self._folders.values():
            folder.mkdir(parents=True, exist_ok=True)
            _mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "diloco-chaos", str(folder))

    def fill(self, name: str) -> None:
        """Use up the disk to its last byte."""
        with (self._folders[name] / _BALLAST).open("wb", buffering=0) as ballast:
            chunk = bytes(1 << 20)
            while chunk:
                try:
                    ballast.write(chunk)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    chunk = chunk[: len(chunk) // 2]

    def free(self, name: str) -> None:
        """Make room on the disk again."""
        with contextlib.suppress(FileNotFoundError):
            (self._folders[name] / _BALLAST).unlink()


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise _refused(str(error)) from None
    if done.returncode != 0:
        raise _refused(done.stderr.strip())


def _refused(why: str) -> ConfigError:
    return ConfigError(f"--disk-full cannot mount its small disks here ({why}): run as root, or leave out --disk-full")
