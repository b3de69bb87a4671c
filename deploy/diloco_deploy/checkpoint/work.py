"""What `diloco checkpoint`, `restore`, `export` and `pull` do, and what they print."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from diloco_common import units
from diloco_common.command import QuietConsole
from diloco_common.errors import EXIT_DATA, EXIT_OK, BadCheckpoint, ConfigError, DataError
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Tie
from diloco_deploy.checkpoint.notify import Notified
from diloco_deploy.checkpoint.objects import copy_checkpoint
from diloco_deploy.checkpoint.options import Writing
from diloco_deploy.checkpoint.sources import Whole, data_folders, join, open_checkpoint, open_whole, shard_folders
from diloco_deploy.checkpoint.written import write
from diloco_server.storage.checkpoint import MANIFEST, Contents, find_damage, joined, total_tokens
from diloco_server.storage.folders import FOLDER, place, restore, take_checkpoint
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
    """Checkpoints in `folder`, in its `checkpoints`, and in its shards'. Raises BadCheckpoint, OSError."""
    if not folder.is_dir():
        raise BadCheckpoint(f"there is no folder {folder}")
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
    if not all((path / MANIFEST).exists() for path in paths):
        return Entry(where, None, "unfinished")
    try:
        contents = joined([open_checkpoint(str(path)).contents for path in paths])
    except DataError as error:
        return Entry(where, None, error.code)
    return Entry(where, contents, "part" if contents.missing else "whole")


def _pattern(paths: Sequence[Path]) -> str:
    """The paths as one word that a shell expands to them."""
    if len(paths) == 1:
        return str(paths[0])
    shard = paths[0].parent.parent
    return str(shard.parent / "shard-*" / paths[0].relative_to(shard))


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raises DataError for what the disk does not do."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or 'the disk'}: {error.strerror or error}") from None


@_disk_errors()
def take(folders: Sequence[Path], name: str | None, into: Path | None, *, as_json: bool) -> int:
    """The exit code, as of the functions below. Raises DilocoError."""
    name = name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if not _NAME.fullmatch(name) or name.startswith((".", "version-")):
        raise ConfigError(
            f"--name {name}: give 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with '.' or with version- (shards name "
            "their own checkpoints so)"
        )
    began = time.perf_counter()
    sources = [path for folder in folders for path in data_folders(folder)]
    target = (into or folders[0] / FOLDER) / name
    contents, damage = take_checkpoint(sources, target, whole=sources != list(folders))
    took_s = time.perf_counter() - began
    for line in damage:
        print(f"passed over: {line}", file=sys.stderr)
    if as_json:
        _print_json({"checkpoint": str(target), **_facts(contents), "took_s": round(took_s, 4), "passed_over": damage})
    else:
        print(f"{target}: {_words(contents)}, in {1000 * took_s:.0f} ms")
    return EXIT_OK


@_disk_errors()
def show_all(folders: Sequence[Path], *, as_json: bool) -> int:
    found = [entry for folder in folders for entry in find_checkpoints(folder)]
    if as_json:
        _print_json([entry.as_json() for entry in found])
    else:
        show(found)
    return EXIT_OK


@_disk_errors()
def verify(checkpoints: Sequence[str], *, as_json: bool) -> int:
    began = time.perf_counter()
    sources = [open_checkpoint(name) for name in checkpoints]
    contents = join([(source.where, source.contents) for source in sources])
    damage = [f"{source.where}: {line}" for source in sources for line in find_damage(source.files, source.contents)]
    took_s = time.perf_counter() - began
    if as_json:
        _print_json({**_facts(contents), "damage": damage, "took_s": round(took_s, 4)})
    for line in damage:
        print(f"diloco: {line} [BAD_CHECKPOINT]", file=sys.stderr)
    if not damage and not as_json:
        rate = units.size(contents.num_bytes / max(took_s, 1e-9))
        print(f"intact: {_words(contents)}, every byte checked in {took_s:.2f} s ({rate}/s)")
    return EXIT_DATA if damage else EXIT_OK


@_disk_errors()
def copy(checkpoint: str, url: str) -> int:
    source = open_checkpoint(checkpoint)
    began = time.perf_counter()
    copy_checkpoint(source.files, source.contents, url)
    print(f"{url}: {_words(source.contents)}, in {time.perf_counter() - began:.2f} s")
    return EXIT_OK


@_disk_errors()
def restore_into(folder: Path, sources: Sequence[str], shards: int) -> int:
    if shards < 1:
        raise ConfigError(f"--shards {shards}: at least 1")
    began = time.perf_counter()
    whole = open_whole(sources)
    manifest = place(whole.contents, shards)
    restore(whole.read(), manifest, folder)
    print(f"{folder}: {_words(whole.contents)} on {shards} shards, in {time.perf_counter() - began:.2f} s")
    flags = f"--folder {shlex.quote(str(folder))} --shards {shards}{_settings_of(whole.contents)}"
    print(f"go on with: diloco up {flags}")
    return EXIT_OK


@_disk_errors()
def export(sources: Sequence[str], how: Writing) -> int:
    return write_out(model_in(open_whole(sources, model_only=True)), how)


@_disk_errors()
def write_out(found: GlobalModel, how: Writing, of: str = "") -> int:
    """`of`: what the versions are, if not the newest."""
    file, fixed = write(found, how)
    trained = sum(t.numel() for name, t in found.tensors.items() if name not in found.buffers)
    print(
        f"{file}: {units.count(trained)} parameters as {how.dtype}, {of}{_versions(found.versions.values())} of "
        f"{len(found.versions)} fragments, {units.count(found.tokens_merged)} tokens merged, "
        f"{f'{fixed} tensors as they were, ' if fixed else ''}{units.size(file.stat().st_size)}"
    )
    return EXIT_OK


@_disk_errors()
def write_each(found: Iterable[GlobalModel], how: Writing, keep: int | None, told: Sequence[Notified] = ()) -> int:
    """A folder for each, and `DONE` in it last. `keep`: so many of those written last. `told`: who hears of each.
    Raises DataError."""
    written: list[Path] = []
    if there := next(how.out.glob("version-*"), None):
        raise DataError(f"{there} is of another run, or of an earlier command: give --out another folder")
    for one in found:
        folder = how.out / f"version-{one.version:06}"
        (folder / DONE).unlink(missing_ok=True)
        write_out(one, replace(how, out=folder))
        (folder / DONE).touch()
        for server in told:
            print(server.tell(folder.absolute()))
        written = [*(one for one in written if one != folder), folder]
        for old in written[: -keep if keep else 0]:
            (old / DONE).unlink(missing_ok=True)
            shutil.rmtree(old)
            written.remove(old)
    return EXIT_OK


# ------------------------------------------------------------------ helpers


def _facts(contents: Contents) -> dict[str, Any]:
    return {
        "run": contents.run, "fragments": len(contents.files), "fragments_missing": len(contents.missing),
        "versions": list(contents.versions), "tokens_merged": total_tokens(contents), "bytes": contents.num_bytes,
    }  # fmt: skip


def _words(contents: Contents) -> str:
    total = len(contents.files) + len(contents.missing)
    shards = ", ".join(map(str, sorted({file.shard_index for file in contents.files})))
    part = f" (a part: shards {shards} of {contents.num_shards})" if contents.missing else ""
    versions, size = _versions(contents.versions), units.size(contents.num_bytes)
    return f"{len(contents.files)} of {total} fragments{part}, {versions}, {size}"


def _versions(versions: Collection[int]) -> str:
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low} to {high}"


def _settings_of(contents: Contents) -> str:
    """The settings other than defaults that a shard needs to accept these versions."""
    default = Settings()
    given = [
        ("run.id", contents.run, default.run.id),
        ("sync.fragments", contents.num_fragments, default.sync.fragments),
        ("outer.optimizer", contents.optimizer, default.outer.optimizer),
    ]
    return "".join(f" --set {shlex.quote(f'{name}={value}')}" for name, value, usual in given if value != usual)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
