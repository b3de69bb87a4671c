"""Moves a cluster's data to another number of shards: places all fragments again, and survives a kill."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from diloco_common.settings import Settings
from diloco_common.settings_loader import load_saved, save
from diloco_deploy.run.folder import ClusterFolder, numbered, shard_folders


def place_anew(files: ClusterFolder, settings: Settings) -> str:
    """Write all fragments to data folders for another number of shards, and keep the old ones. Returns a message.

    A kill at any moment leaves either the old shards or the new ones. The new data folders are completed in
    `placing-anew`, beside the old ones. The old ones move into `placing-anew/before`; then the new ones move out,
    shard-0 first. So as long as shard-0 is inside, the old ones count.

    The folder must be owned and settled. Raises BadCheckpoint and the like, and OSError; then nothing has changed.
    """
    from diloco_deploy.checkpoint.folders import place, restore  # these import torch
    from diloco_deploy.checkpoint.sources import open_whole

    new = _new(files)
    whole = open_whole([str(files.folder)])
    restore(whole.read(), place(whole.contents, settings.cluster.shards), new)
    save(settings, new / "settings.json")
    old = shard_folders(files.folder)
    (new / "before").mkdir()
    _move(old, new / "before")
    kept = _finish(files)
    count = f"{len(old)} -> {settings.cluster.shards} shards"
    where = " and ".join(str(path) for path in kept)
    return f"{count}; the earlier folders are in {where}: delete them once all is well"


def settle(files: ClusterFolder) -> None:
    """Finish or undo a killed `place_anew`. The folder must be owned."""
    new = _new(files)
    half = new.with_name(new.name + ".restoring")
    if half.exists():
        shutil.rmtree(half)
    if not new.exists():
        return
    if (new / "shard-0").exists():
        _move((new / "before").glob("shard-*"), files.data)
        new.rename(half)  # a kill during the deletion leaves nothing that looks finished
        shutil.rmtree(half)
    else:
        _finish(files)


def _finish(files: ClusterFolder) -> list[Path]:
    """Move the new folders out. Returns the folders that are kept. May be called again after a kill."""
    new, name = _new(files), f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    _move(numbered(new, "shard"), files.data)
    saved = new / "settings.json"
    if saved.exists():
        save(load_saved(saved).settings, files.settings)
    kept = []
    workers = list(files.folder.glob("worker-*"))  # a worker's checkpoint belongs to its old shards
    # beside the originals, because a rename cannot cross disks
    for paths, home in ((list((new / "before").glob("shard-*")), files.data), (workers, files.folder)):
        if paths:
            (home / name).mkdir(exist_ok=True)
            _move(paths, home / name)
            kept.append(home / name)
    shutil.rmtree(new)
    return list(dict.fromkeys(kept))


def _move(paths: Iterable[Path], into: Path) -> None:
    for path in list(paths):
        path.rename(into / path.name)


def _new(files: ClusterFolder) -> Path:
    return files.data / "placing-anew"
