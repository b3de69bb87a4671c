"""`diloco resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def resume(
    folder: Annotated[Path, Parameter(metavar="FOLDER", help="of an earlier `diloco up`")] = Path("runs/local"),
    /,
    *,
    shards: Annotated[
        str | None,
        Parameter(metavar="M", help="as many shards as this from now on (cluster.shards)", show_default="as before"),
    ] = None,
    workers: Annotated[
        str | None,
        Parameter(metavar="N", help="as many workers (cluster.workers)", show_default="as before"),
    ] = None,
    tokens: Annotated[
        str | None, Parameter(metavar="N", help="end at so many merged tokens (run.tokens)", show_default="as before")
    ] = None,
    set: Annotated[
        list[str] | None, Parameter(metavar="SECTION.KEY=VALUE", help="one setting; may be repeated")
    ] = None,
) -> int:
    """Go on with the run in a folder, with the settings that it had: none need to be given again.

    With another number of shards, every fragment is first written to the data folders of the new ones, bit for bit. The
    old ones are kept.
    """
    from diloco_deploy.resume import resume_run

    flags = {"cluster.shards": shards, "cluster.workers": workers, "run.tokens": tokens}
    return resume_run(folder, flags, set or ())
