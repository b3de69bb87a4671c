"""A version's file: anybody's safetensors library reads it, and no damage to any byte goes unnoticed (Fault 8)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from diloco_common.errors import VersionDamaged
from diloco_server.storage.filesystem import Disk, FileSystem
from diloco_server.storage.version_file import (
    FILE_HEADER_BYTES_MAX,
    StoredVersion,
    check_version,
    read_header,
    read_version,
    version_name,
    write_version,
)
from diloco_simulator.world.disk import FakeDisk
from stores import MANIFEST, ORIGIN, SIZE, assert_equal, make_version

NAME = version_name(0, 5)


def written(fs: FileSystem, stored: StoredVersion) -> int:
    file = fs.create(NAME)
    num_bytes = write_version(file, stored, ORIGIN, MANIFEST, 11)
    file.close()
    return num_bytes


@pytest.mark.parametrize("sends_changes", [False, True])
def test_a_version_comes_back_bit_for_bit(tmp_path: Path, sends_changes: bool) -> None:
    stored, disk = make_version(5, sends_changes=sends_changes), Disk(tmp_path)
    stored.values.theta[:3] = torch.tensor([float("nan"), -0.0, 1e-45])
    assert written(disk, stored) == (tmp_path / NAME).stat().st_size

    header, found = read_version(disk, NAME)

    assert_equal(found, stored)
    assert (header.origin, header.manifest, header.previous) == (ORIGIN, MANIFEST, 11)
    assert read_header(disk, NAME) == check_version(disk, NAME) == header


def test_the_plain_safetensors_library_reads_it(tmp_path: Path) -> None:
    stored = make_version(5, sends_changes=True)
    written(Disk(tmp_path), stored)

    with safe_open(tmp_path / NAME, framework="pt") as file:
        assert set(file.keys()) == {"theta", "outer.0", "anchor", "checksums"}
        assert torch.equal(file.get_tensor("theta"), stored.values.theta)
        assert torch.equal(file.get_tensor("outer.0"), stored.values.buffers[0])
        assert (file.get_tensor("anchor").dtype, file.get_tensor("anchor").shape) == (torch.bfloat16, (SIZE,))
        assert '"ann":5' in file.metadata()["record"]


INTACT = FakeDisk()
written(INTACT, make_version(5, sends_changes=True))
CONTENT = INTACT.content(NAME)


def disk_with(content: bytes) -> FakeDisk:
    disk = FakeDisk()
    disk.create(NAME).write(memoryview(content))
    return disk


def assert_detected(content: bytes) -> None:
    disk = disk_with(content)
    for look in (read_version, check_version):
        with pytest.raises(VersionDamaged, match=f"^{NAME} is damaged: "):
            look(disk, NAME)


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_a_byte_that_changed_is_detected_wherever_it_is(offset: int, flip: int) -> None:
    """Fault 8."""
    damaged = bytearray(CONTENT)
    damaged[offset] ^= flip
    assert_detected(bytes(damaged))


@given(st.integers(0, len(CONTENT) - 1))
def test_a_file_that_ends_early_is_detected(size: int) -> None:
    assert_detected(CONTENT[:size])


def test_a_header_that_claims_more_than_there_is_allocates_nothing() -> None:
    assert_detected((2**40).to_bytes(8, "little") + CONTENT[8:])


def forged(change: Callable[[dict[str, Any], dict[str, Any]], object], content: bytes = CONTENT) -> bytes:
    """The file with another header. `change` gets its tensors, and its metadata with their JSON opened."""

    def dump(value: object) -> str:
        return json.dumps(value, separators=(",", ":"), sort_keys=True)

    end = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:end])
    metadata = {key: json.loads(text) for key, text in tensors.pop("__metadata__").items()}
    change(tensors, metadata)
    text = dump(tensors | {"__metadata__": {key: dump(value) for key, value in metadata.items()}}).encode()
    return sealed(text + b" " * (-len(text) % 8), content[end:-8])


def sealed(header: bytes, data: bytes) -> bytes:
    head = struct.pack("<Q", len(header)) + header
    return head + data + struct.pack("<II", google_crc32c.value(head), google_crc32c.value(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: m["record"].update(version=6),
        lambda t, m: m["record"].update(fragment_id=7),
        lambda t, m: m["record"].update(tokens_merged="many"),
        lambda t, m: m["record"].update(merged_versions=["ann"]),
        lambda t, m: m["record"].pop("epoch"),
        lambda t, m: m.pop("record"),
        lambda t, m: m.update(chunk_elements=0),
        lambda t, m: m["origin"].update(run=["run"]),
        lambda t, m: m["origin"].update(shard_index=1),
        lambda t, m: m["manifest"].update(tensors=[]),
        lambda t, m: m["manifest"].update(tensors=[["a.weight", [10, 70], False], ["b.weight", [1, -701], False]]),
        lambda t, m: t.pop("theta"),
        lambda t, m: t["theta"].update(shape=[10**12]),
        lambda t, m: t["theta"].update(dtype="F64"),
        lambda t, m: t["anchor"].update(data_offsets=[0, 1400]),
    ],
)
def test_a_header_that_no_version_has_is_refused_in_one_line(change: Callable[[Any, Any], object]) -> None:
    """Bad input: from elsewhere, so a right checksum says nothing."""
    disk = disk_with(forged(change))
    for look in (read_version, check_version, read_header):
        with pytest.raises(VersionDamaged, match=f"^{NAME} is damaged: [^\n]*$"):
            look(disk, NAME)


BEYOND: dict[str, Callable[[Any, Any], object]] = {
    "tokens_merged is 18446744073709551616, not 0 to": lambda t, m: m["record"].update(tokens_merged=2**64),
    "forgotten_version is 6, not 0 to 5": lambda t, m: m["record"].update(forgotten_version=6),
    "merged_versions of 'ann' is 18446744073709551616": lambda t, m: m["record"]["merged_versions"].update(ann=2**64),
    "merged_by has a name of more than 64": lambda t, m: m["record"]["merged_by"].update(ann="x" * 65),
    "limit is LengthLimit.length=inf": lambda t, m: m["record"].update(limit={"length": float("inf"), "steps": 1}),
    "limit is LengthLimit.length=1.0, steps=0": lambda t, m: m["record"].update(limit={"length": 1.0, "steps": 0}),
    "multiple of 256": lambda t, m: m.update(chunk_elements=300),
    "num_fragments must be 1 to 4096": lambda t, m: m["origin"].update(num_fragments=2**40),
    "Tensor.shape has 9 entries": lambda t, m: m["manifest"].update(tensors=[["w", [1] * 9, False]]),
    "JoinRequest.tensors has 65537 entries": lambda t, m: m["manifest"].update(tensors=[["w", [1], False]] * 65537),
    "the tensors have 8796093022208 elements": lambda t, m: m["manifest"].update(
        tensors=[["a", [2**42], False], ["b", [2**42], False]]
    ),
}


@pytest.mark.parametrize(("words", "change"), BEYOND.items(), ids=list(BEYOND))
def test_a_number_that_no_shard_could_go_on_with_is_named(words: str, change: Callable[[Any, Any], object]) -> None:
    """A version that could be read, but not be sent, would end every Join for ever."""
    disk = disk_with(forged(change))
    for look in (read_version, check_version, read_header):
        with pytest.raises(VersionDamaged, match=words):
            look(disk, NAME)


@pytest.mark.parametrize("text", [b"", b"\xff" * 8, b"[" * 200_000, b'{"__metadata__":3}'])
def test_a_header_that_is_no_header_is_refused(text: bytes) -> None:
    assert_detected(sealed(text, b""))


def test_what_could_not_be_read_back_is_not_written() -> None:
    """The header is bounded for a reader, so it is for a writer."""
    disk = FakeDisk()
    too_many = {f"learner-{i}" * 2000: i for i in range(FILE_HEADER_BYTES_MAX // 18_000)}
    with pytest.raises(OSError, match=f"readers accept at most {FILE_HEADER_BYTES_MAX}"):
        written(disk, make_version(5, merged_versions=too_many))
    assert disk.content(NAME) == b""
