"""Takes checkpoints by hard links, straight out of the data folders of shards that run or not, without asking them.

A version file never changes once it has its name, and the last two are kept. So a link to one is a copy; all that can
happen is that a file goes between looking and linking, and then a newer one is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from diloco_server.storage.checkpoint import (
    MANIFEST,
    CheckpointExists,
    CheckpointFile,
    CheckpointIncomplete,
    Contents,
    NoCheckpoint,
    contents_of,
    describe,
    write_manifest,
)
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.version_file import Header, VersionDamaged, parse_version_name, version_names

TRIES = 100
"""Looks at a fragment whose files go each time: a shard would have to make as many versions meanwhile."""
_NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""Another disk, or one that knows no hard links."""


def fragments_in(folder: Path) -> list[int]:
    """Fragments that a data folder has versions of. Raises OSError."""
    return sorted({found[0] for entry in os.scandir(folder) if (found := parse_version_name(entry.name))})


def take_checkpoint(sources: Sequence[Path], target: Path, *, whole: bool) -> tuple[Contents, list[str]]:
    """Link the newest version of each fragment into a new folder, and return what is there and what was passed over.

    Args:
        sources: data folders of shards.
        target: the checkpoint; must not exist.
        whole: every fragment of the model has to be there; else those of the shards that were named.

    Raises:
        CheckpointExists, NoCheckpoint (nothing to take), CheckpointIncomplete, CheckpointsDiffer, OSError.
    """
    Disk(target.parent)  # and new folders above it outlive a crash, too
    try:
        target.mkdir()
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
            raise NoCheckpoint(f"there are no versions in {', '.join(map(str, sources))}: has the run begun?")
        contents = contents_of(described)
        _check_complete(contents, None if whole else {file.shard_index for file in contents.files})
        write_manifest(disk, contents)
        _sync(target.parent)
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
            raise CheckpointIncomplete(f"fragment {fragment_id} has no intact version in {source}")
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
    raise CheckpointIncomplete(f"the versions of fragment {fragment_id} in {source} went as often as they were found")


def hard_link(source: Path, target: Path) -> None:
    """Give a version file another name, in place of any file of that name; where there are no links, copy it. The name
    may not outlive a crash until the folder is synced. Raises OSError; FileNotFoundError if it has gone."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            shutil.copyfile(source, temporary)
            _sync(temporary)
        except OSError:
            temporary.unlink(missing_ok=True)  # it may have been what filled the disk
            raise
    temporary.rename(target)
    with contextlib.suppress(FileNotFoundError):  # renaming one link over another of the same file leaves both
        temporary.unlink()


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def remove_checkpoint(folder: Path) -> None:
    """Take a checkpoint away if it is there, its manifest first: what is left after a crash is none. Raises OSError."""
    if not folder.is_dir():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    _sync(folder)
    shutil.rmtree(folder)


def _check_complete(contents: Contents, shards: set[int] | None) -> None:
    manifest = contents.manifest
    homes = {f.fragment_id: f.shard_index for f in manifest.fragments}
    missing = [i for i in contents.missing if shards is None or homes[i] in shards]
    if missing:
        raise CheckpointIncomplete(
            f"{len(missing)} of {len(homes)} fragments have no version here (fragment {missing[0]} of shard "
            f"{homes[missing[0]]} is the first): name the data folders of all shards, or wait until the run is seeded"
        )


def _exists(target: Path) -> CheckpointExists:
    what = "is a checkpoint already" if is_checkpoint(target) else "exists, and is no checkpoint (perhaps half of one)"
    return CheckpointExists(f"{target} {what}: give another --name, or delete it")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
