"""The sources that a user may name: a folder of `diloco up`, data folders, checkpoints and URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_common.errors import BadCheckpoint, VersionDamaged
from diloco_common.settings_loader import load_saved
from diloco_deploy.checkpoint.objects import ObjectFolder, is_url
from diloco_server.storage.checkpoint import (
    CheckpointFile,
    Contents,
    contents_of,
    describe,
    joined,
    read_listed,
    read_manifest,
)
from diloco_server.storage.filesystem import Disk, Files, OldFile
from diloco_server.storage.folders import TRIES, fragments_in, is_checkpoint
from diloco_server.storage.version_file import Header, StoredVersion, version_names


@dataclass(frozen=True)
class Source:
    """One named folder or URL, and the versions in it."""

    where: str
    files: Files
    contents: Contents


@dataclass(frozen=True)
class Whole:
    """Sources that together hold a whole model."""

    sources: tuple[Source, ...]
    contents: Contents

    def read(self) -> Iterator[tuple[Header, StoredVersion]]:
        """Every fragment, one after the other, with every byte checked. Raises VersionDamaged and OSError."""
        for source in self.sources:
            for file in source.contents.files:
                try:
                    found = read_listed(source.files, file, source.contents)
                except VersionDamaged as error:
                    raise VersionDamaged(
                        f"{source.where.rstrip('/')}/{error.name}",
                        f"{error.why}. Nothing was written: look after the disk, and name another checkpoint (`diloco "
                        "checkpoint list FOLDER` shows what there is)",
                    ) from error
                yield found


def open_whole(names: Sequence[str], *, model_only: bool = False) -> Whole:
    """Open the named sources. `model_only`: averaged momentum may be missing.

    Raises BadCheckpoint, ...
    """
    named = [(name, open_sources(name)) for name in names]
    sources = tuple(source for _, found in named for source in found)
    contents = join([(name, joined([source.contents for source in found])) for name, found in named])
    manifest = contents.manifest
    homes = {f.fragment_id: f.shard_index for f in (manifest.exported_fragments if model_only else manifest.fragments)}
    if missing := [i for i in contents.missing if i in homes]:
        shards = sorted({homes[i] for i in missing})
        raise BadCheckpoint(
            f"{len(missing)} of {len(homes)} fragments are missing in {', '.join(names)}: those of shards "
            f"{', '.join(map(str, shards))} of {contents.num_shards}. Name the parts of all shards"
        )
    return Whole(sources, contents)


def join(parts: Sequence[tuple[str, Contents]]) -> Contents:
    """The checkpoint that these parts form. Each part has the name that the user gave. Raises BadCheckpoint.

    Fragments of a run are at most one version apart, unless a shard was away or writes by interval. So parts that are
    further apart belong to two checkpoints, unless they have the same name, as the regular checkpoints of shards do.
    """
    contents = joined([part for _, part in parts])
    old, new = min(parts, key=lambda part: part[1].versions[1]), max(parts, key=lambda part: part[1].versions[0])
    before, after = old[1].versions[1], new[1].versions[0]
    if after - before > 1 and len({Path(name).name for name, _ in parts}) > 1:
        raise BadCheckpoint(
            f"{old[0]} ends at version {before} and {new[0]} begins at {after}, so they belong to two checkpoints: "
            "name the parts of one. If a shard was away, join them first: diloco checkpoint PART PART ... --name NAME"
        )
    return contents


def open_sources(name: str) -> list[Source]:
    """Open a named checkpoint, or the named data folders. Raises BadCheckpoint, OSError."""
    if is_url(name):
        files = ObjectFolder(name)
        return [Source(name, files, read_manifest(files, name))]
    folder = Path(name)
    if is_checkpoint(folder):
        return [open_checkpoint(name)]
    disks = [_HeldDisk(path) for path in data_folders(folder)]
    return [
        Source(str(disk.folder), disk, contents_of([_newest_of(disk, i) for i in fragments_in(disk.folder)]))
        for disk in disks
    ]


def open_checkpoint(name: str) -> Source:
    """A checkpoint in a folder or at a URL. Raises BadCheckpoint and OSError."""
    if is_url(name):
        return open_sources(name)[0]
    if not Path(name).is_dir():
        raise BadCheckpoint(f"there is no folder {name}")
    disk = Disk(Path(name))
    return Source(name, disk, read_manifest(disk, name))


def data_folders(folder: Path) -> list[Path]:
    """The data folders in `folder`: itself, or those of `diloco up`. Raises BadCheckpoint."""
    if not folder.is_dir():
        raise BadCheckpoint(f"there is no folder {folder}")
    if fragments_in(folder):
        return [folder]
    found = [path for path in shard_folders(folder) if fragments_in(path)]
    if not found:
        raise BadCheckpoint(
            f"{folder} holds no versions: give a checkpoint, a folder of `diloco up`, or a data folder of a shard"
        )
    return found


def shard_folders(folder: Path) -> list[Path]:
    """The folders shard-0, shard-1, ... of the cluster that `diloco up` runs, or ran, in `folder`."""
    saved = folder / "settings.json"
    home = (load_saved(saved).settings.shard.data_dir if saved.exists() else None) or folder
    found = [path for path in home.glob("shard-*") if path.is_dir() and re.fullmatch(r"shard-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name[6:]))


class _HeldDisk(Disk):
    """Keeps files open, so they can still be read after a running shard has removed them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._held: dict[str, OldFile] = {}

    def open(self, name: str) -> OldFile:
        if name not in self._held:
            self._held[name] = super().open(name)
        return _HeldFile(self._held[name])


class _HeldFile:
    def __init__(self, file: OldFile) -> None:
        self.size = file.size
        self._file = file

    def read_into(self, out: memoryview, offset: int) -> int:
        return self._file.read_into(out, offset)

    def close(self) -> None:
        """Does nothing: the file stays open."""


def _newest_of(disk: _HeldDisk, fragment_id: int) -> tuple[Header, CheckpointFile]:
    for _ in range(TRIES):
        for name in version_names(fragment_id, disk.names()):
            try:
                return describe(disk, name)
            except VersionDamaged:
                continue  # or the file has gone; then older ones have, too, and there is a newer one
    raise BadCheckpoint(f"fragment {fragment_id} has no intact version in {disk.folder}")
