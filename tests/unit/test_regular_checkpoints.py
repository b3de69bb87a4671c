"""A shard's own checkpoints: named by version, whole or not there, the newest few kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco_common.errors import VersionDamaged
from diloco_common.wire.manifest import Manifest, TensorSpec, companion_of, cut
from diloco_server.storage.checkpoint import find_damage, read_manifest
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.folders import RegularCheckpoints
from diloco_server.storage.store import FileStore
from stores import MANIFEST, ORIGIN, make_version, open_store

W = TensorSpec("w", (10, 70))
WITH_COMPANION = cut([W, companion_of(W, "Adam")], 1, 1)
"""Fragment 0 is the model, and fragment 1 its companion."""


class Shard:
    """A store of two fragments, and the checkpoints that are made of it."""

    def __init__(self, folder: Path, every: int = 2, keep: int = 2, manifest: Manifest = MANIFEST) -> None:
        self.folder, self.manifest = folder, manifest
        self.store: FileStore = open_store(Disk(folder), replace(ORIGIN, num_fragments=len(manifest.model_fragments)))
        self.regular = RegularCheckpoints(folder, every, keep)
        found = self.store.recover().versions
        recovered = {f.stored.record.fragment_id: f.stored.record.version for f in found}
        self.finished = self.regular.begin(recovered, manifest, 0)

    def save(self, fragment_id: int, *versions: int) -> None:
        for version in versions:
            self.store.save(make_version(version, fragment_id=fragment_id), self.manifest)

    def write(self, fragment_id: int, *versions: int) -> list[int]:
        """Save versions, and tell; returns the checkpoints that became whole."""
        finished = []
        for version in versions:
            self.save(fragment_id, version)
            finished += self.regular.written(fragment_id, version, self.manifest, 0)
        return finished

    @property
    def checkpoints(self) -> dict[int, list[int]]:
        """Checkpoint -> the versions in it, of those that are whole."""
        found = {}
        for folder in sorted((self.folder / "checkpoints").iterdir()):
            if (folder / "checkpoint.json").exists():
                contents = read_manifest(Disk(folder), folder.name)
                assert find_damage(Disk(folder), contents) == []
                found[int(folder.name[8:])] = [file.version for file in contents.files]
        return found


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


def test_a_checkpoint_holds_every_fragment_at_the_version_that_names_it(shard: Shard) -> None:
    assert shard.write(0, 0, 1, 2, 3) == []
    assert shard.write(1, 0, 1) == []
    assert shard.write(1, 2) == [2]
    assert shard.checkpoints == {2: [2, 2]}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    shard = Shard(tmp_path, keep=2)
    for version in range(9):
        shard.write(0, version)
        shard.write(1, version)
    assert shard.checkpoints == {6: [6, 6], 8: [8, 8]}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_versions_that_never_reach_the_disk_give_way_to_the_next(tmp_path: Path) -> None:
    """Durability "interval": one fragment is written at 5 and 9, the other at 7."""
    shard = Shard(tmp_path, keep=5)
    assert shard.write(0, 5) == []
    assert shard.write(1, 7) == [4]
    assert shard.write(0, 9) == [6]
    assert shard.checkpoints == {4: [5, 7], 6: [9, 7]}


@pytest.mark.parametrize("told", [0, 1])
def test_a_life_that_ends_in_the_middle_of_one_leaves_it_to_the_next(shard: Shard, tmp_path: Path, told: int) -> None:
    """It ended before it was told of version 2 of the second fragment, or after it was told of the first's."""
    shard.write(0, 1)
    (shard.write if told else shard.save)(0, 2)
    shard.write(1, 1)

    again = Shard(tmp_path)
    assert again.finished == []
    assert again.write(1, 2) == [2]
    assert again.checkpoints == {2: [2, 2]}

    third = Shard(tmp_path)
    assert third.finished == []
    assert third.write(0, 3) == []
    assert third.checkpoints == {2: [2, 2]}


def test_one_with_a_damaged_file_gives_way_to_the_next(shard: Shard, tmp_path: Path) -> None:
    shard.write(0, 2)
    (path,) = (tmp_path / "checkpoints").glob("*/fragment-0000-*")
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(VersionDamaged, match=path.name):
        shard.write(1, 2)
    assert shard.checkpoints == {}
    for version in (3, 4):
        for fragment_id in (0, 1):
            shard.write(fragment_id, version)
    assert shard.checkpoints == {2: [3, 3], 4: [4, 4]}


@pytest.mark.parametrize(
    ("manifest", "before", "refused", "later", "found"),
    [(MANIFEST, (0, 2), (1, 2), (1, 3), [2, 2]), (WITH_COMPANION, (1, 0), (0, 2), (1, 1), [2, 0])],
    ids=["two fragments", "a companion is not taken twice"],
)
def test_a_disk_that_refuses_is_tried_again_with_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: Manifest, before: tuple[int, int],
    refused: tuple[int, int], later: tuple[int, int], found: list[int],
) -> None:  # fmt: skip
    shard = Shard(tmp_path, manifest=manifest)
    shard.write(*before)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("diloco_server.storage.folders.write_manifest", full)
        with pytest.raises(OSError, match="No space"):
            shard.write(*refused)
    assert shard.checkpoints == {}
    assert shard.write(*later) == [2]
    assert shard.checkpoints == {2: found}
