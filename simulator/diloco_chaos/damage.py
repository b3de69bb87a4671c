"""Disks that can be filled, and links between workers and shards that can be cut.

Both are in namespaces of this process and its children, need root, and vanish when the last of them ends in any way.
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
    """One disk per shard: tmpfs, in a mount namespace."""

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


_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET. (os.unshare exists only from Python 3.12 on.)"""
LISTEN = "0.0.0.0:0"
"""The address of shards. Nobody outside the namespace can reach it."""
_RULES = """
table inet diloco {
  set cut { type ipv4_addr . inet_service; }
  chain output {
    type filter hook output priority 0;
    ip daddr . tcp dport @cut drop
    ip saddr . tcp sport @cut drop
  }
}
"""


class NoLinks(Exception):
    """Links cannot be cut here. The message says why."""


class Links:
    """All network links of a cluster. Each worker dials the shards at a loopback address of its own, so that a rule
    can tell the links of different workers apart.

    Make it in the main thread: this thread enters the namespace, and so does every process that it starts later.
    """

    def __init__(self) -> None:
        """Raises NoLinks."""
        # Try in a child first, because this process cannot leave the namespace again.
        _run("unshare", "--net", "sh", "-c", "ip link set lo up && nft -f -", given=_RULES)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
            raise NoLinks(os.strerror(ctypes.get_errno()))
        _run("ip", "link", "set", "lo", "up")
        _run("nft", "-f", "-", given=_RULES)

    @staticmethod
    def host(worker: int) -> str:
        """The address at which worker number `worker` reaches every shard."""
        return f"127.1.{worker // 250}.{worker % 250 + 1}"

    def cut(self, worker: int, port: int) -> None:
        """Block all traffic between a worker and the shard that listens on `port`, in both directions."""
        self._element("add", worker, port)

    def heal(self, worker: int, port: int) -> None:
        """Let traffic through again."""
        self._element("delete", worker, port)

    def _element(self, verb: str, worker: int, port: int) -> None:
        _run("nft", verb, "element", "inet", "diloco", "cut", f"{{ {self.host(worker)} . {port} }}")


def _run(*command: str, given: str = "") -> None:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except OSError:
        raise NoLinks(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip()}")
