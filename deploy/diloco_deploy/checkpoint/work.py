"""Does the work of the commands for checkpoints and models, prints their output, and notifies inference servers."""

from __future__ import annotations

import json
import shlex
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diloco_common import units
from diloco_common.errors import EXIT_OK, ConfigError, DataError, plain
from diloco_common.settings_loader import default_of
from diloco_common.wire.addresses import is_loopback
from diloco_common.wire.manifest import Tie
from diloco_deploy.checkpoint import Writing
from diloco_deploy.checkpoint.sources import Whole, open_checkpoint
from diloco_deploy.checkpoint.written import write
from diloco_deploy.run.folder import shard_folders
from diloco_server.storage.checkpoint import MANIFEST, Contents, joined, total_tokens
from diloco_server.storage.folders import FOLDER, is_checkpoint
from diloco_worker.global_model import GlobalModel, buffers_of, empty_tensors, keys_of, lay_out

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
    """Checkpoints in `folder` and its `checkpoints`, and in its shards: there, parts with one name are one checkpoint.

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
        raise DataError(f"{there} is from another run or an earlier command: give --out another folder")
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


CHECKPOINT_CALL_S = 300.0
"""Seconds for one call: a server loads the weights before it answers."""
TRIES, WAIT_S = 5, 1.0
"""Attempts for a call without an answer, or with 429 or 5xx; and the first wait between them, which doubles."""
ANSWER_MAX = 1 << 16


class Refused(Exception):
    """A server refused, or did not answer; the message says which."""


class Notified:
    """An inference server. It is told about new model folders, since it does not watch for them.

    SGLang needs one call, `POST /update_weights_from_disk`. vLLM needs a weight transfer in four calls: once
    `/init_weight_transfer_engine`, and per version `/start_weight_update`, `/update_weights` and
    `/finish_weight_update`. Its backend must be one that reads files; it gets the folder as `path`. A folder must have
    the same path on the server's machine.
    """

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """`url`: vllm+http://HOST:PORT or sglang+http://HOST:PORT (or https). Raises ConfigError."""
        kind, _, self.address = url.partition("+")
        parts = urlsplit(self.address)
        if kind not in ("vllm", "sglang") or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--notify {url}: give vllm+http://HOST:PORT or sglang+http://HOST:PORT")
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(parts.hostname) else []
        self._opener = urllib.request.build_opener(*handlers)
        self._is_vllm, self._is_initialised = kind == "vllm", False
        self._sleep = sleep

    def tell(self, folder: Path) -> str:
        """Tell the server that this folder is complete. Returns the result in words. Later folders are announced even
        if it fails."""
        try:
            if self._is_vllm:
                self._transfer(folder)
            else:
                answer = self._call("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
                if answer.get("success") is False:
                    raise Refused(plain(str(answer.get("message"))))
        except Refused as refused:
            self._is_initialised = False  # the server may be a new process by now
            return f"{self.address} did not take {folder.name}: {refused}"
        return f"{self.address} has taken {folder.name}"

    def _transfer(self, folder: Path) -> None:
        if not self._is_initialised:
            self._call("/init_weight_transfer_engine", {"init_info": {}})
            self._is_initialised = True
        self._call("/start_weight_update", {"is_checkpoint_format": True})
        try:
            self._call("/update_weights", {"update_info": {"path": str(folder)}})
        finally:
            self._call("/finish_weight_update", {})  # even after a refusal: the server waits for it

    def _call(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises Refused."""
        for attempt in range(TRIES):
            request = urllib.request.Request(
                self.address.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with self._opener.open(request, timeout=CHECKPOINT_CALL_S) as answer:
                    return _json(answer.read(ANSWER_MAX))
            except urllib.error.HTTPError as error:
                why = f"{path} {error.code}: {plain(error.read(ANSWER_MAX).decode(errors='replace'))[:200]}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, HTTPException) as error:
                why = f"{path}: {plain(str(error))}"
            if attempt + 1 < TRIES:
                self._sleep(WAIT_S * 2**attempt)
        raise Refused(why)


def _json(data: bytes) -> Mapping[str, Any]:
    """The JSON object of an answer; empty if it is not an object."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
