"""The sources that a user may name: a folder of `diloco up`, data folders, and checkpoints, also in object stores.

Object stores are reached through `obstore`, an extra that is loaded only when needed. Credentials, region and endpoint
come from the usual environment variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). The manifest is written last, and
never over another one. So a checkpoint with a manifest is complete, and no checkpoint ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from diloco_common.errors import BadCheckpoint, CannotConnect, ConfigError, VersionDamaged
from diloco_deploy.checkpoint.folders import check_complete
from diloco_deploy.run.folder import existing, shard_folders
from diloco_server.storage.checkpoint import (
    MANIFEST,
    CheckpointFile,
    Contents,
    check_listed,
    contents_of,
    describe,
    encode_manifest,
    joined,
    read_listed,
    read_manifest,
)
from diloco_server.storage.filesystem import Disk, Files, OldFile
from diloco_server.storage.folders import fragments_in, is_checkpoint
from diloco_server.storage.version_file import Header, StoredVersion, check_version, version_names


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
                f"{why}. Nothing was written: check the disk, and name another checkpoint (`diloco checkpoint "
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


BLOCK_BYTES = 8 * 2**20
TRIED_AGAIN = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}


class ObjectFolder:
    """The objects under a URL, with the interface `Files` of `storage.filesystem`."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a wrong URL, or if the extra is missing."""
        try:
            import obstore
        except ModuleNotFoundError:
            raise ConfigError(
                "URLs of checkpoints need obstore, which is not installed: "
                "pip install 'decoupled-diloco-ops[object-store]'"
            ) from None
        self.url, self._obstore = url.rstrip("/"), obstore
        remote = {"client_options": {"allow_http": True}, "retry_config": TRIED_AGAIN}
        more: Any = {"mkdir": True} if url.startswith("file://") else remote
        try:
            self.store: Any = obstore.store.from_url(self.url, **more)
        except (ValueError, OSError, obstore.exceptions.BaseError) as error:
            raise ConfigError(f"{url}: {str(error).splitlines()[0]}") from None

    def names(self) -> Sequence[str]:
        """Raises CannotConnect."""
        with self._told():
            found = [meta["path"] for chunk in self._obstore.list(self.store) for meta in chunk]
        return sorted(path for path in found if "/" not in path)

    def open(self, name: str) -> OldFile:
        """Raises FileNotFoundError and CannotConnect."""
        with self._told():
            try:
                return _OldObject(self._obstore.open_reader(self.store, name, buffer_size=BLOCK_BYTES), self._told)
            except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
                raise FileNotFoundError(2, "No such object", name) from None

    def put(self, name: str, blocks: Iterator[bytes]) -> None:
        """Write an object, whole or not at all. Replaces any object of that name. Raises CannotConnect."""
        with self._told():
            self._obstore.put(self.store, name, blocks, max_concurrency=4)

    def put_new(self, name: str, content: bytes) -> None:
        """Write a new object. Raises BadCheckpoint if it exists already, and CannotConnect."""
        with self._told():
            self._obstore.put(self.store, name, content, mode="create", use_multipart=False)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.AlreadyExistsError:
            raise BadCheckpoint(f"{self.url} is a checkpoint already, and checkpoints never change") from None
        except self._obstore.exceptions.BaseError as error:
            raise CannotConnect(
                f"{self.url}: {str(error).splitlines()[0]}. Check the URL, the credentials and the endpoint in the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL)"
            ) from None


class _OldObject:
    """Reads a version from start to end in small slices; obstore reads whole blocks and keeps the last one."""

    def __init__(self, reader: Any, told: Callable[[], AbstractContextManager[None]]) -> None:
        self.size: int = reader.size
        self._reader, self._told = reader, told

    def read_into(self, out: memoryview, offset: int) -> int:
        with self._told():
            if self._reader.tell() != offset:  # seeking throws the block away
                self._reader.seek(offset)
            found = bytes(self._reader.read(min(len(out), max(0, self.size - offset))))
        out[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._reader.close()


def copy_checkpoint(source: Files, contents: Contents, url: str) -> None:
    """Copy a checkpoint with intact files. Safe to call again after an interruption.

    Raises VersionDamaged, BadCheckpoint if there is something else at `url`, CannotConnect, and ConfigError.
    """
    target = ObjectFolder(url)
    if strangers := set(target.names()) - {file.name for file in contents.files}:
        raise BadCheckpoint(f"{url} is not empty ({min(strangers)} is there): give another URL")
    for file in contents.files:
        check_version(source, file.name)
        check_listed(source, file, contents)
        target.put(file.name, _blocks(source, file))
    target.put_new(MANIFEST, encode_manifest(contents))


def _blocks(source: Files, file: CheckpointFile) -> Iterator[bytes]:
    with closing(source.open(file.name)) as opened:
        for start in range(0, file.num_bytes, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, file.num_bytes - start))
            opened.read_into(memoryview(block), start)
            yield bytes(block)
