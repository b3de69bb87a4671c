"""The sources that a user may name: a folder of `diloco up`, data folders, checkpoints and URLs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_common.errors import BadCheckpoint, VersionDamaged
from diloco_deploy.checkpoint.folders import check_complete
from diloco_deploy.checkpoint.objects import ObjectFolder
from diloco_deploy.run.folder import existing, shard_folders
from diloco_server.storage.checkpoint import (
    CheckpointFile,
    Contents,
    contents_of,
    describe,
    joined,
    read_listed,
    read_manifest,
)
from diloco_server.storage.filesystem import Disk, Files
from diloco_server.storage.folders import fragments_in, is_checkpoint
from diloco_server.storage.version_file import Header, StoredVersion, version_names


@dataclass(frozen=True)
class Source:
    where: str
    files: Files
    contents: Contents
    is_data: bool = False
    """A data folder, from which a running shard removes versions once it has newer ones."""

    def read(self, file: CheckpointFile) -> tuple[Header, StoredVersion]:
        """A checked version; from a data folder, the newest if this one is gone. Raises VersionDamaged and OSError."""
        try:
            return read_listed(self.files, file, self.contents)
        except (VersionDamaged, FileNotFoundError) as error:
            if self.is_data and file.name not in self.files.names():
                return self.read(_newest(self.where, self.files, file.fragment_id)[1])
            why = error.why if isinstance(error, VersionDamaged) else "it has gone"
            raise VersionDamaged(
                f"{self.where.rstrip('/')}/{file.name}",
                f"{why}. Nothing was written: look after the disk, and name another checkpoint (`diloco checkpoint "
                "list FOLDER` shows what there is)",
            ) from error


@dataclass(frozen=True)
class Whole:
    sources: tuple[Source, ...]
    contents: Contents

    def read(self) -> Iterator[tuple[Header, StoredVersion]]:
        """Every fragment in turn, with every byte checked. Raises VersionDamaged and OSError."""
        return (source.read(file) for source in self.sources for file in source.contents.files)


def open_whole(names: Sequence[str], *, model_only: bool = False) -> Whole:
    """Open the named sources. `model_only`: averaged momentum may be missing. Raises BadCheckpoint and OSError."""
    named = [(name, open_sources(name)) for name in names]
    contents = join([(name, joined([source.contents for source in found])) for name, found in named])
    fragments = contents.manifest.exported_fragments if model_only else contents.manifest.fragments
    check_complete(contents, names, fragments)
    return Whole(tuple(source for _, found in named for source in found), contents)


def join(parts: Sequence[tuple[str, Contents]]) -> Contents:
    """The checkpoint that these parts form. Each part has the name that the user gave. Raises BadCheckpoint.

    Fragments of a run are at most one version apart, unless a shard was away. So parts that are
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
    if "://" in name or is_checkpoint(Path(name)):
        return [open_checkpoint(name)]
    return [_open_data(str(folder), Disk(folder)) for folder in data_folders(Path(name))]


def open_checkpoint(name: str) -> Source:
    """A checkpoint in a folder or at a URL. Raises BadCheckpoint and OSError."""
    files = ObjectFolder(name) if "://" in name else Disk(existing(Path(name)))
    return Source(name, files, read_manifest(files, name))


def data_folders(folder: Path) -> list[Path]:
    """The data folders in `folder`: itself, or those of `diloco up`. Raises BadCheckpoint."""
    found = [path for path in (folder, *shard_folders(folder)) if fragments_in(existing(path))]
    if not found:
        raise BadCheckpoint(
            f"{folder} holds no versions: give a checkpoint, a folder of `diloco up`, or a data folder of a shard"
        )
    return found


def _open_data(where: str, disk: Disk) -> Source:
    versions = [_newest(where, disk, fragment_id) for fragment_id in fragments_in(disk.folder)]
    return Source(where, disk, contents_of(versions), is_data=True)


def _newest(where: str, files: Files, fragment_id: int) -> tuple[Header, CheckpointFile]:
    """The newest intact version. Raises BadCheckpoint."""
    for name in version_names(fragment_id, files.names()):
        try:
            return describe(files, name)
        except (VersionDamaged, FileNotFoundError):
            if name not in files.names():  # a shard removed it, so there is a newer one
                return _newest(where, files, fragment_id)
    raise BadCheckpoint(f"fragment {fragment_id} has no intact version in {where}")
