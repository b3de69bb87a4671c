"""A disk that fails as disks do: unsynced data is lost or torn in a crash, bytes rot, calls are refused.

It replaces `diloco_server.storage.filesystem.Disk` under the production store. Contents and names are volatile until
synced. A crash keeps a random number of the first renames and removals since the last `sync_names`. Of a file with
unsynced content, it keeps a beginning of random length, in which a byte may be garbled.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco_common.errors import NothingIntact
from diloco_server.storage.version_file import parse_version_name, version_names
from diloco_simulator.options import SOMETIMES, Options


class Crashed(BaseException):
    """The power failed in the middle of a call. Not an Exception, so that no code catches it and goes on."""


class _Inode:
    def __init__(self) -> None:
        self.content = bytearray()
        self.synced = b""


class FakeDisk:
    """One folder. It survives crashes: call `crash`, then open the next store on it."""

    def __init__(self, seed: int = 0) -> None:
        self.calls = 0
        """Number of calls so far that changed the disk."""
        self.crash_at: int | None = None
        """The power fails in the middle of the call with this number. The first call has number 1."""
        self.refuse: Callable[[str], int] = lambda call: 0
        """Name of a call -> the errno with which it fails. 0: it works."""
        self.space: int | None = None
        """Bytes left. None: no limit."""
        self._random = random.Random(f"disk {seed}")
        self._names: dict[str, _Inode] = {}
        self._synced_names: dict[str, _Inode] = {}
        self._changes: list[tuple[str, str, _Inode | None]] = []  # since the last sync_names: (old, new name, inode)

    # ------------------------------------------------------------ what a store calls

    def names(self) -> Sequence[str]:
        return sorted(self._names)

    def create(self, name: str) -> FakeFile:
        self._call("create")
        inode = _Inode()
        self._change("", name, inode)
        return FakeFile(self, inode)

    def open(self, name: str) -> FakeFile:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return FakeFile(self, self._names[name])

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        self._change(old, new, self._names[old])

    def remove(self, name: str) -> None:
        self._call("remove")
        if name in self._names:
            if self.space is not None:
                self.space += len(self._names[name].content)
            self._change(name, "", None)

    def sync_names(self) -> None:
        self._call("sync_names")
        self._synced_names = dict(self._names)
        self._changes.clear()

    def free_bytes(self) -> int:
        return 1 << 40 if self.space is None else self.space

    # ------------------------------------------------------------ what goes wrong

    def crash(self) -> None:
        """Power comes back: unsynced data is lost, torn or intact."""
        names = dict(self._synced_names)
        for gone, there, inode in self._changes[: self._random.randint(0, len(self._changes))]:
            _apply(names, gone, there, inode)
        for inode in set(names.values()):
            written = bytes(inode.content)
            if written != inode.synced:
                torn = bytearray(written[: self._random.randint(0, len(written))])
                if torn and self._random.random() < 0.5:
                    torn[self._random.randrange(len(torn))] ^= 0xFF
                inode.content = torn
                inode.synced = bytes(torn)
        self._names, self._synced_names, self._changes = names, dict(names), []
        self.calls, self.crash_at = 0, None

    def rot(self, name: str, offset: int, flip: int = 1) -> None:
        inode = self._names[name]
        inode.content[offset] ^= flip
        inode.synced = bytes(inode.content)

    def truncate(self, name: str, size: int) -> None:
        inode = self._names[name]
        del inode.content[size:]
        inode.synced = bytes(inode.content)

    def content(self, name: str) -> bytes:
        return bytes(self._names[name].content)

    def lose(self, name: str) -> None:
        del self._names[name]
        self._synced_names.pop(name, None)

    def wipe(self) -> None:
        """Remove all files; a crash brings none of them back."""
        self._names, self._synced_names, self._changes = {}, {}, []

    # ------------------------------------------------------------ helpers

    def _call(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.crash_at:
            raise Crashed(name)
        if number := self.refuse(name):
            raise OSError(number, os.strerror(number))

    def _take_space(self, num_bytes: int) -> None:
        if self.space is not None:
            if num_bytes > self.space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.space -= num_bytes

    def _change(self, gone: str, there: str, inode: _Inode | None) -> None:
        _apply(self._names, gone, there, inode)
        self._changes.append((gone, there, inode))


class FakeFile:
    def __init__(self, disk: FakeDisk, inode: _Inode) -> None:
        self.size = len(inode.content)
        self._disk = disk
        self._inode = inode

    def write(self, data: memoryview) -> None:
        try:
            self._disk._call("write")
        except Crashed:
            self._inode.content += data[: len(data) // 2]
            raise
        self._disk._take_space(len(data))
        self._inode.content += data

    def sync(self) -> None:
        self._disk._call("sync")
        self._inode.synced = bytes(self._inode.content)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._inode.content[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Do nothing."""


def _apply(names: dict[str, _Inode], gone: str, there: str, inode: _Inode | None) -> None:
    names.pop(gone, None)
    if inode is not None:
        names[there] = inode


CALLS_OF_A_WRITE = 10
INTERRUPTED_STARTS = SOMETIMES / 2
"""Share of starts during which the power fails."""


class ShardDisk:
    def __init__(self, index: int, options: Options) -> None:
        self.fake = FakeDisk(options.seed * 8 + index)
        self.random = random.Random(f"shard disk {options.seed} {index}")
        self.hurt: dict[int, str] = {}
        """Fragment -> damage to its newest file ("rot", "truncate", "lose", "wipe"), until its next version."""
        self.hurt_versions: dict[int, int] = {}
        """Fragment -> number of the version in the file last damaged."""
        self.was_hurt = False
        self._refusals = 0

    def plan_interruption(self) -> None:
        fake, r = self.fake, self.random
        fake.crash_at = fake.calls + r.randint(1, 4) if r.random() < INTERRUPTED_STARTS else None

    def remove_named(self, error: NothingIntact) -> None:
        """Do what the error message tells people to do: remove the files that it names as damaged."""
        names = self.fake.names()
        for fragment_id in self.hurt:
            for name in version_names(fragment_id, names):
                if name in str(error):
                    self.fake.remove(name)
        self.fake.sync_names()

    def hurt_newest(self, fragment_id: int) -> bool:
        """Damage or remove a fragment's newest file. False: it has none."""
        r, fake = self.random, self.fake
        names = version_names(fragment_id, fake.names())
        if not names:
            return False
        name, how = names[0], r.choice(("rot", "rot", "truncate", "lose"))
        size = len(fake.content(name))
        match how:
            case "rot":
                fake.rot(name, r.randrange(size), r.randint(1, 255))
            case "truncate":
                fake.truncate(name, r.randrange(size))
            case "lose":
                fake.lose(name)
        self.hurt[fragment_id] = how
        parsed = parse_version_name(name)
        assert parsed is not None
        self.hurt_versions[fragment_id] = parsed[-1]
        self.was_hurt = True
        return True

    def wipe(self, fragments: Iterable[int]) -> None:
        """Empty the folder."""
        self.fake.wipe()
        self.hurt.update(dict.fromkeys(fragments, "wipe"))
        self.was_hurt = True

    def refuse(self) -> None:
        """Make the disk full, or make its syncs fail, until `accept`."""
        self._refusals += 1
        calls, number = self.random.choice(
            ((("write",), errno.ENOSPC), (("create",), errno.ENOSPC), (("sync", "sync_names"), errno.EIO))
        )
        self.fake.refuse = lambda call: number if call in calls else 0

    def heal(self) -> None:
        """Make the disk work from now on."""
        self._refusals = 0
        self.accept()

    def accept(self) -> None:
        self._refusals -= 1
        if self._refusals <= 0:
            self.fake.refuse = lambda call: 0

    def cut_off(self, writes: Iterable[Callable[[], Any]], *, power: bool) -> None:
        """End a process, and perhaps its machine, in the middle of these writes."""
        writes = list(writes)
        if writes:
            self.fake.crash_at = self.fake.calls + self.random.randint(1, CALLS_OF_A_WRITE)
            try:
                for write in writes:
                    write()
            except (Crashed, OSError):
                pass
            self.fake.crash_at = None
        if power:
            self.fake.crash()
