"""Writes versions into data folders for any number of shards.

The number of shards decides where fragments are placed, but not how the model is cut. So values, momentum and anchors
are written unchanged, bit for bit; only the header of a file changes. No `epoch-` file is written: the shards take
epochs that the run cannot have had before (docs/version-file.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from diloco_common.errors import ConfigError
from diloco_common.manifest import Manifest, cut
from diloco_server.storage.checkpoint import Contents, placed
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.version import StoredVersion
from diloco_server.storage.version_file import Header, version_name, write_version


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
    """Write a version of every fragment to `target`/shard-N: afterwards all of it is there, or nothing.

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
            origin = placed(header.origin, manifest.num_shards, index)
            file = disks[index].create(version_name(stored.record.fragment_id, stored.record.version))
            try:
                write_version(file, stored, origin, manifest, None)
                file.sync()
            finally:
                file.close()
        for disk in disks:
            disk.sync_names()
        half.rename(target)
        parent.sync_names()
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
