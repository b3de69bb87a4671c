"""Takes checkpoints from the data folders of shards by hard links, and restores them into new folders.

A checkpoint can be restored for any number of shards. That number changes where fragments are placed, but not how the
model is cut. So values, momentum and anchors are written unchanged, bit for bit; only a file's header changes. No
`epoch-` file is written: the shards take epochs that the run cannot have had before (docs/version-file.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from diloco_common.errors import BadCheckpoint, ConfigError, VersionDamaged
from diloco_common.wire.manifest import Fragment, Manifest, cut
from diloco_server.storage.checkpoint import CheckpointFile, Contents, contents_of, describe, write_manifest
from diloco_server.storage.filesystem import Disk, sync_path
from diloco_server.storage.folders import fragments_in, hard_link, is_checkpoint
from diloco_server.storage.version_file import Header, StoredVersion, version_name, version_names, write_version

TRIES = 100
"""Attempts to link a fragment whose files keep vanishing; a shard would have to make a version during each."""


def take_checkpoint(sources: Sequence[Path], target: Path, *, whole: bool) -> tuple[Contents, list[str]]:
    """Link the newest version of each fragment into a new folder. Returns its contents, and the damage it skipped.

    Args:
        sources: data folders of shards.
        target: the checkpoint; must not exist.
        whole: require every fragment of the model; otherwise only those of the named shards.

    Raises:
        BadCheckpoint, OSError.
    """
    Disk(target.parent)  # makes the folders above the target, and makes them survive a crash
    try:
        target.mkdir(mode=0o700)
    except FileExistsError:
        raise _exists(target) from None
    try:
        disk = Disk(target)
        damage: list[str] = []
        described = [
            _link_newest(source, fragment_id, target, disk, damage)
            for source in sources
            for fragment_id in fragments_in(source)
        ]
        if not described:
            raise BadCheckpoint(f"there are no versions in {', '.join(map(str, sources))}: has the run begun?")
        contents = contents_of(described)
        here = {file.shard_index for file in contents.files}
        check_complete(contents, sources, [f for f in contents.manifest.fragments if whole or f.shard_index in here])
        write_manifest(disk, contents)
        sync_path(target.parent)
        return contents, damage
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _link_newest(
    source: Path, fragment_id: int, target: Path, disk: Disk, damage: list[str]
) -> tuple[Header, CheckpointFile]:
    worse: list[str] = []
    for _ in range(TRIES):
        names = version_names(fragment_id, [entry.name for entry in os.scandir(source)])
        name = next((name for name in names if name not in worse), None)
        if name is None:
            raise BadCheckpoint(f"fragment {fragment_id} has no intact version in {source}")
        try:
            hard_link(source / name, target / name)
        except FileNotFoundError:
            continue  # there is a newer one now
        try:
            return describe(disk, name)
        except VersionDamaged as error:
            damage.append(str(error))
            worse.append(name)
            disk.remove(name)
    raise BadCheckpoint(
        f"fragment {fragment_id} in {source}: its versions vanished {TRIES} times before they were linked; try again"
    )


def check_complete(contents: Contents, where: Sequence[str | Path], needed: Iterable[Fragment]) -> None:
    """Raises BadCheckpoint if one of these fragments is missing."""
    homes = {fragment.fragment_id: fragment.shard_index for fragment in needed}
    if missing := [i for i in contents.missing if i in homes]:
        shards = ", ".join(map(str, sorted({homes[i] for i in missing})))
        raise BadCheckpoint(
            f"{len(missing)} of {len(homes)} fragments are missing in {', '.join(map(str, where))}: those of shards "
            f"{shards} of {contents.num_shards}. Name the parts of all shards, or wait until the run is seeded"
        )


def _exists(target: Path) -> BadCheckpoint:
    half = "exists, but is not a checkpoint (perhaps half of one)"
    what = "is already a checkpoint" if is_checkpoint(target) else half
    return BadCheckpoint(f"{target} {what}: give another --name, or delete it")


def place(contents: Contents, num_shards: int) -> Manifest:
    """Place a checkpoint's fragments on shards. Raises ConfigError if there are too few fragments."""
    try:
        manifest = cut(contents.tensors, contents.num_fragments, num_shards)
    except ValueError as error:
        raise ConfigError(f"--shards {num_shards}: {error}") from None
    mine = [(f.fragment_id, f.pieces) for f in manifest.fragments]
    assert mine == [(f.fragment_id, f.pieces) for f in contents.manifest.fragments], "the cut depends on the shards"
    return manifest


def restore(versions: Iterable[tuple[Header, StoredVersion]], manifest: Manifest, target: Path) -> None:
    """Write a version of every fragment to `target`/shard-N, all or nothing.

    Raises OSError, and ConfigError if `target` is not empty or another restore writes to it.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: restore into a new folder")
    half = target.with_name(target.name + ".restoring")
    parent = Disk(target.parent)
    try:
        half.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            f"{half} exists: another restore is running, or one was killed. Wait for it, or delete that folder"
        ) from None
    try:
        homes = {f.fragment_id: f.shard_index for f in manifest.fragments}
        disks = [Disk(half / f"shard-{index}") for index in range(manifest.num_shards)]
        for header, stored in versions:
            index = homes[stored.record.fragment_id]
            origin = replace(header.origin, num_shards=manifest.num_shards, shard_index=index)
            if manifest.ties != header.manifest.ties:
                manifest = replace(manifest, ties=header.manifest.ties)
            name = version_name(stored.record.fragment_id, stored.record.version)
            with contextlib.closing(disks[index].create(name)) as file:
                write_version(file, stored, origin, manifest, None)
                file.sync()
        for disk in disks:
            disk.sync_names()
        half.rename(target)
        parent.sync_names()
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
