"""A shard's versions on disk: the order of writes, which versions are kept, and recovery after a crash.

A version is announced only after `save` has returned. It is written with a temporary name, synced and renamed, and then
the names are synced. So after a crash at any point, the newest version is complete: it is the old one or the new one.
The last two versions of each fragment are kept, in case the newest one rots.

Files that recovery skips are renamed before the shard serves: a sector that failed once may be readable at the next
start, when other versions have taken the place of that file's version.

Each start of a shard gets its own epoch, as an empty file with the number in its name: there is no content to damage.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from diloco_common.errors import DataError, NothingIntact, VersionDamaged, WrongFolder
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Manifest, differences
from diloco_server.storage.filesystem import Disk, FileSystem, FolderLock, OldFile
from diloco_server.storage.standby import PROMOTED, SUPERSEDED, first_epoch_of, mark_of, newest, put_mark
from diloco_server.storage.version_file import (
    TEMPORARY,
    VERSIONS_KEPT,
    Header,
    Origin,
    StoredVersion,
    parse_version_name,
    read_version,
    version_name,
    write_version,
)

DAMAGED = ".damaged"
"""Suffix of files that recovery has skipped."""
_EPOCH = re.compile(r"epoch-(\d{12})", re.ASCII)


@dataclass(frozen=True)
class Found:
    """The newest intact version of a fragment."""

    stored: StoredVersion
    pull: str
    """`sync.pull` when it was written."""
    is_behind: bool
    """A later version existed, and may have been announced."""


@dataclass(frozen=True)
class Recovered:
    """The versions found in a folder."""

    manifest: Manifest | None
    """None: there are no versions."""
    versions: list[Found] = field(default_factory=list)
    """Sorted by fragment. Fragments without a version are left out."""
    damage: list[str] = field(default_factory=list)
    """Damaged or missing versions, one line each, with the name of the file."""


class Store(Protocol):
    """One shard's versions. `save` may be called from several threads, for different fragments."""

    epoch: int
    """The epoch of this start of the shard. Every start has a different one."""
    keeps_files: bool
    """Whether versions outlive the process."""

    def recover(self) -> Recovered:
        """The versions of earlier epochs. Call it once, before `save`. Raises DataError and OSError."""

    def save(self, version: StoredVersion, manifest: Manifest) -> int:
        """Make a version durable, and return its size in bytes.

        Raises OSError. The caller then does not announce the version, and tries again.
        """

    def open(self, fragment_id: int, version: int) -> OldFile:
        """The file of a version that was saved. Raises OSError."""

    def supersede(self, epoch: int) -> None:
        """From this epoch on, another process is this shard: never serve from here again. Raises OSError."""

    def free_bytes(self) -> int | None:
        """Free space for versions, in bytes; None: no disk is used. May hang. Raises OSError."""


class MemoryStore:
    """Keeps versions in memory only.

    A restarted shard begins empty, in a new epoch. Learners that are still there seed it again, from the version they
    applied last.
    """

    keeps_files = False

    def __init__(self, epoch: int) -> None:
        """`epoch`: a random number, so that learners notice a restart."""
        self.epoch = epoch

    def recover(self) -> Recovered:
        return Recovered(None)

    def save(self, version: StoredVersion, manifest: Manifest) -> int:
        """Does nothing: the values are already in memory."""
        return 0

    def open(self, fragment_id: int, version: int) -> OldFile:
        raise FileNotFoundError(version_name(fragment_id, version))

    def supersede(self, epoch: int) -> None:
        """Does nothing: nothing is left when the process ends."""

    def free_bytes(self) -> int | None:
        return None


class FileStore:
    """Versions in a folder that nobody else writes to."""

    keeps_files = True

    def __init__(self, fs: FileSystem, origin: Origin, *, first_epoch: int) -> None:
        """Begin an epoch, durably. Raises OSError.

        `first_epoch`: its lower bound, above every earlier epoch of the run; otherwise two versions could have the same
        name. A folder that is new, emptied, or an old copy does not show later epochs. Seconds since 1970 are high
        enough.
        """
        self._fs = fs
        self._origin = origin
        self._intact: dict[int, list[int]] = {}  # fragment -> versions with an intact file, ascending
        self._unneeded: dict[int, set[str]] = {}  # fragment -> files to remove once there is a later version
        names = fs.names()
        for name in names:
            if name.endswith(TEMPORARY):
                fs.remove(name)
        epochs = sorted(int(m[1]) for name in names if (m := _EPOCH.fullmatch(name)))
        mark = mark_of(names)
        self._copied_upto = mark.epoch if mark is not None and mark.what == PROMOTED else -1
        before = epochs or [name.epoch for name in newest(fs).values()]  # in a copy: above the copied epochs
        self.epoch = max(first_epoch_of(mark, first_epoch), max(before, default=-1) + 1)
        self._was_restored = not epochs
        self._begin_epoch(epochs)

    def _begin_epoch(self, before: Sequence[int]) -> None:
        with contextlib.closing(self._fs.create(f"epoch-{self.epoch:012d}")) as file:
            file.sync()
        self._fs.sync_names()
        for epoch in before:
            self._fs.remove(f"epoch-{epoch:012d}")

    # ------------------------------------------------------------ recovery

    def recover(self) -> Recovered:
        """The newest intact version of each fragment. If the newest one is damaged, `damage` names it.

        Raises NothingIntact, WrongFolder, DataError (another format or cut), and OSError.
        """
        versions, aside = self._versions(), self._aside()
        found, damage = [], list[str]()
        first: Header | None = None
        for fragment_id in sorted(versions):
            header, version = self._recover_fragment(
                fragment_id, versions[fragment_id], aside.get(fragment_id, set()), damage
            )
            self._check_origin(header, first or header)
            first = first or header
            found.append(version)
        self._put_aside()
        return Recovered(first.manifest if first else None, found, damage)

    def _recover_fragment(
        self, fragment_id: int, versions: list[int], aside: set[str], damage: list[str]
    ) -> tuple[Header, Found]:
        worse: list[str] = []
        for version in reversed(versions):
            name = version_name(fragment_id, version)
            try:
                header, stored = read_version(self._fs, name)
            except VersionDamaged as error:
                damage.append(str(error))
                worse.append(name)
                continue
            # The previous version is removed only once there is a later one. If it is missing, a later one may be
            # missing too. A standby skips versions when it lags, so it may lack some.
            is_missing = header.previous is not None and header.previous not in versions
            is_missing = is_missing and stored.record.epoch > self._copied_upto
            if is_missing and not worse and not aside and not self._was_restored:
                damage.append(f"version {header.previous}, written before {name}, is missing; later ones may be, too")
            self._unneeded[fragment_id] = aside | set(worse)
            self._intact[fragment_id] = versions[: versions.index(version) + 1]
            is_behind = bool(worse or aside) or is_missing or self._was_restored
            return header, Found(stored, header.origin.pull, is_behind)
        files = ", ".join(worse)
        raise NothingIntact(
            f"fragment {fragment_id} has no intact version ({'; '.join(damage[-len(worse) :])}). Restore a checkpoint. "
            f"Or remove {files}: then a learner that holds the fragment seeds it again"
        )

    def _put_aside(self) -> None:
        """Durably rename the files that recovery skipped. Raises OSError."""
        renamed = False
        for fragment_id, unneeded in self._unneeded.items():
            for name in [name for name in unneeded if not name.endswith(DAMAGED)]:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rename(name, name + DAMAGED)
                    renamed = True
                self._unneeded[fragment_id] = (self._unneeded[fragment_id] - {name}) | {name + DAMAGED}
        if renamed:
            self._fs.sync_names()

    def _aside(self) -> dict[int, set[str]]:
        """Fragment -> files that an earlier start skipped, and that no later version has cleared yet."""
        found: dict[int, set[str]] = {}
        for name in self._fs.names():
            if name.endswith(DAMAGED) and (parsed := parse_version_name(name.removesuffix(DAMAGED))) is not None:
                found.setdefault(parsed[0], set()).add(name)
        return found

    def _check_origin(self, header: Header, first: Header) -> None:
        check_origin(self._origin, header)
        if header.manifest.digest != first.manifest.digest:
            lines = differences(first.manifest.tensors, header.manifest.tensors)
            raise WrongFolder("the data folder holds versions of two models:\n  " + "\n  ".join(lines))

    def _versions(self) -> dict[int, list[int]]:
        """Fragment -> versions with a file, ascending."""
        found: dict[int, list[int]] = {}
        for name in self._fs.names():
            if (parsed := parse_version_name(name)) is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
        return {fragment_id: sorted(versions) for fragment_id, versions in found.items()}

    # ------------------------------------------------------------ saving

    def save(self, version: StoredVersion, manifest: Manifest) -> int:
        """Write, sync, rename, sync the names; then remove files that are no longer kept. Raises OSError."""
        record = version.record
        name = version_name(record.fragment_id, record.version)
        temporary = name + TEMPORARY
        intact = [v for v in self._intact.get(record.fragment_id, []) if v < record.version]
        unneeded = self._unneeded.setdefault(record.fragment_id, set())
        unneeded |= {temporary, name}  # if this fails, either file may stay, and no later save may use its name
        try:
            with contextlib.closing(self._fs.create(temporary)) as file:
                num_bytes = write_version(file, version, self._origin, manifest, intact[-1] if intact else None)
                file.sync()
            self._fs.rename(temporary, name)
        except OSError:
            with contextlib.suppress(OSError):  # this file may have filled the disk
                self._fs.remove(temporary)
            raise
        self._fs.sync_names()
        unneeded -= {temporary, name}
        self._intact[record.fragment_id] = [*intact, record.version]
        with contextlib.suppress(OSError):  # the version is durable; the next save removes the leftovers
            self._clear(record.fragment_id)
        return num_bytes

    def open(self, fragment_id: int, version: int) -> OldFile:
        return self._fs.open(version_name(fragment_id, version))

    def supersede(self, epoch: int) -> None:
        put_mark(self._fs, SUPERSEDED, epoch)

    def free_bytes(self) -> int | None:
        return self._fs.free_bytes()

    def _clear(self, fragment_id: int) -> None:
        unneeded, intact = self._unneeded[fragment_id], self._intact[fragment_id]
        for name in sorted(unneeded):
            self._fs.remove(name)
            unneeded.discard(name)
        while len(intact) > VERSIONS_KEPT:
            self._fs.remove(version_name(fragment_id, intact[0]))
            del intact[0]


def check_origin(mine: Origin, header: Header) -> None:
    """Check that a shard with these settings can continue from such a file. Raises WrongFolder."""
    ours, theirs = asdict(mine), asdict(header.origin)
    lines = [f"{k}: {theirs[k]} <-> {ours[k]}" for k in ours if k != "pull" and ours[k] != theirs[k]]
    if lines:
        raise WrongFolder(
            "the data folder belongs to another run or shard (the folder's <-> this one's):\n  "
            + "\n  ".join(lines)
            + "\ngive the settings that made it, or another folder (shard.data_dir)"
        )


def open_store(settings: Settings, *, epoch_in_memory: int, first_epoch: int) -> tuple[Store, FolderLock | None]:
    """The store, and the lock on its folder. Raises InUse, and DataError if the disk refuses.

    `epoch_in_memory`: for a shard without a folder; `first_epoch`: the lowest epoch of one with a folder.
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
