"""`diloco checkpoint`, `restore`, `promote`, `export` and `pull`. Modules that need torch are imported inside the
commands."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import units
from diloco_common.command import disk_errors, new_app
from diloco_common.errors import EXIT_OK, BadCheckpoint, ConfigError, DataError
from diloco_common.options import Json, number
from diloco_deploy import LOOK_S, START_S
from diloco_deploy.checkpoint import Writing
from diloco_deploy.run.folder import existing, shards_in

_COUNT = number(units.whole, 1, 1_000_000, "a whole number from 1")
_SECONDS = number(units.seconds, 0.0, 86_400.0, "seconds, from 0 to 86400, such as 5s")
_SOURCES = "the folder of `diloco up`, data folders of shards, checkpoints, or URLs of checkpoints"

app = new_app("checkpoint", "Take, list, verify and copy checkpoints: `diloco checkpoint FOLDER` takes one at once.")


@app.command(help="take one; `diloco checkpoint FOLDER` is short for it")
@app.default
@disk_errors()
def take(
    folders: Annotated[list[Path], Parameter(metavar="FOLDER", help="of `diloco up`, or data folders of shards")],
    /,
    *,
    name: Annotated[str | None, Parameter(metavar="NAME", help="its name", show_default="the time")] = None,
    into: Annotated[Path | None, Parameter(metavar="PATH", help="put it here, not in `checkpoints`")] = None,
) -> int:
    """Take a checkpoint: hard links to the newest version of each fragment, whether or not the shards run."""
    from diloco_deploy.checkpoint.folders import take_checkpoint
    from diloco_deploy.checkpoint.sources import data_folders
    from diloco_deploy.checkpoint.work import words
    from diloco_server.storage.folders import FOLDER

    name = name or datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if not re.fullmatch(r"(?!version-)\w[\w.-]{0,63}", name):
        raise ConfigError(f"--name {name}: give 1 to 64 letters, digits or . _ -, but not version-: shards use it")
    sources = [path for folder in folders for path in data_folders(folder)]
    target = (into or folders[0] / FOLDER) / name
    contents, damage = take_checkpoint(sources, target, whole=sources != folders)
    for line in damage:
        print(f"passed over: {line}", file=sys.stderr)
    print(f"{target}: {words(contents)}")
    return EXIT_OK


@app.command(name="list", help="show all checkpoints in a folder")
@disk_errors()
def listing(
    folders: Annotated[list[Path] | None, Parameter(metavar="FOLDER", show_default="runs/local")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Show all checkpoints in folders."""
    folders = [existing(folder) for folder in folders or [Path("runs/local")]]
    from diloco_deploy.checkpoint.work import find_checkpoints, show

    show([found for folder in folders for found in find_checkpoints(folder)], as_json=json)
    return EXIT_OK


@app.command(help="check every byte; exit code 3 if one is wrong")
@disk_errors()
def verify(
    checkpoints: Annotated[
        list[str], Parameter(metavar="CHECKPOINT", help="folder or URL; several: the parts of one checkpoint")
    ],
    /,
) -> int:
    """Check every byte of a checkpoint. Exit code 3 if one is wrong."""
    from diloco_deploy.checkpoint.sources import join, open_checkpoint
    from diloco_deploy.checkpoint.work import words
    from diloco_server.storage.checkpoint import find_damage

    sources = [open_checkpoint(name) for name in checkpoints]
    contents = join([(source.where, source.contents) for source in sources])
    if damage := [f"{one.where}: {line}" for one in sources for line in find_damage(one.files, one.contents)]:
        raise BadCheckpoint("\n".join(damage))
    print(f"intact, every byte was checked: {words(contents)}")
    return EXIT_OK


@app.command(help="copy one to an object store")
@disk_errors()
def copy(
    checkpoint: Annotated[str, Parameter(metavar="CHECKPOINT", help="folder or URL")],
    url: Annotated[str, Parameter(metavar="URL", help="s3://BUCKET/PATH, gs://..., az://... or file:///PATH")],
    /,
) -> int:
    """Copy a checkpoint to an object store."""
    from diloco_deploy.checkpoint.sources import copy_checkpoint, open_checkpoint
    from diloco_deploy.checkpoint.work import words

    source = open_checkpoint(checkpoint)
    copy_checkpoint(source.files, source.contents, url)
    print(f"{url}: {words(source.contents)}")
    return EXIT_OK


@disk_errors()
def restore(
    sources: Annotated[list[str], Parameter(metavar="CHECKPOINT", help=_SOURCES)],
    /,
    *,
    shards: Annotated[int, Parameter(converter=_COUNT, metavar="M", help="shards of the restored run")],
    folder: Annotated[Path, Parameter(metavar="DEST", help="a new folder, for shard-0, shard-1, ...")],
) -> int:
    """Restore parameters and outer momentum bit for bit, on any number of shards."""
    from diloco_deploy.checkpoint.folders import place, restore
    from diloco_deploy.checkpoint.sources import open_whole
    from diloco_deploy.checkpoint.work import go_on_with, words

    whole = open_whole(sources)
    restore(whole.read(), place(whole.contents, shards), folder)
    print(f"{folder}: {words(whole.contents)} on {shards} shards")
    print(f"go on with: {go_on_with(whole.contents, folder, shards)}")
    return EXIT_OK


@disk_errors()
def export(
    sources: Annotated[list[str], Parameter(metavar="SOURCE", help=_SOURCES)],
    /,
    *,
    how: Writing,
) -> int:
    """Write the model in the form that its own library loads, or fail."""
    how.check()
    from diloco_deploy.checkpoint.sources import open_whole
    from diloco_deploy.checkpoint.work import model_in, write_out

    return write_out(model_in(open_whole(sources, model_only=True)), how)


@disk_errors()
def pull(
    *,
    how: Writing,
    shards: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="addresses of all shards")] = None,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="instead: folder of the cluster that `diloco up` runs")
    ] = None,
    average: Annotated[
        bool, Parameter(negative=(), help="the average of the versions, if the run keeps one (outer.average)")
    ] = False,
    each: Annotated[
        int | None,
        Parameter(
            converter=_COUNT,
            metavar="N",
            help="until the run is over, write a folder for every N versions; the file DONE is written last",
        ),
    ] = None,
    keep: Annotated[
        int | None, Parameter(converter=_COUNT, metavar="K", help="with --each: keep only the newest K")
    ] = None,
    notify: Annotated[
        list[str] | None,
        Parameter(
            metavar="URL",
            help="with --each: tell this inference server about every complete folder, such as "
            "sglang+http://HOST:PORT or vllm+http://HOST:PORT; may be repeated",
        ),
    ] = None,
    run: Annotated[
        str | None, Parameter(metavar="ID", help="id of the run", show_default="that of the folder, or local")
    ] = None,
    tls: Annotated[Path | None, Parameter(metavar="FOLDER", help="an observer's or learner's certificate")] = None,
    token_file: Annotated[Path | None, Parameter(metavar="FILE", help="bearer token, if shards need it")] = None,
    wait: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="how long to wait for shards")] = 5.0,
) -> int:
    """Pull the latest version of every fragment from the shards, without joining, and write the model in the form that
    its own library loads, or fail."""
    if (shards is None) == (folder is None):
        raise ConfigError("give --shards or --folder, one of them: diloco pull --folder runs/local --out model")
    how.check()
    if (keep is not None or notify) and each is None:
        raise ConfigError("--keep and --notify are for --each N, which writes a folder for every N versions")
    if each is not None and (average or how.out.suffix == ".safetensors"):
        raise ConfigError("--each writes folders, and no averages: give --out a folder, and leave out --average")
    if folder is not None:
        here = shards_in(folder)
        shards, run, tls = ",".join(here.addresses), run or here.run, tls or here.tls
    from diloco_common.trust.credentials import addresses_of
    from diloco_deploy.checkpoint.work import Notified, write_each, write_out
    from diloco_worker.global_model import pull_global_model, versions

    addresses, run, of = addresses_of(shards or ""), run or "local", "average up to " if average else ""
    if each is not None:
        told = [Notified(url) for url in notify or ()]
        found = versions(addresses, every=each, run=run, tls=tls, bearer_token=token_file, wait_s=wait)
        return write_each(found, how, keep, told)
    one = pull_global_model(addresses, run=run, tls=tls, bearer_token=token_file, wait_s=wait, average=average)
    return write_out(one, how, of)


def promote(
    folder: Annotated[Path, Parameter(metavar="FOLDER", help="shard.data_dir of the standby, on its machine")], /
) -> int:
    """Make a standby the shard. A server that runs on its folder continues as the shard by itself; otherwise the next
    one started on the folder does. Versions that were announced but are not here are lost. If the old shard is alive,
    it ends as soon as the promoted one reaches it."""
    from diloco_server.storage.filesystem import Disk, owner_lives
    from diloco_server.storage.standby import promote

    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    began, disk = time.monotonic(), Disk(folder)
    with disk_errors():
        held = promote(disk)
    versions = sorted(version for _, version in held.values())
    what = f"versions {versions[0]} to {versions[-1]}" if versions else "no version"
    print(f"{folder}: promoted, with {what} of {len(held)} fragments")
    while owner_lives(folder) and time.monotonic() < began + START_S:
        if any(name.startswith("epoch-") for name in disk.names()):
            print(f"it is the shard now, after {time.monotonic() - began:.1f} s")
            return EXIT_OK
        time.sleep(LOOK_S)
    print(f"no server serves from it yet: start diloco-server --data-dir {folder} with the settings of the shard")
    return EXIT_OK
