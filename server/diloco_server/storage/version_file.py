"""One version of one fragment as one safetensors file, which any safetensors library can read. Never pickle.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8 bytes
    theta     float32 [n]
    outer.0   bfloat16 or float32 [n], outer.1 ...: state of the outer optimizer
    average   bfloat16 [n]: average of the versions minus theta, if the run keeps an average
    anchor    bfloat16 [n], if the learners' anchor does not follow from theta
    checksums uint8 [8]: CRC-32C of length and header, then CRC-32C of all bytes between header and checksums

The checksums cover every byte. They come last, so each tensor is written once, without a copy. docs/version-file.md
documents layout and metadata.
"""

from __future__ import annotations

import errno
import json
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import google_crc32c
import numpy as np
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from diloco_common.codec import CHUNK_ELEMENTS_MAX, Checksum, Chunk, Payload, PayloadHeader
from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.change import ANCHOR
from diloco_common.codec.frames import NewFrame
from diloco_common.errors import BadRequest, DataError, VersionDamaged, plain
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Manifest, Tie, check_tensors, cut, spec_of
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record, check_record
from diloco_server.storage.filesystem import Files, NewFile, OldFile


@dataclass(frozen=True)
class StoredVersion:
    """Everything a shard needs to continue from a version, bit for bit."""

    record: Record
    values: Values
    anchor: Payload | None
    """The learners' anchor, if the run sends changes; None: it follows from the values."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Theta, the buffers of the outer optimizer and the average [num_elements], by their names in a file."""
        found = {"theta": self.values.theta} | {f"outer.{i}": b for i, b in enumerate(self.values.buffers)}
        return found if self.values.average is None else found | {"average": self.values.average}


@dataclass(frozen=True)
class Origin:
    """The run and the shard that wrote a version. A shard refuses files of another origin."""

    run: str
    shard_index: int
    num_shards: int
    num_fragments: int
    """P, as the settings give it. The manifest has fewer fragments if the model has few pieces."""
    optimizer: str
    """Name of the outer optimizer whose state the file keeps."""
    pull: str
    """`sync.pull`, which decides which bytes of a version learners hold. Only this field may change."""

    @classmethod
    def of(cls, settings: Settings) -> Origin:
        return cls(
            settings.run.id, settings.shard.index, settings.shard.count, settings.sync.fragments,
            settings.outer.optimizer, settings.sync.pull,
        )  # fmt: skip


FORMAT, WITH_AVERAGE = "diloco-version-3", "diloco-version-4"
"""The formats without and with an average of the versions."""
VERSIONS_KEPT = 2
"""How many versions of each fragment the folder of a shard or a standby keeps."""
TEMPORARY = ".tmp"
"""Suffix of files that are being written."""
FILE_HEADER_BYTES_MAX = 64 * 2**20
"""The most that a reader allocates because a file says so. Larger headers are not written either."""
SLICE_BYTES = 2**18
"""Data is checked and written, or read and checked, in slices of this size, which stay in the cache."""
_CHECKSUMS = struct.Struct("<II")
CHECKSUM_BYTES = _CHECKSUMS.size
Kind = Literal["F32", "BF16"]
"""Data types, with the names that safetensors uses."""
_DTYPES: dict[Kind, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
_LOST = (errno.ENOENT, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR)
"""Errors of the file itself. Any other error may be temporary, and a version that may be intact must not be skipped."""


_MORE = "For further information visit"  # pydantic's line that is useless here


@dataclass(frozen=True)
class Header:
    """The header of a file whose checksum was verified."""

    origin: Origin
    manifest: Manifest
    record: Record
    previous: int | None
    """The other version that was kept when this one was written."""
    buffers: tuple[Kind, ...]
    """Data types of the outer optimizer's state."""
    has_average: bool
    has_anchor: bool
    chunk_elements: int
    """Elements of a chunk of the anchor."""
    num_elements: int

    @property
    def num_data_bytes(self) -> int:
        return self.num_elements * sum(width for _, _, width in _layout(self))


# ------------------------------------------------------------------ writing


def write_version(
    file: NewFile, stored: StoredVersion, origin: Origin, manifest: Manifest, previous: int | None
) -> int:
    """Write a version, and return its size in bytes. Does not sync.

    Raises OSError, also if the header would be larger than a reader accepts.
    """
    chunk_elements = stored.anchor.header.chunk_elements if stored.anchor is not None else CHUNK_ELEMENTS_MAX
    head = _encode_header(
        Header(
            origin, manifest, stored.record, previous, tuple(_KINDS[b.dtype] for b in stored.values.buffers),
            stored.values.average is not None, stored.anchor is not None, chunk_elements, stored.values.theta.numel(),
        )
    )  # fmt: skip
    if len(head) > FILE_HEADER_BYTES_MAX:
        raise OSError(
            errno.EFBIG,
            f"its header would have {len(head)} bytes, but readers accept at most {FILE_HEADER_BYTES_MAX}. It holds "
            "the names of all tensors, and of up to shard.max_learners learners: use shorter names, or fewer learners",
        )
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


def _encode_header(header: Header) -> bytes:
    metadata = {
        "format": WITH_AVERAGE if header.has_average else FORMAT,
        "origin": asdict(header.origin),
        "manifest": _MANIFEST_PLACE,
        "record": asdict(header.record),
        "previous": header.previous,
        "chunk_elements": header.chunk_elements,
    }
    # safetensors allows text only, so each value is JSON by itself.
    text = _json({"__metadata__": {key: _json(value) for key, value in metadata.items()}} | _table(header)).encode()
    # Quotes inside values are escaped, so this text occurs in one place only.
    text = text.replace(_json(_json(_MANIFEST_PLACE)).encode(), _manifest_text.of(header.manifest), 1)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


_MANIFEST_PLACE = "manifest"


class _ManifestText:
    """Caches the encoded manifest for the next file: it is the longest part, and equal in all files of a run."""

    def __init__(self) -> None:
        self._last: tuple[Manifest, bytes] | None = None

    def of(self, manifest: Manifest) -> bytes:
        last = self._last  # threads that write at once may each compute it
        if last is None or last[0] is not manifest:
            facts = {"digest": manifest.digest, "tensors": [t.as_json() for t in manifest.tensors]}
            facts |= {"ties": manifest.ties} if manifest.ties else {}
            self._last = last = manifest, _json(_json(facts)).encode()
        return last[1]


_manifest_text = _ManifestText()


def _table(header: Header) -> dict[str, Any]:
    table: dict[str, Any] = {}
    end = 0
    for name, kind, width in _layout(header):
        start, end = end, end + width * header.num_elements
        table[name] = {"dtype": kind, "shape": [header.num_elements], "data_offsets": [start, end]}
    checksums = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": [end, end + CHECKSUM_BYTES]}
    return table | {"checksums": checksums}


def _layout(header: Header) -> list[tuple[str, str, int]]:
    """Name, kind and bytes per element of each tensor, in the order of the file."""
    kinds: list[tuple[str, Kind]] = [("theta", "F32"), *((f"outer.{i}", kind) for i, kind in enumerate(header.buffers))]
    kinds += [("average", "BF16")] if header.has_average else []
    kinds += [("anchor", "BF16")] if header.has_anchor else []
    return [(name, kind, _DTYPES[kind].itemsize) for name, kind in kinds]


def _data(stored: StoredVersion) -> Iterator[memoryview]:
    for tensor in stored.tensors.values():
        yield _bytes_of(tensor)
    if stored.anchor is not None:
        assert stored.anchor.header.encoding == ANCHOR
        for chunk in stored.anchor.chunks:
            yield memoryview(chunk)


# ------------------------------------------------------------------ reading


def read_version(fs: Files, name: str) -> tuple[Header, StoredVersion]:
    """Read a whole version.

    Raises VersionDamaged, which names the file. Raises OSError if the file may be intact: too many files are open, this
    process may not read it, and so on.
    """
    with closing(_open(fs, name)) as file:
        header, offset, crc32c = _read_header(file, name)
        kinds: tuple[Kind, ...] = ("F32", *header.buffers, *(("BF16",) if header.has_average else ()))
        tensors = [torch.empty(header.num_elements, dtype=_DTYPES[kind]) for kind in kinds]
        found = 0
        for tensor in tensors:
            found = _read_into(file, name, _bytes_of(tensor), offset, found)
            offset += tensor.nbytes
        average = tensors.pop() if header.has_average else None
        theta, *buffers = tensors
        anchor = None
        if header.has_anchor:
            anchor, found = _read_anchor(file, name, header, offset, found)
        if found != crc32c:
            raise VersionDamaged(name, f"the checksum of its values is {found:08x}, not {crc32c:08x}")
        return header, StoredVersion(header.record, Values(theta, buffers, average), anchor)


def read_header(fs: Files, name: str) -> Header:
    """Read only the header of a file. Raises what `read_version` raises."""
    with closing(_open(fs, name)) as file:
        return _read_header(file, name)[0]


def check_version(fs: Files, name: str) -> Header:
    """Check every byte of a file. Raises what `read_version` raises."""
    with closing(_open(fs, name)) as file:
        header, offset, crc32c = _read_header(file, name)
        part, found = bytearray(SLICE_BYTES), 0
        while offset < (end := file.size - CHECKSUM_BYTES):
            size = min(SLICE_BYTES, end - offset)
            found = _read_into(file, name, memoryview(part)[:size], offset, found)
            offset += size
        if found != crc32c:
            raise VersionDamaged(name, f"the checksum of its values is {found:08x}, not {crc32c:08x}")
        return header


def _open(fs: Files, name: str) -> OldFile:
    try:
        return fs.open(name)
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise VersionDamaged(name, f"it cannot be opened: {error.strerror}") from error


def _read_header(file: OldFile, name: str) -> tuple[Header, int, int]:
    """The header, the offset of the values, and their expected checksum."""
    if file.size < 8 + CHECKSUM_BYTES:
        raise VersionDamaged(name, f"it has only {file.size} bytes")
    length = struct.unpack("<Q", _read(file, name, 0, 8))[0]
    if length > min(FILE_HEADER_BYTES_MAX, file.size - 8 - CHECKSUM_BYTES):
        raise VersionDamaged(name, f"its header claims {length} bytes, but the file has {file.size}")
    head = _read(file, name, 0, 8 + length)
    head_crc32c, data_crc32c = _CHECKSUMS.unpack(_read(file, name, file.size - CHECKSUM_BYTES, CHECKSUM_BYTES))
    found = google_crc32c.value(head)
    if found != head_crc32c:
        raise VersionDamaged(name, f"the checksum of its header is {found:08x}, not {head_crc32c:08x}")
    header = _decode_header(name, head)
    if name != version_name(header.record.fragment_id, header.record.version):
        raise VersionDamaged(name, f"it is version {header.record.version} of fragment {header.record.fragment_id}")
    if (expected := len(head) + header.num_data_bytes + CHECKSUM_BYTES) != file.size:
        raise VersionDamaged(name, f"it has {file.size} bytes, but its header says {expected}")
    return header, len(head), data_crc32c


def _decode_header(name: str, head: bytes) -> Header:
    """Decode a header whose checksum is valid. Anyone can make a checksum, so every field is still validated.

    Raises VersionDamaged, and DataError if another release may have written the file.
    """
    try:
        tensors = json.loads(head[8:])
        metadata: dict[str, str] = tensors.pop("__metadata__")
        if (found := metadata["format"]) not in map(_json, (FORMAT, WITH_AVERAGE)):
            raise DataError(
                f"{name} has format {found}, but this release reads {FORMAT} and {WITH_AVERAGE}: "
                "use the release of decoupled-diloco that wrote it"
            )
        origin = _ORIGIN.validate_json(metadata["origin"], strict=True)
        manifest, digest = _read_manifest(metadata["manifest"], origin.num_fragments, origin.num_shards)
        if manifest.digest != digest:
            raise DataError(
                f"{name}: this release cuts its model differently (manifest {manifest.digest[:12]}, the file says "
                f"{digest[:12]}): use the release of decoupled-diloco that wrote it"
            )
        record = _RECORD.validate_json(metadata["record"], strict=True)
        check_record(record)
        fragment = {f.fragment_id: f for f in manifest.owned_by(origin.shard_index)}[record.fragment_id]
        kinds = tuple(of["dtype"] for name, of in sorted(tensors.items()) if name.startswith("outer."))
        header = Header(
            origin,
            manifest,
            record,
            _NUMBER.validate_json(metadata["previous"], strict=True),
            _BUFFERS.validate_python(kinds),
            "average" in tensors,
            "anchor" in tensors,
            _CHUNK_ELEMENTS.validate_json(metadata["chunk_elements"], strict=True),
            fragment.num_elements,
        )
        if tensors != _table(header):
            raise ValueError(f"its tensors are not those of fragment {fragment.fragment_id}")
        return header
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, BadRequest) as error:
        why = plain("; ".join(line.strip() for line in str(error).splitlines() if _MORE not in line))
        raise VersionDamaged(name, f"its header is not that of a version: {why}") from None


@lru_cache(maxsize=1)
def _read_manifest(text: str, num_fragments: int, num_shards: int) -> tuple[Manifest, str]:
    """The manifest, and the digest in the file. Cached, since all files of a folder have the same manifest.

    Raises ValueError, BadRequest.
    """
    model = _MODEL.validate_json(text, strict=True)
    specs = [spec_of(entries) for entries in model.tensors]
    check_tensors(specs)
    return replace(cut(specs, num_fragments, num_shards), ties=model.ties), model.digest


@dataclass(frozen=True)
class _Model:
    """The field `manifest` of a header."""

    digest: str
    tensors: list[list[Any]]
    """The entries that `spec_of` reads."""
    ties: tuple[Tie, ...] = ()


_ORIGIN, _RECORD, _MODEL = TypeAdapter(Origin), TypeAdapter(Record), TypeAdapter(_Model)
_NUMBER: TypeAdapter[int | None] = TypeAdapter(int | None)
_BUFFERS = TypeAdapter(tuple[Kind, ...])
_CHUNK_ELEMENTS = TypeAdapter(Annotated[int, Field(gt=0, le=CHUNK_ELEMENTS_MAX, multiple_of=BLOCK_ELEMENTS)])


def _read_anchor(file: OldFile, name: str, header: Header, offset: int, crc32c: int) -> tuple[Payload, int]:
    """The anchor as a payload for learners, and the checksum up to its end."""
    chunks: list[Chunk] = []
    checksum = Checksum()
    for start in range(0, header.num_elements, header.chunk_elements):
        size = 2 * (min(start + header.chunk_elements, header.num_elements) - start)
        frame = NewFrame(size)
        crc32c = _read_into(file, name, _bytes_of(frame.chunk), offset, crc32c)
        chunk, chunk_crc32c = frame.sealed()
        chunks.append(chunk)
        checksum.add(chunk_crc32c)
        offset += size
    num_bytes = 2 * header.num_elements
    payload = PayloadHeader(ANCHOR, header.num_elements, header.chunk_elements, num_bytes, checksum.value)
    return Payload(payload, tuple(chunks)), crc32c


def _read_into(file: OldFile, name: str, out: memoryview, offset: int, crc32c: int) -> int:
    """Fill `out` from `offset`; return the checksum so far."""
    for start in range(0, len(out), SLICE_BYTES):
        part = out[start : start + SLICE_BYTES]
        try:
            count = file.read_into(part, offset + start)
        except OSError as error:
            if error.errno not in _LOST:
                raise
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
    """The checksum with more bytes, without a copy: google_crc32c accepts only read-only buffers."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return int(google_crc32c.extend(crc32c, view))


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


_NAME = re.compile(r"fragment-(\d{4,})-version-(\d{12})\.safetensors", re.ASCII)


def version_name(fragment_id: int, version: int) -> str:
    """The file name of a version. Names of one fragment sort by version."""
    return f"fragment-{fragment_id:04d}-version-{version:012d}.safetensors"


def parse_version_name(name: str) -> tuple[int, int] | None:
    """The fragment and the version in a file name; None: it is not the name of a version file."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def version_names(fragment_id: int, names: Iterable[str]) -> list[str]:
    """The names of this fragment's version files, newest first."""
    prefix = f"fragment-{fragment_id:04d}-"
    return sorted((name for name in names if name.startswith(prefix) and parse_version_name(name)), reverse=True)
