"""A cluster's data on another number of shards: all fragments are placed anew, and a kill loses none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from diloco_common.settings import Settings
from diloco_common.settings_loader import load_saved, save
from diloco_deploy.run.folder import ClusterFolder, numbered, shard_folders


def place_anew(files: ClusterFolder, settings: Settings) -> str:
    """Write all fragments to data folders for another number of shards; keep the old ones. Says so. Takes torch.

    A kill at any moment leaves the old shards or the new ones. The new data folders are made whole in `placing-anew`,
    beside the old ones. The old ones go into `placing-anew/before`; then the new ones come out, shard-0 first. So as
    long as shard-0 is inside, the old ones are what counts.

    The folder must be owned and settled. Raises BadCheckpoint and the like, and OSError: nothing has changed then.
    """
    from diloco_deploy.checkpoint.sources import open_whole  # these import torch
    from diloco_server.storage.folders import place, restore

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
    return f"{count}; the folders of before are in {where}: delete them once all is well"


def settle(files: ClusterFolder) -> None:
    """Finish what a killed `place_anew` left, or take it back. The folder must be owned."""
    new = _new(files)
    half = new.with_name(new.name + ".restoring")
    if half.exists():
        shutil.rmtree(half)
    if not new.exists():
        return
    if (new / "shard-0").exists():
        _move((new / "before").glob("shard-*"), files.data)
        new.rename(half)  # so that a kill while it is deleted leaves nothing that looks finished
        shutil.rmtree(half)
    else:
        _finish(files)


def _finish(files: ClusterFolder) -> list[Path]:
    """Take the new folders out; the folders that are kept. May be called again after a kill."""
    new, name = _new(files), f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    _move(numbered(new, "shard"), files.data)
    saved = new / "settings.json"
    if saved.exists():
        save(load_saved(saved).settings, files.settings)
    kept = []
    workers = list(files.folder.glob("worker-*"))  # a worker's checkpoint is of the shards that it had
    # Beside themselves, for a rename does not reach another disk.
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
