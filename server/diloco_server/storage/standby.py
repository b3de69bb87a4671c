"""The folder of a standby, into which a shard's version files are copied until it is promoted.

An empty file with an epoch in its name marks the folder, so there is no content to damage:

    standby-NNN     files of the shard at epoch NNN are copied here: nobody may serve from the folder
    promoted-NNN    the process that serves from the folder is that shard, in later epochs than any before
    superseded-NNN  its shard was replaced by a promoted one, which began epoch NNN: nobody may serve from the folder
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from diloco_common.errors import DataError, VersionDamaged, WrongFolder
from diloco_common.wire.messages import LINE, VersionId
from diloco_server.storage.filesystem import FileSystem, NewFile
from diloco_server.storage.version_file import (
    TEMPORARY,
    VERSIONS_KEPT,
    Header,
    check_version,
    parse_version_name,
    read_header,
    version_name,
)

STANDBY, PROMOTED, SUPERSEDED = "standby", "promoted", "superseded"
_MARK = re.compile(rf"({STANDBY}|{PROMOTED}|{SUPERSEDED})-(\d{{12}})", re.ASCII)


class Mark(NamedTuple):
    what: str
    epoch: int


def mark_of(names: Sequence[str]) -> Mark | None:
    """The mark of a folder with these files; None: it is a shard's own, or new. A crash may leave several marks."""
    found = [Mark(m[1], int(m[2])) for name in names if (m := _MARK.fullmatch(name))]
    order = (STANDBY, PROMOTED, SUPERSEDED)
    return max(found, key=lambda mark: (order.index(mark.what), mark.epoch), default=None)


def put_mark(fs: FileSystem, what: str, epoch: int) -> None:
    """Set the mark durably, and remove earlier marks. A standby's mark never replaces a promotion. Raises OSError."""
    name = f"{what}-{epoch:012d}"
    before = [name for name in fs.names() if _MARK.fullmatch(name)]
    if what == STANDBY and any(name.startswith(PROMOTED) for name in before):
        return
    if name not in before:
        with closing(fs.create(name)) as file:
            file.sync()
        fs.sync_names()
    for old in before:  # but not marks that were added since
        if old != name:
            fs.remove(old)


def first_epoch_of(mark: Mark | None, wanted: int) -> int:
    """The lowest epoch that may begin in a folder. Raises WrongFolder if nobody may serve from it."""
    match mark:
        case Mark("standby", epoch):
            raise WrongFolder(
                f"this is the folder of a standby (of epoch {epoch}): `diloco promote FOLDER` makes it the shard's; do "
                "so only once the shard will not come back"
            )
        case Mark("superseded", epoch):
            raise WrongFolder(
                f"the shard of this folder was replaced by its standby, which began epoch {epoch}; what was merged "
                "here since is lost. Start it with --standby-of and the address of that shard: it begins anew as its "
                "standby"
            )
        case Mark("promoted", epoch):
            return (epoch // LINE + 1) * LINE + wanted % LINE
    return wanted


class StandbyFolder:
    """The folder of a running standby. Its calls may hang, or raise OSError."""

    def __init__(self, fs: FileSystem) -> None:
        """Raises WrongFolder for a folder that a shard serves from."""
        self._fs = fs
        names = fs.names()
        mark = mark_of(names)
        self.is_promoted = mark is not None and mark.what == PROMOTED
        if self.is_promoted:
            return
        if mark is None and any(name.startswith("epoch-") for name in names):
            raise WrongFolder("a shard serves from this folder: give the standby one of its own (shard.data_dir)")
        if mark is not None and mark.what == SUPERSEDED:  # a promoted shard's versions have replaced its versions
            for name in [*names]:
                if parse_version_name(name) or name.startswith("epoch-"):
                    fs.remove(name)
        for name in names:
            if name.endswith(TEMPORARY):
                fs.remove(name)

    def follows(self, epoch: int) -> None:
        put_mark(self._fs, STANDBY, epoch)

    def look(self) -> bool:
        mark = mark_of(self._fs.names())
        self.is_promoted = mark is not None and mark.what == PROMOTED
        return self.is_promoted

    def newest(self) -> dict[int, VersionId]:
        """Fragment -> its newest version."""
        return newest(self._fs)

    def drop_later(self, newest: Mapping[int, int]) -> None:
        """Remove versions above the shard's, since it has lost them. `newest`: fragment -> version; -1: it has none."""
        later = [version_name(f, v) for f, v in _versions(self._fs) if v > newest.get(f, v)]
        for name in later:
            self._fs.remove(name)
        if later:
            self._fs.sync_names()

    def begin(self, fragment_id: int, version: int) -> NewFile:
        self.drop_later({fragment_id: version})
        return self._fs.create(version_name(fragment_id, version) + TEMPORARY)

    def end(self, file: NewFile, fragment_id: int, version: int) -> Header:
        """Check every byte of a complete file, and keep it. Raises VersionDamaged."""
        name = version_name(fragment_id, version)
        file.sync()
        file.close()
        self._fs.rename(name + TEMPORARY, name)
        try:
            header = check_version(self._fs, name)
        except VersionDamaged:
            self._fs.remove(name)
            raise
        self._fs.sync_names()
        for old in [v for f, v in _versions(self._fs) if f == fragment_id][:-VERSIONS_KEPT]:
            self._fs.remove(version_name(fragment_id, old))
        return header


def newest(fs: FileSystem) -> dict[int, VersionId]:
    """Fragment -> its newest version with a readable header. Raises OSError."""
    found: dict[int, VersionId] = {}
    for fragment_id, version in _versions(fs):
        with suppress(VersionDamaged, DataError):
            found[fragment_id] = read_header(fs, version_name(fragment_id, version)).record.version_id
    return found


def _versions(fs: FileSystem) -> list[tuple[int, int]]:
    """Fragment and version of each file, ascending."""
    return sorted(found for name in fs.names() if (found := parse_version_name(name)) is not None)


def promote(fs: FileSystem) -> dict[int, VersionId]:
    """Promote the folder: the next process that serves from it is the shard. Returns its versions; safe to repeat.

    Raises WrongFolder if it is not a standby's folder, and OSError.
    """
    mark = mark_of(fs.names())
    if mark is None or mark.what == SUPERSEDED:
        raise WrongFolder(
            "this is no standby's folder: give the shard.data_dir of a server that runs with --standby-of"
        )
    put_mark(fs, PROMOTED, mark.epoch)
    return newest(fs)
