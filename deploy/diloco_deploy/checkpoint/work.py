"""What the commands for checkpoints and models read, write and say."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from diloco_common import units
from diloco_common.errors import EXIT_OK, DataError
from diloco_common.settings_loader import default_of
from diloco_common.wire.manifest import Tie
from diloco_deploy.checkpoint.options import Writing
from diloco_deploy.checkpoint.sources import Whole, open_checkpoint
from diloco_deploy.checkpoint.written import write
from diloco_deploy.run.folder import shard_folders
from diloco_server.storage.checkpoint import MANIFEST, Contents, joined, total_tokens
from diloco_server.storage.folders import FOLDER, is_checkpoint
from diloco_worker.export import empty_tensors, lay_out
from diloco_worker.global_model import GlobalModel, buffers_of, keys_of

DONE = "DONE"
"""The file that says that a folder of `diloco pull --each` is whole."""


def model_in(whole: Whole) -> GlobalModel:
    """The model that was saved. Raises VersionDamaged and OSError."""
    manifest = whole.contents.manifest
    tensors, versions, ties = empty_tensors(manifest), dict[int, int](), tuple[Tie, ...]()
    fragments = {fragment.fragment_id: fragment for fragment in manifest.exported_fragments}
    for header, stored in whole.read():
        ties = max(ties, header.manifest.ties, key=len)
        if (fragment := fragments.get(stored.record.fragment_id)) is not None:
            lay_out(stored.values.theta, fragment, tensors)
            versions[fragment.fragment_id] = stored.record.version
    return GlobalModel(tensors, buffers_of(manifest), versions, total_tokens(whole.contents), keys_of(tensors, ties))


# ------------------------------------------------------------------ checkpoints


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or its parts: one per shard, under the same name."""

    paths: tuple[Path, ...]
    state: str
    contents: Contents | None = None
    """None: it is not whole."""

    def __str__(self) -> str:
        """Its paths as one word that a shell expands to them, and what is in it."""
        first = self.paths[0]
        parts = first.parents[2] / "shard-*" / FOLDER / first.name if len(self.paths) > 1 else first
        return f"{parts}: {self.state if self.contents is None else words(self.contents)}"

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"paths": [str(path) for path in self.paths], "state": self.state}
        if (found := self.contents) is not None:
            facts |= {"run": found.run, "versions": list(found.versions), "bytes": found.num_bytes}
        return facts


def find_checkpoints(folder: Path) -> list[Entry]:
    """Checkpoints in `folder`, in its `checkpoints`, and in its shards'. Raises OSError."""
    taken = sorted(folder.glob(f"{FOLDER}/*/")) or sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    parts: dict[str, list[Path]] = {}
    for shard in shard_folders(folder):
        for path in shard.glob(f"{FOLDER}/*/"):
            parts.setdefault(path.name, []).append(path)
    return [_entry(path) for path in taken] + [_entry(*paths) for _, paths in sorted(parts.items())]


def _entry(*paths: Path) -> Entry:
    if not all(map(is_checkpoint, paths)):
        return Entry(paths, "unfinished")
    try:
        contents = joined([open_checkpoint(str(path)).contents for path in paths])
    except DataError as error:
        return Entry(paths, error.code)
    return Entry(paths, "part" if contents.missing else "whole", contents)


def show(entries: Sequence[Entry], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([entry.as_json() for entry in entries], indent=2))
    elif entries:
        print(*entries, sep="\n")
    else:
        print("no checkpoints yet: `diloco checkpoint FOLDER` takes one; with checkpoint.every, shards take them too")


def words(contents: Contents) -> str:
    """What is in it, for people."""
    total = len(contents.files) + len(contents.missing)
    shards = ", ".join(map(str, sorted({file.shard_index for file in contents.files})))
    part = f" (a part: shards {shards} of {contents.num_shards})" if contents.missing else ""
    versions, size = _versions(contents.versions), units.size(contents.num_bytes)
    return f"{len(contents.files)} of {total} fragments{part}, {versions}, {size}"


def go_on_with(contents: Contents, folder: Path, shards: int) -> str:
    """The command, with the settings other than defaults that a shard needs to accept these versions."""
    given = {"run.id": contents.run, "sync.fragments": contents.num_fragments, "outer.optimizer": contents.optimizer}
    settings = [("--set", f"{name}={value}") for name, value in given.items() if str(value) != default_of(name)]
    return shlex.join(["diloco", "up", "--folder", str(folder), "--shards", str(shards), *chain(*settings)])


# ------------------------------------------------------------------ models


def write_out(found: GlobalModel, how: Writing, of: str = "") -> int:
    """Write one, and say so: the exit code. `of`: what the versions are, if not the newest."""
    file, fixed = write(found, how)
    trained = sum(t.numel() for name, t in found.tensors.items() if name not in found.buffers)
    print(
        f"{file}: {units.count(trained)} parameters as {how.dtype}, {of}{_versions(found.versions.values())} of "
        f"{len(found.versions)} fragments, {units.count(found.tokens_merged)} tokens merged, "
        f"{f'{fixed} tensors as they were, ' if fixed else ''}{units.size(file.stat().st_size)}"
    )
    return EXIT_OK


def write_each(found: Iterable[GlobalModel], how: Writing, keep: int | None) -> int:
    """A folder for each, and `DONE` in it last. `keep`: so many of those written last. Raises DataError."""
    written: list[Path] = []
    if there := next(how.out.glob("version-*"), None):
        raise DataError(f"{there} is of another run, or of an earlier command: give --out another folder")
    for one in found:
        folder = how.out / f"version-{one.version:06}"
        (folder / DONE).unlink(missing_ok=True)
        write_out(one, replace(how, out=folder))
        (folder / DONE).touch()
        written = [*(one for one in written if one != folder), folder]
        for old in written[: -keep if keep else 0]:
            (old / DONE).unlink(missing_ok=True)
            shutil.rmtree(old)
            written.remove(old)
    return EXIT_OK


def _versions(versions: Collection[int]) -> str:
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low} to {high}"
