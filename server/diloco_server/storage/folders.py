"""Checkpoints of a shard: hard links to its version files, whether or not it runs.

A version file never changes once it has its name, so a hard link is as good as a copy. The last two versions are kept:
if a file vanishes before it is linked, there is a newer one.

A regular checkpoint is made every `checkpoint.every` versions, as `checkpoints/version-NNN` in the shard's folder.
Checkpoint N takes the first version of each fragment, from N on, that is still there. That is N itself, unless linking
falls two versions behind. So all shards agree on names and contents without communicating. The versions of other kinds
grow more slowly: a checkpoint takes the newest version of each, once those of the model are there. `diloco checkpoint`
takes a checkpoint at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_common.errors import VersionDamaged
from diloco_common.wire.manifest import Fragment, Manifest
from diloco_server.storage.checkpoint import (
    MANIFEST,
    contents_of,
    describe,
    write_manifest,
)
from diloco_server.storage.filesystem import Disk, open_private, sync_path
from diloco_server.storage.version_file import (
    parse_version_name,
    version_name,
    version_names,
)

FOLDER = "checkpoints"
"""Name of the folder of checkpoints, in a data folder and in a cluster's folder."""
_NAME = re.compile(r"version-(\d{12})")
_NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""The errors if the target is on another disk, or its disk has no hard links."""


def fragments_in(folder: Path) -> list[int]:
    """The fragments with versions in a data folder. Raises OSError."""
    return sorted({found[0] for entry in os.scandir(folder) if (found := parse_version_name(entry.name))})


def hard_link(source: Path, target: Path) -> None:
    """Give a version file another name, replacing any file of that name. Without hard links, copy it.

    Until the folder is synced, a crash may lose the name. Raises OSError, and FileNotFoundError if the file is gone.
    """
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            os.close(open_private(temporary, os.O_WRONLY))
            shutil.copyfile(source, temporary)
            sync_path(temporary)
        except OSError:
            temporary.unlink(missing_ok=True)  # this file may have filled the disk
            raise
    temporary.rename(target)
    with contextlib.suppress(FileNotFoundError):  # renaming one hard link over another of the same file leaves both
        temporary.unlink()


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint if it exists, its manifest first: so a crash never leaves half of one. Raises OSError."""
    if not folder.is_dir():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_path(folder)
    shutil.rmtree(folder)


class RegularCheckpoints:
    """Makes checkpoints as versions reach the disk, and removes old ones."""

    def __init__(self, data_dir: Path, every: int, keep: int) -> None:
        self._data_dir, self._every, self._keep = data_dir, every, keep
        self._folder = data_dir / FOLDER
        self._done: list[int] = []  # ascending
        self._open: dict[int, set[int]] = {}  # checkpoint -> its fragments so far
        self._newest: dict[int, int] = {}  # fragment of another kind -> its newest version on disk

    def begin(self, recovered: Mapping[int, int], manifest: Manifest, shard_index: int) -> list[int]:
        """Continue after earlier epochs. `recovered`: fragment -> the restored version. Raises OSError."""
        found = {int(m[1]): path for path in self._folder.glob("version-*") if (m := _NAME.fullmatch(path.name))}
        self._done = sorted(number for number, path in found.items() if is_checkpoint(path))
        for number in found.keys() - self._done:  # restart unfinished ones: they may hold a lost version
            shutil.rmtree(found[number])
        self._newest = {
            f.fragment_id: recovered[f.fragment_id]
            for f in manifest.owned_by(shard_index)
            if not f.traits.is_of_model and f.fragment_id in recovered
        }
        finished: list[int] = []
        for fragment_id, newest in recovered.items():
            if fragment_id in self._newest:
                continue
            names = version_names(fragment_id, [path.name for path in self._data_dir.iterdir()])
            versions = sorted(int(name.rpartition("-")[2].partition(".")[0]) for name in names)
            for version in versions:
                if version <= newest:
                    finished += self.written(fragment_id, version, manifest, shard_index)
        return finished

    def written(self, fragment_id: int, version: int, manifest: Manifest, shard_index: int) -> list[int]:
        """A version is on disk. Returns the checkpoints that it completes.

        Raises OSError; the fragment's next version then takes this one's place.
        """
        owned = manifest.owned_by(shard_index)
        of_model = {fragment.fragment_id for fragment in owned if fragment.traits.is_of_model}
        is_of_model = fragment_id in of_model
        if is_of_model:
            self._open_if_due(version)
        else:
            self._newest[fragment_id] = version
        finished: list[int] = []
        for number, there in sorted(self._open.items()):
            if is_of_model and number > version:
                continue
            if is_of_model and fragment_id not in there:
                name = version_name(fragment_id, version)
                try:
                    hard_link(self._data_dir / name, self._folder / _name(number) / name)
                except FileNotFoundError:
                    if (self._data_dir / name).exists():
                        del self._open[number]  # a user has deleted the checkpoint's folder
                        continue
                    return finished  # the fragment has later versions already
                there.add(fragment_id)
            if of_model <= there and self._finish(number, owned):
                finished.append(number)
        return finished

    def _open_if_due(self, version: int) -> None:
        due = version // self._every * self._every
        if due > max([0, *self._done[-1:], *self._open]):
            Disk(self._folder / _name(due))  # makes the folder, and makes it survive a crash
            self._open[due] = set(fragments_in(self._folder / _name(due)))

    def _finish(self, number: int, owned: Sequence[Fragment]) -> bool:
        folder = self._folder / _name(number)
        if folder.is_dir() and not self._link_newest(folder, owned):
            return False
        if not folder.is_dir() or set(fragments_in(folder)) != {fragment.fragment_id for fragment in owned}:
            del self._open[number]  # a user has deleted some of its files
            return False
        disk = Disk(folder)
        names = [name for name in disk.names() if name.startswith("fragment-") and not name.endswith(".tmp")]
        try:
            described = [describe(disk, name) for name in names]
        except VersionDamaged:
            del self._open[number]  # the next one may be better
            shutil.rmtree(folder)
            raise
        write_manifest(disk, contents_of(described))
        Disk(self._folder).sync_names()
        del self._open[number]
        self._done.append(number)
        while len(self._done) > self._keep:
            remove_checkpoint(self._folder / _name(self._done[0]))
            del self._done[0]
        return True

    def _link_newest(self, folder: Path, owned: Sequence[Fragment]) -> bool:
        """Link the newest versions of the other kinds. Returns False if one is missing; then a newer one will come."""
        there = fragments_in(folder)
        for fragment in owned:
            if fragment.traits.is_of_model or fragment.fragment_id in there:
                continue
            if fragment.fragment_id not in self._newest:
                return False
            name = version_name(fragment.fragment_id, self._newest[fragment.fragment_id])
            try:
                hard_link(self._data_dir / name, folder / name)
            except FileNotFoundError:
                return False
        return True


def _name(number: int) -> str:
    return f"version-{number:012d}"
