"""`diloco checkpoint`, `restore` and `export`: their options. `work.py` takes torch, and is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app
from diloco_common.errors import NoCheckpoint
from diloco_common.options import Dtype, Json

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
            raise NoCheckpoint(f"there is no folder {folder}")
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
    out: Annotated[Path, Parameter(metavar="FILE.safetensors", help="written; replaced if it is there")],
    dtype: Annotated[Dtype, Parameter(help="of the parameters")] = "float32",
) -> int:
    """Write the model as one safetensors file. Plain torch can load it."""
    from diloco_deploy.checkpoint.work import export

    return export(sources, out, dtype)
