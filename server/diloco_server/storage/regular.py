"""The regular checkpoints of a shard, one every `checkpoint.every` versions: `checkpoints/version-NNN` in its folder.

Checkpoint N takes the first version of each fragment, from N on, that reaches the disk. That is N itself, unless
versions are written by interval. So all shards agree on names and contents without talking. Not thread-safe.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from diloco_common.manifest import Manifest
from diloco_server.storage.checkpoint import contents_of, describe, write_manifest
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.linking import fragments_in, hard_link, is_checkpoint, remove_checkpoint
from diloco_server.storage.version_file import VersionDamaged, version_name, version_names

FOLDER = "checkpoints"
"""In a data folder, and in the folder of a cluster."""
_NAME = re.compile(r"version-(\d{12})")


class RegularCheckpoints:
    """Makes checkpoints as versions reach the disk, and removes old ones."""

    def __init__(self, data_dir: Path, every: int, keep: int) -> None:
        self._data_dir, self._every, self._keep = data_dir, every, keep
        self._folder = data_dir / FOLDER
        self._done: list[int] = []  # ascending
        self._open: dict[int, set[int]] = {}  # checkpoint -> fragments that are in it

    def begin(self, recovered: Mapping[int, int], manifest: Manifest, shard_index: int) -> list[int]:
        """Go on after earlier epochs. `recovered`: fragment -> the version it came back with. Raises OSError."""
        found = {int(m[1]): path for path in self._folder.glob("version-*") if (m := _NAME.fullmatch(path.name))}
        self._done = sorted(number for number, path in found.items() if is_checkpoint(path))
        for number in found.keys() - self._done:  # begin unfinished ones anew: they may hold a version that is lost now
            shutil.rmtree(found[number])
        finished: list[int] = []
        for fragment_id, newest in recovered.items():
            names = version_names(fragment_id, [path.name for path in self._data_dir.iterdir()])
            versions = sorted(int(name.rpartition("-")[2].partition(".")[0]) for name in names)
            for version in versions:
                if version <= newest:
                    finished += self.written(fragment_id, version, manifest, shard_index)
        return finished

    def written(self, fragment_id: int, version: int, manifest: Manifest, shard_index: int) -> list[int]:
        """A version is on disk. Returns the checkpoints that it completes.

        Raises OSError. Then the fragment's next version takes its place.
        """
        due = version // self._every * self._every
        if due > max([0, *self._done[-1:], *self._open]):
            Disk(self._folder / _name(due))  # makes the folder, and makes it survive a crash
            self._open[due] = set(fragments_in(self._folder / _name(due)))
        owned = {fragment.fragment_id for fragment in manifest.owned_by(shard_index)}
        finished: list[int] = []
        for number, there in sorted(self._open.items()):
            if number > version:
                continue
            if fragment_id not in there:
                name = version_name(fragment_id, version)
                try:
                    hard_link(self._data_dir / name, self._folder / _name(number) / name)
                except FileNotFoundError:
                    if (self._data_dir / name).exists():
                        del self._open[number]  # somebody has deleted the checkpoint's folder
                        continue
                    return finished  # the fragment has later versions already
                there.add(fragment_id)
            if there == owned and self._finish(number, owned):
                finished.append(number)
        return finished

    def _finish(self, number: int, owned: set[int]) -> bool:
        folder = self._folder / _name(number)
        if not folder.is_dir() or set(fragments_in(folder)) != owned:
            del self._open[number]  # somebody has deleted files of it
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


def _name(number: int) -> str:
    return f"version-{number:012d}"
