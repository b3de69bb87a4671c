"""`diloco checkpoint`, `restore`, `export` and `pull`: their options. What takes torch is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.command import new_app
from diloco_common.errors import BadCheckpoint, ConfigError
from diloco_common.options import Json, number
from diloco_deploy.checkpoint.options import Writing
from diloco_deploy.run.folder import shards_in

_SOURCES = "the folder of `diloco up`, data folders of shards, checkpoints, or URLs of checkpoints"

app = new_app(
    "checkpoint",
    "`diloco checkpoint FOLDER` takes a checkpoint at once: hard links to the newest version of each fragment. The "
    "shards may run or not.",
)


@app.command(help="take one; `diloco checkpoint FOLDER` is short for it")
@app.default
def take(
    folders: Annotated[list[Path], Parameter(metavar="FOLDER", help="of `diloco up`, or data folders of shards")],
    /,
    *,
    name: Annotated[str | None, Parameter(metavar="NAME", help="of the checkpoint", show_default="the time")] = None,
    into: Annotated[
        Path | None,
        Parameter(metavar="PATH", help="where it is put", show_default="`checkpoints` in the (first) folder"),
    ] = None,
    json: Json = False,
) -> int:
    """Take a checkpoint: hard links to the newest version of each fragment. The shards may run or not."""
    from diloco_deploy.checkpoint.work import take

    return take(folders, name, into, as_json=json)


@app.command(name="list", help="show all checkpoints in a folder")
def listing(
    folders: Annotated[list[Path] | None, Parameter(metavar="FOLDER", show_default="runs/local")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Show all checkpoints in folders."""
    folders = folders or [Path("runs/local")]
    for folder in folders:
        if not folder.is_dir():
            raise BadCheckpoint(f"there is no folder {folder}")
    from diloco_deploy.checkpoint.work import show_all

    return show_all(folders, as_json=json)


@app.command(help="check every byte; exit code 3 if one is wrong")
def verify(
    checkpoints: Annotated[
        list[str], Parameter(metavar="CHECKPOINT", help="folder or URL; several: the parts of one checkpoint")
    ],
    /,
    *,
    json: Json = False,
) -> int:
    """Check every byte of a checkpoint. Exit code 3 if one is wrong."""
    from diloco_deploy.checkpoint.work import verify

    return verify(checkpoints, as_json=json)


@app.command(help="copy one to an object store")
def copy(
    checkpoint: Annotated[str, Parameter(metavar="CHECKPOINT", help="folder or URL")],
    url: Annotated[str, Parameter(metavar="URL", help="s3://BUCKET/PATH, gs://..., az://... or file:///PATH")],
    /,
) -> int:
    """Copy a checkpoint to an object store."""
    from diloco_deploy.checkpoint.work import copy

    return copy(checkpoint, url)


def restore(
    sources: Annotated[list[str], Parameter(metavar="CHECKPOINT", help=_SOURCES)],
    /,
    *,
    shards: Annotated[int, Parameter(metavar="M", help="shards of the restored run")],
    folder: Annotated[Path, Parameter(metavar="DEST", help="a new folder, for shard-0, shard-1, ...")],
) -> int:
    """Restore parameters and outer momentum bit for bit, on any number of shards."""
    from diloco_deploy.checkpoint.work import restore_into

    return restore_into(folder, sources, shards)


def export(
    sources: Annotated[list[str], Parameter(metavar="SOURCE", help=_SOURCES)],
    /,
    *,
    how: Writing,
) -> int:
    """Write the model as its own library loads it, or refuse."""
    how.check()
    from diloco_deploy.checkpoint.work import export

    return export(sources, how)


_COUNT = number(quantities.count, 1, 1_000_000, "a whole number from 1")
_SECONDS = number(quantities.seconds, 0.0, 86_400.0, "seconds, from 0 to 86400, such as 5s")


def pull(
    *,
    how: Writing,
    shards: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="addresses of all shards")] = None,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="instead: folder of the cluster that `diloco up` runs")
    ] = None,
    average: Annotated[
        bool, Parameter(negative=(), help="the average of the versions, where the run keeps one (outer.average)")
    ] = False,
    each: Annotated[
        int | None,
        Parameter(
            converter=_COUNT,
            metavar="N",
            help="go on until the run is over: a folder for every N versions, in which the file DONE is written last",
        ),
    ] = None,
    keep: Annotated[
        int | None, Parameter(converter=_COUNT, metavar="K", help="with --each: the newest K alone")
    ] = None,
    notify: Annotated[
        list[str] | None,
        Parameter(
            metavar="URL",
            help="with --each: tell this inference server of every folder that is whole, such as "
            "sglang+http://HOST:PORT or vllm+http://HOST:PORT; may be repeated",
        ),
    ] = None,
    run: Annotated[
        str | None, Parameter(metavar="ID", help="id of the run", show_default="that of the folder, or local")
    ] = None,
    tls: Annotated[Path | None, Parameter(metavar="FOLDER", help="an observer's or learner's certificate")] = None,
    token_file: Annotated[
        Path | None, Parameter(metavar="FILE", help="file with a bearer token, if the shards ask")
    ] = None,
    wait: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="how long to wait for shards")] = 5.0,
) -> int:
    """Pull the latest version of every fragment from the shards, without joining, and write the model as its own
    library loads it, or refuse.
    """
    if (shards is None) == (folder is None):
        raise ConfigError("give --shards or --folder, one of them: diloco pull --folder runs/local --out model")
    how.check()
    if (keep is not None or notify) and each is None:
        raise ConfigError("--keep and --notify are for --each N, which writes a folder for every N versions")
    if each is not None and (average or how.out.suffix == ".safetensors"):
        raise ConfigError("--each writes folders, of versions: give --out a folder, and leave out --average")
    if folder is not None:
        here = shards_in(folder)
        shards, run, tls = ",".join(here.addresses), run or here.run, tls or here.tls
    from diloco_common.trust.credentials import addresses_of
    from diloco_deploy.checkpoint.notify import Notified
    from diloco_deploy.checkpoint.work import write_each, write_out
    from diloco_worker.global_model import pull_global_model, versions

    addresses, run, of = addresses_of(shards or ""), run or "local", "average up to " if average else ""
    if each is not None:
        told = [Notified(url) for url in notify or ()]
        found = versions(addresses, every=each, run=run, tls=tls, bearer_token=token_file, wait_s=wait)
        return write_each(found, how, keep, told)
    one = pull_global_model(addresses, run=run, tls=tls, bearer_token=token_file, wait_s=wait, average=average)
    return write_out(one, how, of)
