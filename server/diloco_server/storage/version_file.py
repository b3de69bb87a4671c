"""One version of one fragment as one file: a safetensors file that any safetensors library reads. Never pickle.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8 bytes
    theta     float32 [n]
    outer.0   float32 [n], outer.1 ...: state of the outer optimizer
    anchor    bfloat16 [n], where learners hold something that does not follow from theta
    checksums uint8 [8]: CRC-32C of length and header, then CRC-32C of everything between header and checksums

The checksums cover every byte, and come last, so that tensors are written as they are, once, without copies. Layout and
metadata are documented in docs/version-file.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from diloco_common.codec import CHUNK_ELEMENTS, Payload, PayloadHeader
from diloco_common.codec.change import ANCHOR
from diloco_common.errors import DataError
from diloco_common.manifest import Manifest, TensorSpec, cut
from diloco_server.core.fragment import Record, Values
from diloco_server.storage.filesystem import Files, NewFile, OldFile
from diloco_server.storage.version import Origin, StoredVersion

FORMAT = "diloco-version-1"
HEADER_BYTES_MAX = 64 * 2**20
SLICE_BYTES = 2**18
"""Checked and written, or read and checked, at a time: it is still in the cache."""
CHECKSUM_BYTES = 8


class VersionDamaged(DataError):
    """A version file is not what was written."""

    code = "VERSION_DAMAGED"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is damaged: {why}")
        self.name, self.why = name, why


@dataclass(frozen=True)
class Header:
    """What a file says of itself; its checksum was right."""

    origin: Origin
    manifest: Manifest
    record: Record
    previous: int | None
    """The version that was kept beside this one when it was written."""
    num_buffers: int
    has_anchor: bool
    chunk_elements: int
    """Of the anchor."""
    data_offset: int
    """Bytes before theta."""
    num_elements: int


# ------------------------------------------------------------------ writing


def write_version(
    file: NewFile, stored: StoredVersion, origin: Origin, manifest: Manifest, previous: int | None
) -> int:
    """Write a version, and return how many bytes it took. Does not sync. Raises OSError."""
    head = _header_bytes(stored, origin, manifest, previous)
    file.write(memoryview(head))
    crc32c, num_bytes = 0, 0
    for data in _data(stored):
        for start in range(0, len(data), SLICE_BYTES):
            part = data[start : start + SLICE_BYTES]
            crc32c = _extend(crc32c, part)
            file.write(part)
        num_bytes += len(data)
    file.write(memoryview(struct.pack("<II", google_crc32c.value(head), crc32c)))
    return len(head) + num_bytes + CHECKSUM_BYTES


def _header_bytes(stored: StoredVersion, origin: Origin, manifest: Manifest, previous: int | None) -> bytes:
    record, anchor = stored.record, stored.anchor
    metadata = {
        "format": FORMAT,
        "origin": asdict(origin),
        "manifest": {
            "digest": manifest.digest,
            "tensors": [[t.name, list(t.shape), t.mean_merge] for t in manifest.tensors],
        },
        "record": asdict(record),
        "previous": previous,
        "chunk_elements": anchor.header.chunk_elements if anchor is not None else CHUNK_ELEMENTS,
    }
    # safetensors allows text only, so each value is JSON by itself.
    tensors: dict[str, Any] = {"__metadata__": {key: _json(value) for key, value in metadata.items()}}
    num_elements, offset = stored.values.theta.numel(), 0
    kinds = [(name, "F32", 4) for name in stored.tensors] + ([("anchor", "BF16", 2)] if anchor is not None else [])
    for name, kind, width in kinds:
        end = offset + width * num_elements
        tensors[name] = {"dtype": kind, "shape": [num_elements], "data_offsets": [offset, end]}
        offset = end
    end = offset + CHECKSUM_BYTES
    tensors["checksums"] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": [offset, end]}
    text = _json(tensors).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _data(stored: StoredVersion) -> Iterator[memoryview]:
    for tensor in stored.tensors.values():
        yield _bytes_of(tensor)
    if stored.anchor is not None:
        assert stored.anchor.header.encoding == ANCHOR
        for chunk in stored.anchor.chunks:
            yield memoryview(chunk)


# ------------------------------------------------------------------ reading


def read_version(fs: Files, name: str) -> tuple[Header, StoredVersion]:
    """Read a whole version. Raises VersionDamaged, which names the file, and OSError other than a bad sector's."""
    file = _open(fs, name)
    try:
        header, crc32c = _read_header(file, name)
        theta, *buffers = (torch.empty(header.num_elements) for _ in range(1 + header.num_buffers))
        offset, found = header.data_offset, 0
        for tensor in (theta, *buffers):
            found = _read_into(file, name, _bytes_of(tensor), offset, found)
            offset += 4 * header.num_elements
        anchor = None
        if header.has_anchor:
            anchor, found = _read_anchor(file, name, header, offset, found)
        if found != crc32c:
            raise VersionDamaged(name, f"the checksum of its values is {found:08x}, not {crc32c:08x}")
        return header, StoredVersion(header.record, Values(theta, buffers), anchor)
    finally:
        file.close()


def read_header(fs: Files, name: str) -> Header:
    """Read what a file says of itself, without its values. Raises as `read_version`."""
    file = _open(fs, name)
    try:
        return _read_header(file, name)[0]
    finally:
        file.close()


def check_version(fs: Files, name: str) -> Header:
    """Look at every byte of a file. Raises as `read_version`."""
    file = _open(fs, name)
    try:
        header, crc32c = _read_header(file, name)
        part, found, offset = bytearray(SLICE_BYTES), 0, header.data_offset
        while offset < (end := file.size - CHECKSUM_BYTES):
            size = min(SLICE_BYTES, end - offset)
            found = _read_into(file, name, memoryview(part)[:size], offset, found)
            offset += size
        if found != crc32c:
            raise VersionDamaged(name, f"the checksum of its values is {found:08x}, not {crc32c:08x}")
        return header
    finally:
        file.close()


def _open(fs: Files, name: str) -> OldFile:
    try:
        return fs.open(name)
    except OSError as error:
        raise VersionDamaged(name, f"it cannot be opened: {error.strerror}") from error


def _read_header(file: OldFile, name: str) -> tuple[Header, int]:
    """The header, and the checksum that the values should have."""
    if file.size < 8 + CHECKSUM_BYTES:
        raise VersionDamaged(name, f"it has {file.size} bytes only")
    length = struct.unpack("<Q", _read(file, name, 0, 8))[0]
    if length > min(HEADER_BYTES_MAX, file.size - 8 - CHECKSUM_BYTES):
        raise VersionDamaged(name, f"its header claims {length} bytes, the file has {file.size}")
    head = _read(file, name, 0, 8 + length)
    head_crc32c, data_crc32c = struct.unpack("<II", _read(file, name, file.size - CHECKSUM_BYTES, CHECKSUM_BYTES))
    found = google_crc32c.value(head)
    if found != head_crc32c:
        raise VersionDamaged(name, f"the checksum of its header is {found:08x}, not {head_crc32c:08x}")
    tensors: dict[str, Any] = json.loads(head[8:])  # as it was written: the checksum is right
    header = _header(name, tensors, 8 + length)
    expected = 8 + length + max(t["data_offsets"][1] for key, t in tensors.items() if key != "__metadata__")
    if expected != file.size:
        raise VersionDamaged(name, f"it has {file.size} bytes, its header says {expected}")
    return header, data_crc32c


def _header(name: str, tensors: dict[str, Any], data_offset: int) -> Header:
    metadata: dict[str, str] = tensors["__metadata__"]
    if metadata.get("format") != _json(FORMAT):
        raise DataError(
            f"{name} has format {metadata.get('format', 'none')}, this version reads {FORMAT!r}: "
            "use the version of decoupled-diloco that wrote it"
        )
    content = {key: json.loads(value) for key, value in metadata.items()}
    origin, model, record = Origin(**content["origin"]), content["manifest"], content["record"]
    specs = [TensorSpec(t, tuple(shape), mean_merge) for t, shape, mean_merge in model["tensors"]]
    manifest = cut(specs, origin.num_fragments, origin.num_shards)
    if manifest.digest != model["digest"]:
        raise DataError(
            f"{name}: its model is cut in another way by this version (manifest {manifest.digest[:12]}, "
            f"the file says {model['digest'][:12]}): use the version of decoupled-diloco that wrote it"
        )
    return Header(
        origin,
        manifest,
        Record(**(record | {"norms": tuple(record["norms"])})),
        content["previous"],
        sum(key.startswith("outer.") for key in tensors),
        "anchor" in tensors,
        content["chunk_elements"],
        data_offset,
        tensors["theta"]["shape"][0],
    )


def _read_anchor(file: OldFile, name: str, header: Header, offset: int, crc32c: int) -> tuple[Payload, int]:
    """The anchor as learners pull it, and the checksum up to its end."""
    chunks: list[bytes] = []
    anchor_crc32c = 0
    for start in range(0, header.num_elements, header.chunk_elements):
        size = 2 * (min(start + header.chunk_elements, header.num_elements) - start)
        chunk = _read(file, name, offset, size)
        crc32c = google_crc32c.extend(crc32c, chunk)
        anchor_crc32c = google_crc32c.extend(anchor_crc32c, chunk)
        chunks.append(chunk)
        offset += size
    payload = PayloadHeader(ANCHOR, header.num_elements, header.chunk_elements, 2 * header.num_elements, anchor_crc32c)
    return Payload(payload, tuple(chunks)), crc32c


def _read_into(file: OldFile, name: str, out: memoryview, offset: int, crc32c: int) -> int:
    """Fill `out` from `offset`; returns the checksum so far."""
    for start in range(0, len(out), SLICE_BYTES):
        part = out[start : start + SLICE_BYTES]
        try:
            count = file.read_into(part, offset + start)
        except OSError as error:
            raise VersionDamaged(name, f"it cannot be read: {error.strerror}") from error
        if count != len(part):
            raise VersionDamaged(name, f"it ends after {offset + start + count} bytes")
        crc32c = _extend(crc32c, part)
    return crc32c


def _read(file: OldFile, name: str, offset: int, size: int) -> bytes:
    out = bytearray(size)
    _read_into(file, name, memoryview(out), offset, 0)
    return bytes(out)


def _extend(crc32c: int, data: memoryview) -> int:
    """The checksum with more bytes, which are not copied: google_crc32c takes nothing that could be written to."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return int(google_crc32c.extend(crc32c, view))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a flat float32 tensor, without a copy."""
    return memoryview(tensor.numpy().view(np.uint8).data)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def version_names(fragment_id: int, names: Sequence[str]) -> list[str]:
    """Of these names, those of the fragment's versions, newest first."""
    prefix = f"fragment-{fragment_id:04d}-"
    return sorted((n for n in names if n.startswith(prefix) and n.endswith(SUFFIX)), reverse=True)


SUFFIX = ".safetensors"


def version_name(fragment_id: int, version: int) -> str:
    """The name of a version's file; names of one fragment sort by version."""
    return f"fragment-{fragment_id:04d}-version-{version:012d}{SUFFIX}"
