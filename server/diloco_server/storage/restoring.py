"""Puts versions into data folders for a number of shards, the same as before or another.

How a model is cut into fragments does not depend on the number of shards, only where fragments are placed does. So
values, momentum and anchors are written as they were, bit for bit; what changes in a file is its header. No `epoch-`
file is written: the shards take epochs that the run cannot have had before (docs/version-file.md).
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
    """Place a checkpoint's fragments on shards. Raises ConfigError where there are too few of them."""
    try:
        manifest = cut(contents.tensors, contents.num_fragments, num_shards)
    except ValueError as error:
        raise ConfigError(f"--shards {num_shards}: {error}") from None
    mine = [(f.fragment_id, f.pieces) for f in manifest.fragments]
    assert mine == [(f.fragment_id, f.pieces) for f in contents.manifest.fragments], "the cut knows the shards"
    return manifest


def restore(versions: Iterable[tuple[Header, StoredVersion]], manifest: Manifest, target: Path) -> None:
    """Write a version of every fragment as `target`/shard-N; all of it is there afterwards, or nothing.

    Raises ConfigError if `target` holds something or another restore into it is at work, and OSError.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: restore into a new folder")
    half = target.with_name(target.name + ".restoring")
    parent = Disk(target.parent)
    try:
        half.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{half} is there: another restore is at work, or one was killed. Wait for it, or delete that folder"
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
