"""Versions of tiny fragments, and stores on fake disks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from builders import random_values
from diloco_common.codec import encode_payload
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record
from diloco_server.core.round import LengthLimit
from diloco_server.storage.filesystem import FileSystem
from diloco_server.storage.store import FileStore, Found
from diloco_server.storage.version_file import Origin, StoredVersion

SIZE = 700
TENSORS = [TensorSpec("a.weight", (10, 70)), TensorSpec("b.weight", (7, 100), rule="mean")]
MANIFEST = cut(TENSORS, 2, 1)
"""Two fragments of 700 elements."""
ORIGIN = Origin("run", 0, 1, 2, "nesterov", "bfloat16")
LONG_AGO = 1_700_000_000
"""The epoch to take where none is known."""


def make_version(
    version: int, *, fragment_id: int = 0, epoch: int = 1, sends_changes: bool = False, **more: Any
) -> StoredVersion:
    """A version whose every number tells which one it is."""
    values = Values(random_values(SIZE, 100 * version + fragment_id), [random_values(SIZE, 7 + version).bfloat16()])
    anchor = encode_payload(random_values(SIZE, 13 + version), "bfloat16", chunk_elements=256)
    record = Record(
        fragment_id, epoch, version, {"ann": version, "ben": 0}, {"ann": "process-1", "ben": "process-2"},
        1000 * version, limit=LengthLimit(0.5 + version, 12),
    )  # fmt: skip
    return StoredVersion(replace(record, **more), values, anchor if sends_changes else None)


def open_store(fs: FileSystem, origin: Origin = ORIGIN) -> FileStore:
    return FileStore(fs, origin, first_epoch=LONG_AGO)


def assert_equal(found: StoredVersion, expected: StoredVersion) -> None:
    """Bit for bit."""
    assert found.record == expected.record
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert found.anchor == expected.anchor


def names(found: list[Found]) -> dict[int, tuple[int, int]]:
    """Fragment -> (epoch, version)."""
    return {f.stored.record.fragment_id: (f.stored.record.epoch, f.stored.record.version) for f in found}
