"""A version's file: anybody's safetensors library reads it, and no damage to any byte goes unnoticed (faults.md 8)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from diloco_server.storage.filesystem import Disk, FileSystem
from diloco_server.storage.version import StoredVersion
from diloco_server.storage.version_file import (
    VersionDamaged,
    check_version,
    read_header,
    read_version,
    write_version,
)
from diloco_simulator.disk import FakeDisk
from stores import MANIFEST, ORIGIN, SIZE, assert_equal, make_version

NAME = "a-version"


def written(fs: FileSystem, stored: StoredVersion) -> int:
    file = fs.create(NAME)
    num_bytes = write_version(file, stored, ORIGIN, MANIFEST, 11)
    file.close()
    return num_bytes


@pytest.mark.parametrize("sends_changes", [False, True])
def test_a_version_comes_back_bit_for_bit(tmp_path: Path, sends_changes: bool) -> None:
    stored, disk = make_version(12, sends_changes=sends_changes), Disk(tmp_path)
    stored.values.theta[:3] = torch.tensor([float("nan"), -0.0, 1e-45])
    assert written(disk, stored) == (tmp_path / NAME).stat().st_size

    header, found = read_version(disk, NAME)

    assert_equal(found, stored)
    assert (header.origin, header.manifest, header.previous) == (ORIGIN, MANIFEST, 11)
    assert read_header(disk, NAME) == check_version(disk, NAME) == header


def test_the_plain_safetensors_library_reads_it(tmp_path: Path) -> None:
    stored = make_version(3, sends_changes=True)
    written(Disk(tmp_path), stored)

    with safe_open(tmp_path / NAME, framework="pt") as file:
        assert set(file.keys()) == {"theta", "outer.0", "anchor", "checksums"}
        assert torch.equal(file.get_tensor("theta"), stored.values.theta)
        assert torch.equal(file.get_tensor("outer.0"), stored.values.buffers[0])
        assert (file.get_tensor("anchor").dtype, file.get_tensor("anchor").shape) == (torch.bfloat16, (SIZE,))
        assert '"ann":3' in file.metadata()["record"]


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


def test_a_bit_that_flipped_in_the_header_or_the_checksums_is_detected_whichever_it_is() -> None:
    header = 8 + int.from_bytes(CONTENT[:8], "little")
    for offset in (*range(header), *range(len(CONTENT) - 8, len(CONTENT))):
        damaged = bytearray(CONTENT)
        damaged[offset] ^= 1 << random.Random(offset).randrange(8)
        with pytest.raises(VersionDamaged):
            read_version(disk_with(bytes(damaged)), NAME)


@given(st.integers(0, len(CONTENT) - 1))
def test_a_file_that_ends_early_is_detected(size: int) -> None:
    assert_detected(CONTENT[:size])


@given(st.binary(min_size=1, max_size=64))
def test_a_file_that_goes_on_after_its_end_is_detected(more: bytes) -> None:
    assert_detected(CONTENT + more)


@given(st.integers(0, len(CONTENT)), st.integers(1, 4096), st.randoms(use_true_random=False))
def test_a_stretch_of_zeros_or_of_another_part_is_detected(start: int, size: int, chance: random.Random) -> None:
    end = min(start + size, len(CONTENT))
    source = chance.randrange(len(CONTENT))
    for patch in (bytes(end - start), CONTENT[source : source + end - start].ljust(end - start, b"\1")):
        damaged = CONTENT[:start] + patch + CONTENT[end:]
        if damaged != CONTENT:
            assert_detected(damaged)


@given(st.binary(max_size=400))
def test_bytes_that_never_were_a_version_are_refused(content: bytes) -> None:
    assert_detected(content)


def test_a_header_that_claims_more_than_there_is_allocates_nothing() -> None:
    assert_detected((2**40).to_bytes(8, "little") + CONTENT[8:])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(VersionDamaged, match=f"^{NAME} is damaged: it cannot be opened"):
        read_version(FakeDisk(), NAME)
