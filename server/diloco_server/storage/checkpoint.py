"""A checkpoint: one version file per fragment, and a manifest beside them that says what there should be.

The manifest is written last, so a folder without one is no checkpoint. It repeats the checksums that each version file
ends with, so making one reads only headers, however large the model is. Who puts the files there is the business of
`linking.py` (hard links) and of `diloco checkpoint copy` (an object store). docs/checkpoints.md has the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import google_crc32c
from pydantic import TypeAdapter

from diloco_common.errors import DataError
from diloco_common.manifest import Manifest, TensorSpec, cut, differences
from diloco_server.storage.filesystem import Files, FileSystem
from diloco_server.storage.version import Origin, StoredVersion
from diloco_server.storage.version_file import (
    CHECKSUM_BYTES,
    Header,
    VersionDamaged,
    check_version,
    read_header,
    read_version,
    version_name,
)

MANIFEST = "checkpoint.json"
FORMAT = "diloco-checkpoint-1"


class NoCheckpoint(DataError):
    """There is no checkpoint where one should be."""

    code = "NO_CHECKPOINT"


class CheckpointDamaged(DataError):
    """A checkpoint is not what was made."""

    code = "CHECKPOINT_DAMAGED"


class CheckpointIncomplete(DataError):
    """Fragments are missing."""

    code = "CHECKPOINT_INCOMPLETE"


class CheckpointExists(DataError):
    """There is a checkpoint of that name already; none is ever changed."""

    code = "CHECKPOINT_EXISTS"


class CheckpointsDiffer(DataError):
    """Parts that should make one checkpoint are of different runs, models or times."""

    code = "CHECKPOINTS_DIFFER"


@dataclass(frozen=True)
class CheckpointFile:
    """One version of one fragment, as the manifest lists it."""

    name: str
    num_bytes: int
    checksums: str
    """The last 8 bytes of the file, in hex: CRC-32C of its header, then of its values."""
    fragment_id: int
    shard_index: int
    """That it was taken from."""
    epoch: int
    version: int
    tokens_merged: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds."""

    run: str
    num_shards: int
    num_fragments: int
    """P as the settings had it."""
    optimizer: str
    tensors: tuple[TensorSpec, ...]
    digest: str
    """Of the manifest of the model."""
    files: tuple[CheckpointFile, ...]
    """By fragment."""

    @cached_property
    def manifest(self) -> Manifest:
        """How the model was cut and placed. Raises DataError where this version cuts it in another way."""
        manifest = cut(self.tensors, self.num_fragments, self.num_shards)
        if manifest.digest != self.digest:
            raise DataError("the checkpoint's model is cut in another way by this version: use the one that made it")
        return manifest

    @property
    def missing(self) -> list[int]:
        """Fragments of the model that are not in it: those of shards that it was not taken from."""
        there = {file.fragment_id for file in self.files}
        return [f.fragment_id for f in self.manifest.fragments if f.fragment_id not in there]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest of its versions."""
        versions = [file.version for file in self.files]
        return min(versions), max(versions)


# ------------------------------------------------------------------ making


def describe(fs: Files, name: str) -> tuple[Header, CheckpointFile]:
    """What a manifest says of a version file; reads its header only. Raises VersionDamaged and OSError."""
    header = read_header(fs, name)
    file = fs.open(name)
    try:
        num_bytes, checksums = file.size, bytearray(CHECKSUM_BYTES)
        file.read_into(memoryview(checksums), num_bytes - CHECKSUM_BYTES)
    finally:
        file.close()
    record = header.record
    return header, CheckpointFile(
        name, num_bytes, checksums.hex(), record.fragment_id, header.origin.shard_index, record.epoch, record.version,
        record.tokens_merged,
    )  # fmt: skip


def contents_of(described: Sequence[tuple[Header, CheckpointFile]]) -> Contents:
    """What these files make together. Raises CheckpointsDiffer where they are not of one run and model."""
    assert described, "a checkpoint of nothing"
    return joined([_part(header, file) for header, file in described])


def _part(header: Header, file: CheckpointFile) -> Contents:
    origin, manifest = header.origin, header.manifest
    return Contents(
        origin.run,
        origin.num_shards,
        origin.num_fragments,
        origin.optimizer,
        manifest.tensors,
        manifest.digest,
        (file,),
    )


def joined(parts: Sequence[Contents]) -> Contents:
    """Parts of one checkpoint as one. Raises CheckpointsDiffer."""
    first, files = parts[0], dict[int, CheckpointFile]()
    for part in parts:
        mine, theirs = _identity(first), _identity(part)
        lines = [f"{key}: {mine[key]} <-> {theirs[key]}" for key in mine if mine[key] != theirs[key]]
        lines = lines or differences(first.tensors, part.tensors)
        if lines or part.digest != first.digest:
            raise CheckpointsDiffer("these are of different runs or models:\n  " + "\n  ".join(lines))
        for file in part.files:
            if (other := files.get(file.fragment_id)) is not None:
                raise CheckpointsDiffer(
                    f"fragment {file.fragment_id} is there twice, as version {other.version} and {file.version}: "
                    "name the parts of one checkpoint only"
                )
            files[file.fragment_id] = file
    return Contents(
        first.run, first.num_shards, first.num_fragments, first.optimizer, first.tensors, first.digest,
        tuple(file for _, file in sorted(files.items())),
    )  # fmt: skip


def _identity(contents: Contents) -> dict[str, Any]:
    names = ("run", "num_shards", "num_fragments", "optimizer")
    return {name: getattr(contents, name) for name in names}


def encode_manifest(contents: Contents) -> bytes:
    """The bytes of `checkpoint.json`; equal contents give equal bytes."""
    body = asdict(contents) | {
        "format": FORMAT,
        "tensors": [[t.name, list(t.shape), t.mean_merge] for t in contents.tensors],
        "files": [asdict(file) for file in contents.files],
    }
    return _dump({"checkpoint": body, "crc32c": _checksum(body)})


def write_manifest(fs: FileSystem, contents: Contents) -> None:
    """Make a folder that holds all the files a checkpoint: write, sync, rename, sync the names. Raises OSError."""
    temporary = MANIFEST + ".tmp"
    file = fs.create(temporary)
    try:
        file.write(memoryview(encode_manifest(contents)))
        file.sync()
    finally:
        file.close()
    fs.sync_names()  # the files before what names them
    fs.rename(temporary, MANIFEST)
    fs.sync_names()


# ------------------------------------------------------------------ reading


def decode_manifest(text: bytes, where: str) -> Contents:
    """What a checkpoint holds. Raises CheckpointDamaged, or DataError for another format."""
    try:
        whole = json.loads(text)
        body = whole["checkpoint"]
        if whole["crc32c"] != _checksum(body) or text != _dump(whole):  # so that a changed space is found, too
            raise CheckpointDamaged(f"{where} is damaged: its checksum differs")
        if (found := body.pop("format")) != FORMAT:
            raise DataError(f"{where} has format {found!r}, this version reads {FORMAT!r}")
        names = ("name", "shape", "mean_merge")
        tensors = [dict(zip(names, tensor, strict=True)) for tensor in body["tensors"]]
        contents = _CONTENTS.validate_json(_dump(body | {"tensors": tensors}), strict=True)
        _check_files(contents)
        return contents
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise CheckpointDamaged(f"{where} is damaged: it is no manifest of a checkpoint ({why})") from None


def _check_files(contents: Contents) -> None:
    """Raises ValueError: anybody can make a checksum that is right, and files are opened by these names."""
    fragments = {fragment.fragment_id for fragment in contents.manifest.fragments}
    for file in contents.files:
        if file.fragment_id not in fragments:
            raise ValueError(f"it lists fragment {file.fragment_id}, once more than the model has it")
        fragments.remove(file.fragment_id)
        if file.name != version_name(file.fragment_id, file.version):
            raise ValueError(f"it lists {file.name!r} as version {file.version} of fragment {file.fragment_id}")
    if not contents.files:
        raise ValueError("it lists no files")


_CONTENTS = TypeAdapter(Contents)


def read_manifest(fs: Files, where: str) -> Contents:
    """What the checkpoint in this folder holds. Raises NoCheckpoint, CheckpointDamaged and OSError."""
    if MANIFEST not in fs.names():
        raise NoCheckpoint(
            f"{where} is no checkpoint: there is no {MANIFEST}, which is written last; making it was interrupted, "
            "or it lies elsewhere (`diloco checkpoint list`)"
        )
    file = fs.open(MANIFEST)
    try:
        text = bytearray(file.size)
        file.read_into(memoryview(text), 0)
    finally:
        file.close()
    return decode_manifest(bytes(text), f"{where}/{MANIFEST}")


def find_damage(fs: Files, contents: Contents) -> list[str]:
    """Look at every byte; what is damaged, a line each. Raises OSError where a file may be intact."""
    found = []
    for file in contents.files:
        try:
            check_version(fs, file.name)
            check_listed(fs, file, contents)
        except VersionDamaged as error:
            found.append(str(error))
    return found


def read_listed(fs: Files, file: CheckpointFile, contents: Contents) -> tuple[Header, StoredVersion]:
    """A version, every byte of it checked. Raises VersionDamaged and OSError."""
    check_listed(fs, file, contents)
    return read_version(fs, file.name)


def check_listed(fs: Files, file: CheckpointFile, contents: Contents) -> None:
    """Raises VersionDamaged where the file is another one than the manifest lists, if an intact one."""
    header, found = describe(fs, file.name)
    part = _part(header, found)
    if found != file or part.digest != contents.digest or _identity(part) != _identity(contents):
        raise VersionDamaged(file.name, "it is another file than the manifest lists")


def placed(origin: Origin, num_shards: int, shard_index: int) -> Origin:
    """The same run on another number of shards."""
    return Origin(origin.run, shard_index, num_shards, origin.num_fragments, origin.optimizer, origin.pull)


def _checksum(body: Any) -> str:
    return f"{google_crc32c.value(_dump(body)):08x}"


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def total_tokens(files: Iterable[CheckpointFile]) -> int:
    """Tokens whose work is in every fragment."""
    return min((file.tokens_merged for file in files), default=0)
