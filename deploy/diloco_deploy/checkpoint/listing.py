"""Lists the checkpoints below a folder: those of `diloco checkpoint`, and the regular ones of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from diloco_common.command import QuietConsole
from diloco_common.errors import DataError, NoCheckpoint
from diloco_deploy import units
from diloco_deploy.checkpoint.sources import open_checkpoint, shard_folders
from diloco_server.storage.checkpoint import Contents, joined
from diloco_server.storage.regular import FOLDER


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or its parts: one per shard, under the same name."""

    paths: tuple[Path, ...]
    contents: Contents | None
    """None: it is not whole."""
    state: str

    def as_json(self) -> dict[str, Any]:
        found = self.contents
        facts: dict[str, Any] = {"paths": [str(path) for path in self.paths], "state": self.state}
        if found is not None:
            facts |= {"run": found.run, "versions": list(found.versions), "bytes": found.num_bytes}
        return facts


def find_checkpoints(folder: Path) -> list[Entry]:
    """Checkpoints in `folder`, in its `checkpoints`, and in its shards' `checkpoints`. Raises NoCheckpoint, OSError."""
    if not folder.is_dir():
        raise NoCheckpoint(f"there is no folder {folder}")
    taken = sorted(_below(folder / FOLDER) or [p for p in _below(folder) if any(p.glob("checkpoint.json"))])
    parts: dict[str, list[Path]] = {}
    for shard in shard_folders(folder):
        for path in _below(shard / FOLDER):
            parts.setdefault(path.name, []).append(path)
    return [_entry([path]) for path in taken] + [_entry(paths) for _, paths in sorted(parts.items())]


def show(entries: Sequence[Entry]) -> None:
    """A table for people."""
    if not entries:
        print("no checkpoints yet: `diloco checkpoint FOLDER` takes one; with checkpoint.every, shards take them too")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "state", "versions", "size"):
        table.add_column(name, overflow="fold", justify="left" if name in ("checkpoint", "state") else "right")
    for entry in entries:
        versions, size = "", ""
        if entry.contents is not None:
            low, high = entry.contents.versions
            versions, size = (str(low) if low == high else f"{low}-{high}"), units.size(entry.contents.num_bytes)
        table.add_row(_pattern(entry.paths), entry.state, versions, size)
    QuietConsole(soft_wrap=True).print(table)


def _below(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _entry(paths: list[Path]) -> Entry:
    where = tuple(paths)
    try:
        contents = joined([open_checkpoint(str(path)).contents for path in paths])
    except NoCheckpoint:
        return Entry(where, None, "unfinished")
    except DataError as error:
        return Entry(where, None, error.code)
    return Entry(where, contents, "part" if contents.missing else "whole")


def _pattern(paths: Sequence[Path]) -> str:
    """The paths as one word that a shell expands to them."""
    if len(paths) == 1:
        return str(paths[0])
    shard = paths[0].parent.parent
    return str(shard.parent / "shard-*" / paths[0].relative_to(shard))
