"""Checkpoints out of data folders: linked, listed, checked, and put back onto any number of shards, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from diloco_common.errors import BadCheckpoint, VersionDamaged
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_deploy.checkpoint import folders
from diloco_deploy.checkpoint.folders import take_checkpoint
from diloco_server.storage.checkpoint import (
    MANIFEST,
    Contents,
    decode_manifest,
    encode_manifest,
    find_damage,
    read_listed,
    read_manifest,
)
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import Origin, StoredVersion
from stores import LONG_AGO, make_version

TENSORS = [TensorSpec(f"layer.{i}.weight", (10, 70)) for i in range(6)]
NUM_SHARDS = 2
MODEL = cut(TENSORS, 6, NUM_SHARDS)
"""Six fragments of 700 elements on two shards."""


def version_of(fragment_id: int, version: int) -> StoredVersion:
    return make_version(version, fragment_id=fragment_id, sends_changes=fragment_id % 2 == 0)


def open_shard(folder: Path, index: int, run: str = "run") -> FileStore:
    origin = Origin(run, index, NUM_SHARDS, 6, "nesterov", "bfloat16")
    store = FileStore(Disk(folder / f"shard-{index}"), origin, first_epoch=LONG_AGO)
    store.recover()
    return store


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two shards with versions 0 to 2 of every fragment."""
    for index in range(NUM_SHARDS):
        store = open_shard(tmp_path, index)
        for fragment in MODEL.owned_by(index):
            for version in range(3):
                store.save(version_of(fragment.fragment_id, version), MODEL)
    return tmp_path


def shards(cluster: Path) -> list[Path]:
    return sorted(cluster.glob("shard-*"))


@pytest.fixture
def contents(cluster: Path) -> Contents:
    """Of the checkpoint `c`."""
    return take_checkpoint(shards(cluster), cluster / "c", whole=True)[0]


def test_a_checkpoint_is_the_newest_version_of_every_fragment_and_takes_no_space(cluster: Path) -> None:
    contents, damage = take_checkpoint(shards(cluster), cluster / "c", whole=True)

    assert [(f.fragment_id, f.version) for f in contents.files] == [(i, 2) for i in range(6)]
    assert (contents.missing, damage) == ([], [])
    for file in contents.files:
        assert (cluster / "c" / file.name).samefile(cluster / f"shard-{file.shard_index}" / file.name)
    assert read_manifest(Disk(cluster / "c"), "c") == contents
    assert find_damage(Disk(cluster / "c"), contents) == []


def test_where_there_are_no_links_files_are_copied_or_nothing_is_left(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    contents, _ = take_checkpoint(shards(cluster), cluster / "c", whole=True)

    assert (cluster / "c" / contents.files[0].name).stat().st_nlink == 1
    assert find_damage(Disk(cluster / "c"), contents) == []

    def half(source: Path, target: Path) -> None:
        target.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.shutil, "copyfile", half)
    with pytest.raises(OSError, match="No space"):
        folders.hard_link(cluster / "c" / contents.files[0].name, cluster / "copy")
    assert not (cluster / "copy").exists(), "a copy that does not fit leaves nothing"


def test_new_folders_are_synced_into_theirs_before_a_checkpoint_is_told(cluster, monkeypatch) -> None:
    """Else a power cut may take the folder that it lies in."""
    synced: list[Path] = []
    monkeypatch.setattr("diloco_server.storage.filesystem.sync_path", synced.append)
    monkeypatch.setattr(folders, "sync_path", synced.append)
    take_checkpoint(shards(cluster), cluster / "new" / "deep" / "c", whole=True)
    assert {cluster, cluster / "new", cluster / "new" / "deep", cluster / "new" / "deep" / "c"} <= set(synced)


def test_every_byte_of_a_checkpoint_is_checked(contents: Contents, cluster: Path) -> None:
    file = contents.files[3]
    path = cluster / "c" / file.name
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    for offset in (0, 9, 8 + header, 8 + header + 2801, len(good) - 8, len(good) - 1):
        bad = bytearray(good)
        bad[offset] ^= 0x10
        path.write_bytes(bad)
        (line,) = find_damage(Disk(cluster / "c"), contents)
        assert file.name in line
    path.write_bytes(good[:-1])
    assert len(find_damage(Disk(cluster / "c"), contents)) == 1
    path.unlink()
    assert len(find_damage(Disk(cluster / "c"), contents)) == 1


def test_no_byte_of_a_manifest_may_change(contents: Contents, cluster: Path) -> None:
    text = (cluster / "c" / MANIFEST).read_bytes()
    assert text == encode_manifest(contents)
    assert decode_manifest(text, "c") == contents
    for offset in range(len(text)):
        with pytest.raises(BadCheckpoint):
            decode_manifest(text[:offset] + bytes([text[offset] ^ 1]) + text[offset + 1 :], "c")
        if offset % 97 == 0:
            with pytest.raises(BadCheckpoint):
                decode_manifest(text[:offset], "c")


def dump(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def forged(contents: Contents, change: Callable[[Any], object]) -> bytes:
    """Another manifest, with a checksum that is right. `change` gets its `checkpoint`."""
    body = json.loads(encode_manifest(contents))["checkpoint"]
    change(body)
    whole = {"checkpoint": body, "crc32c": f"{google_crc32c.value(dump(body)):08x}"}
    return dump(whole)


def another_name(body: Any) -> None:
    name = body["files"][1]["name"]
    body["files"][0].update(name=name)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["files"][0].update(name="../../shard-0/" + b["files"][0]["name"]),
        another_name,
        lambda b: b["files"][0].update(version=7),
        lambda b: b["files"][0].update(fragment_id=-1, name="fragment--001-version-000000000002.safetensors"),
        lambda b: b["files"][0].pop("checksums"),
        lambda b: b["files"].append(b["files"][0]),
        lambda b: b["files"].clear(),
        lambda b: b.update(num_fragments=0),
        lambda b: b.update(tensors=[["a"]]),
        lambda b: b.update(tensors=[["a", [2**62] * 17, False]]),
        lambda b: b.pop("digest"),
    ],
)
def test_a_manifest_that_nobody_makes_is_refused_in_one_line(contents, cluster, change) -> None:
    """Bad input: from elsewhere, so a right checksum says nothing, and its names are not paths."""
    assert forged(contents, lambda _: None) == encode_manifest(contents)
    with pytest.raises(BadCheckpoint, match=r"^c is damaged: [^\n]*$"):
        decode_manifest(forged(contents, change), "c")


@pytest.mark.parametrize("what", [{"num_bytes": 9}, {"checksums": "0011223344556677"}, {"tokens_merged": 1}])
def test_a_file_that_differs_from_what_is_listed_is_found(contents, cluster, what) -> None:
    listed = replace(contents.files[0], **what)
    with pytest.raises(VersionDamaged, match="not the file that the manifest lists"):
        read_listed(Disk(cluster / "c"), listed, contents)
