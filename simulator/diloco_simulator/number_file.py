"""Version files of schedules on numbers: what `FileStore` writes and reads there in place of safetensors files.

In which order files are written, synced, renamed and removed is the store's, and real. So is what a checksum is for:
any byte may change, and the end may be missing.
"""

from __future__ import annotations

import marshal
import zlib
from dataclasses import astuple
from functools import lru_cache
from typing import Any

from diloco_common.codec import CHUNK_ELEMENTS
from diloco_common.codec.change import ANCHOR
from diloco_common.manifest import Manifest, cut
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record
from diloco_server.storage.filesystem import FileSystem, NewFile
from diloco_server.storage.version import Origin, StoredVersion
from diloco_server.storage.version_file import Header, VersionDamaged
from diloco_simulator.numbers import Number, carried, payload, specs

CHECKSUM_BYTES = 4


def checksum(content: bytes) -> int:
    return zlib.crc32(content)


def write_version(
    file: NewFile, stored: StoredVersion, origin: Origin, manifest: Manifest, previous: int | None
) -> int:
    """As `version_file.write_version`."""
    r, anchor, theta = stored.record, stored.anchor, _number(stored.values.theta)
    record = (
        r.fragment_id, r.epoch, r.version, r.merged_versions, r.merged_by, r.tokens_merged, r.norms, r.seed_norm,
        r.forgotten_version,
    )  # fmt: skip
    origin_tuple, num_tensors = _origin_tuple(origin), len(manifest.tensors)
    held = None if anchor is None else carried(anchor)
    content = marshal.dumps((origin_tuple, num_tensors, record, theta.value, held, previous))
    file.write(memoryview(content))
    file.write(memoryview(checksum(content).to_bytes(CHECKSUM_BYTES, "little")))
    return len(content) + CHECKSUM_BYTES


def read_version(fs: FileSystem, name: str) -> tuple[Header, StoredVersion]:
    """As `version_file.read_version`. Raises VersionDamaged."""
    file = fs.open(name)
    content = bytearray(file.size)
    file.read_into(memoryview(content), 0)
    body, tail = bytes(content[:-CHECKSUM_BYTES]), content[-CHECKSUM_BYTES:]
    if checksum(body) != int.from_bytes(tail, "little") or not body:
        raise VersionDamaged(name, "its checksum is wrong")
    origin_tuple, num_tensors, record, theta, held, previous = marshal.loads(body)
    origin = Origin(*origin_tuple)
    manifest = _cut(num_tensors, origin.num_fragments, origin.num_shards)
    header = Header(origin, manifest, Record(*record), previous, 0, held is not None, CHUNK_ELEMENTS, 1)
    number: Any = Number(theta)
    anchor = None if held is None else payload(held, ANCHOR)
    return header, StoredVersion(header.record, Values(number, []), anchor)


@lru_cache(256)
def _origin_tuple(origin: Origin) -> tuple[Any, ...]:
    return astuple(origin)


@lru_cache(64)
def _cut(num_tensors: int, num_fragments: int, num_shards: int) -> Manifest:
    return cut(specs(num_tensors), num_fragments, num_shards)


def _number(theta: Any) -> Number:
    return theta  # type: ignore[no-any-return]
