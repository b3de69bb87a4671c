"""A checkpoint: one version file per fragment, and a manifest that lists them.

The manifest is written last, so a folder without one is not a checkpoint. Each version file ends with its checksums.
The manifest copies them, so making one reads only headers, however large the model is. `folders.py` and
`diloco checkpoint` put the files in place, by hard links or in an object store. docs/checkpoints.md has the format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import google_crc32c
from pydantic import TypeAdapter

from diloco_common.errors import (
    BadCheckpoint,
    BadRequest,
    DataError,
    VersionDamaged,
)
from diloco_common.wire.manifest import Manifest, TensorSpec, check_tensors, cut, differences, spec_of
from diloco_server.storage.filesystem import Files, FileSystem
from diloco_server.storage.version_file import (
    CHECKSUM_BYTES,
    Header,
    StoredVersion,
    check_version,
    read_header,
    read_version,
    version_name,
)

MANIFEST = "checkpoint.json"
FORMAT = "diloco-checkpoint-1"


@dataclass(frozen=True)
class CheckpointFile:
    """One version of one fragment, as the manifest lists it."""

    name: str
    num_bytes: int
    checksums: str
    """The last 8 bytes of the file, in hex: CRC-32C of its header, then of its values."""
    fragment_id: int
    shard_index: int
    """The shard that it was taken from."""
    epoch: int
    version: int
    tokens_merged: int


@dataclass(frozen=True)
class Contents:
    run: str
    num_shards: int
    num_fragments: int
    """P, as the settings give it."""
    optimizer: str
    tensors: tuple[TensorSpec, ...]
    digest: str
    """Digest of the model's manifest."""
    files: tuple[CheckpointFile, ...]
    """Sorted by fragment."""

    @cached_property
    def manifest(self) -> Manifest:
        """The model's manifest. Raises DataError if this release cuts the model differently."""
        manifest = cut(self.tensors, self.num_fragments, self.num_shards)
        if manifest.digest != self.digest:
            raise DataError(
                "this release of decoupled-diloco cuts the checkpoint's model differently: use the release that "
                "made the checkpoint"
            )
        return manifest

    @property
    def missing(self) -> list[int]:
        """Fragments of the model that are not in the checkpoint. They belong to shards outside it."""
        there = {file.fragment_id for file in self.files}
        return [f.fragment_id for f in self.manifest.fragments if f.fragment_id not in there]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and highest version of the model in it. Other kinds have their own version numbers."""
        versions = [file.version for file in self.model_files or self.files]
        return min(versions), max(versions)

    @property
    def model_files(self) -> list[CheckpointFile]:
        of_model = {fragment.fragment_id for fragment in self.manifest.model_fragments}
        return [file for file in self.files if file.fragment_id in of_model]


# ------------------------------------------------------------------ making


def describe(fs: Files, name: str) -> tuple[Header, CheckpointFile]:
    """The manifest entry of a version file. Reads only header and checksums. Raises VersionDamaged and OSError."""
    header = read_header(fs, name)
    with closing(fs.open(name)) as file:
        num_bytes, checksums = file.size, bytearray(CHECKSUM_BYTES)
        file.read_into(memoryview(checksums), num_bytes - CHECKSUM_BYTES)
    record = header.record
    return header, CheckpointFile(
        name, num_bytes, checksums.hex(), record.fragment_id, header.origin.shard_index, record.epoch, record.version,
        record.tokens_merged,
    )  # fmt: skip


def contents_of(described: Sequence[tuple[Header, CheckpointFile]]) -> Contents:
    """The checkpoint that these files form. Raises BadCheckpoint unless they belong to one run and model."""
    assert described, "a checkpoint of nothing"
    return joined([_part(header, file) for header, file in described])


def _part(header: Header, file: CheckpointFile) -> Contents:
    origin, manifest = header.origin, header.manifest
    return Contents(
        origin.run, origin.num_shards, origin.num_fragments, origin.optimizer, manifest.tensors, manifest.digest,
        (file,),
    )  # fmt: skip


def joined(parts: Sequence[Contents]) -> Contents:
    """The checkpoint that these parts form. Raises BadCheckpoint."""
    first, files = parts[0], dict[int, CheckpointFile]()
    for part in parts:
        mine, theirs = _identity(first), _identity(part)
        lines = [f"{key}: {mine[key]} <-> {theirs[key]}" for key in mine if mine[key] != theirs[key]]
        lines = lines or differences(first.tensors, part.tensors)
        if lines or part.digest != first.digest:
            raise BadCheckpoint("these belong to different runs or models:\n  " + "\n  ".join(lines))
        for file in part.files:
            if (other := files.get(file.fragment_id)) is not None:
                raise BadCheckpoint(
                    f"fragment {file.fragment_id} appears twice, as version {other.version} and as version "
                    f"{file.version}: name only the parts of one checkpoint"
                )
            files[file.fragment_id] = file
    return replace(first, files=tuple(file for _, file in sorted(files.items())))


def _identity(contents: Contents) -> dict[str, Any]:
    names = ("run", "num_shards", "num_fragments", "optimizer")
    return {name: getattr(contents, name) for name in names}


def encode_manifest(contents: Contents) -> bytes:
    """The bytes of `checkpoint.json`; equal contents give equal bytes."""
    body = asdict(contents) | {
        "format": FORMAT,
        "tensors": [t.as_json() for t in contents.tensors],
        "files": [asdict(file) for file in contents.files],
    }
    return _dump({"checkpoint": body, "crc32c": _checksum(body)})


def write_manifest(fs: FileSystem, contents: Contents) -> None:
    """Turn a folder of version files into a checkpoint: write, sync, rename, sync the names. Raises OSError."""
    temporary = MANIFEST + ".tmp"
    with closing(fs.create(temporary)) as file:
        file.write(memoryview(encode_manifest(contents)))
        file.sync()
    fs.sync_names()  # the listed files must be durable before the list
    fs.rename(temporary, MANIFEST)
    fs.sync_names()


# ------------------------------------------------------------------ reading


def decode_manifest(text: bytes, where: str) -> Contents:
    """The contents of a checkpoint. Raises BadCheckpoint, or DataError for another format."""
    try:
        whole = json.loads(text)
        body = whole["checkpoint"]
        if whole["crc32c"] != _checksum(body) or text != _dump(whole):  # comparing the text even finds a changed space
            raise BadCheckpoint(f"{where} is damaged: its checksum differs")
        if (found := body.pop("format")) != FORMAT:
            raise DataError(
                f"{where} has format {found!r}, but this release reads {FORMAT!r}: use the release that made it"
            )
        tensors = [spec_of(tensor)._asdict() for tensor in body["tensors"]]
        contents = _CONTENTS.validate_json(_dump(body | {"tensors": tensors}), strict=True)
        _check_files(contents)
        return contents
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise BadCheckpoint(f"{where} is damaged: it is not the manifest of a checkpoint ({why})") from None


def _check_files(contents: Contents) -> None:
    """Raises ValueError. These names get opened, and a valid checksum proves nothing, since anyone can make one."""
    try:
        check_tensors(contents.tensors)
    except BadRequest as error:
        raise ValueError(str(error)) from None
    fragments = {fragment.fragment_id for fragment in contents.manifest.fragments}
    for file in contents.files:
        if file.fragment_id not in fragments:
            raise ValueError(f"it lists fragment {file.fragment_id} twice, or the model has no such fragment")
        fragments.remove(file.fragment_id)
        if file.name != version_name(file.fragment_id, file.version):
            raise ValueError(f"it lists {file.name!r} as version {file.version} of fragment {file.fragment_id}")
    if not contents.files:
        raise ValueError("it lists no files")


_CONTENTS = TypeAdapter(Contents)


def read_manifest(fs: Files, where: str) -> Contents:
    """The contents of the checkpoint in this folder. Raises BadCheckpoint and OSError."""
    if MANIFEST not in fs.names():
        raise BadCheckpoint(
            f"{where} is not a checkpoint: it has no {MANIFEST}. That file is written last, so making the checkpoint "
            "was interrupted, or this is the wrong place (`diloco checkpoint list`)"
        )
    with closing(fs.open(MANIFEST)) as file:
        text = bytearray(file.size)
        file.read_into(memoryview(text), 0)
    return decode_manifest(bytes(text), f"{where}/{MANIFEST}")


def find_damage(fs: Files, contents: Contents) -> list[str]:
    """Check every byte. Returns one line per damaged file. Raises OSError if a file may be intact."""
    found = []
    for file in contents.files:
        try:
            check_version(fs, file.name)
            check_listed(fs, file, contents)
        except VersionDamaged as error:
            found.append(str(error))
    return found


def read_listed(fs: Files, file: CheckpointFile, contents: Contents) -> tuple[Header, StoredVersion]:
    """A version, with every byte checked. Raises VersionDamaged and OSError."""
    check_listed(fs, file, contents)
    return read_version(fs, file.name)


def check_listed(fs: Files, file: CheckpointFile, contents: Contents) -> None:
    """Raises VersionDamaged if the file, even an intact one, is not the one in the manifest."""
    header, found = describe(fs, file.name)
    part = _part(header, found)
    if found != file or part.digest != contents.digest or _identity(part) != _identity(contents):
        raise VersionDamaged(file.name, "it is not the file that the manifest lists")


def _checksum(body: Any) -> str:
    return f"{google_crc32c.value(_dump(body)):08x}"


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def total_tokens(contents: Contents) -> int:
    """The smallest number of tokens that a fragment of the model has merged."""
    return min((file.tokens_merged for file in contents.model_files), default=0)
