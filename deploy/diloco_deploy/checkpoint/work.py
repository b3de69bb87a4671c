"""The work of the commands for checkpoints and models, and their output."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from diloco_common import units
from diloco_common.errors import EXIT_OK, DataError
from diloco_common.settings_loader import default_of
from diloco_common.wire.manifest import Tie
from diloco_deploy.checkpoint.notify import Notified
from diloco_deploy.checkpoint.options import Writing
from diloco_deploy.checkpoint.sources import Whole, open_checkpoint
from diloco_deploy.checkpoint.written import write
from diloco_deploy.run.folder import shard_folders
from diloco_server.storage.checkpoint import MANIFEST, Contents, joined, total_tokens
from diloco_server.storage.folders import FOLDER, is_checkpoint
from diloco_worker.export import empty_tensors, lay_out
from diloco_worker.global_model import GlobalModel, buffers_of, keys_of

DONE = "DONE"
"""The file that marks a folder of `diloco pull --each` as complete."""


def model_in(whole: Whole) -> GlobalModel:
    """Read the saved model. Raises VersionDamaged and OSError."""
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


def find_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Checkpoints in `folder`, in its `checkpoints`, and in its shards', where parts with one name are one checkpoint.

    Each has its paths and state and, if it can be read, run, versions and bytes. Raises OSError.
    """
    taken = sorted(folder.glob(f"{FOLDER}/*/")) or sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    parts: dict[str, list[Path]] = {}
    for shard in shard_folders(folder):
        for path in shard.glob(f"{FOLDER}/*/"):
            parts.setdefault(path.name, []).append(path)
    return [_facts(path) for path in taken] + [_facts(*paths) for _, paths in sorted(parts.items())]


def _facts(*paths: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"paths": [str(path) for path in paths], "state": "unfinished"}
    if not all(map(is_checkpoint, paths)):
        return found
    try:
        whole = joined([open_checkpoint(path).contents for path in found["paths"]])
    except DataError as error:
        return found | {"state": error.code}
    state = "part" if whole.missing else "whole"
    return found | {"state": state, "run": whole.run, "versions": whole.versions, "bytes": whole.num_bytes}


def show(checkpoints: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(checkpoints, indent=2))
        return
    for one in checkpoints:
        size = f", {_versions(one['versions'])}, {units.size(one['bytes'])}" if "bytes" in one else ""
        print(f"{' '.join(one['paths'])}: {one['state']}{size}")
    if not checkpoints:
        print("no checkpoints yet: `diloco checkpoint FOLDER` takes one; with checkpoint.every, shards take them too")


def words(contents: Contents) -> str:
    total = len(contents.files) + len(contents.missing)
    shards = ", ".join(map(str, sorted({file.shard_index for file in contents.files})))
    part = f" (a part: shards {shards} of {contents.num_shards})" if contents.missing else ""
    versions, size = _versions(contents.versions), units.size(contents.num_bytes)
    return f"{len(contents.files)} of {total} fragments{part}, {versions}, {size}"


def go_on_with(contents: Contents, folder: Path, shards: int) -> str:
    """The command to continue with these versions, with the settings that differ from the defaults."""
    given = {"run.id": contents.run, "sync.fragments": contents.num_fragments, "outer.optimizer": contents.optimizer}
    settings = [("--set", f"{name}={value}") for name, value in given.items() if str(value) != default_of(name)]
    return shlex.join(["diloco", "up", "--folder", str(folder), "--shards", str(shards), *chain(*settings)])


# ------------------------------------------------------------------ models


def write_out(found: GlobalModel, how: Writing, of: str = "") -> int:
    """Write a model, and print a summary. Returns the exit code. `of`: describes the versions, if not the newest."""
    file, fixed = write(found, how)
    trained = sum(t.numel() for name, t in found.tensors.items() if name not in found.buffers)
    print(
        f"{file}: {units.count(trained)} parameters as {how.dtype}, {of}{_versions(found.versions.values())} of "
        f"{len(found.versions)} fragments, {units.count(found.tokens_merged)} tokens merged, "
        f"{f'{fixed} tensors as they were, ' if fixed else ''}{units.size(file.stat().st_size)}"
    )
    return EXIT_OK


def write_each(found: Iterable[GlobalModel], how: Writing, keep: int | None, told: Sequence[Notified] = ()) -> int:
    """Write a folder per model, `DONE` last. `keep`: folders to keep. `told`: servers to notify. Raises DataError."""
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


def _versions(versions: Collection[int]) -> str:
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low} to {high}"
