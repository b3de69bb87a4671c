"""`diloco pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.errors import ConfigError, DataError
from diloco_common.options import Dtype, number

_SECONDS = number(quantities.seconds, 0.0, 86_400.0, "seconds, from 0 to 86400, such as 5s")


def pull(
    *,
    out: Annotated[Path, Parameter(metavar="DIR", help="folder to write; files in it are replaced")],
    shards: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="addresses of all shards")] = None,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="instead: folder of the cluster that `diloco up` runs")
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="folder of the model that was trained: configuration and tokenizer are copied from it, and weights "
            "that the run does not train are taken from its safetensors",
        ),
    ] = None,
    dtype: Annotated[Dtype, Parameter(help="of the parameters")] = "float32",
    run: Annotated[
        str | None, Parameter(metavar="ID", help="id of the run", show_default="that of the folder, or local")
    ] = None,
    tls: Annotated[Path | None, Parameter(metavar="FOLDER", help="an observer's or learner's certificate")] = None,
    token_file: Annotated[
        Path | None, Parameter(metavar="FILE", help="file with a bearer token, if the shards ask")
    ] = None,
    wait: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="how long to wait for shards")] = 5.0,
) -> int:
    """Pull the latest version of every fragment from the shards, without joining, and write the model into a folder as
    safetensors, under all names that tied parameters have.
    """
    if (shards is None) == (folder is None):
        raise ConfigError("give --shards or --folder, one of them: diloco pull --folder runs/local --out model")
    if base is not None and not base.is_dir():
        raise DataError(f"--base {base}: no such folder; give the one that holds config.json")
    if folder is not None:
        from diloco_deploy.local_shards import shards_in

        found = shards_in(folder)
        shards, run, tls = ",".join(found.addresses), run or found.run, tls or found.tls
    from diloco_deploy.pull import pull_into

    return pull_into(out, shards or "", base, dtype, run=run or "local", tls=tls, token_file=token_file, wait_s=wait)
