"""`diloco up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common.options import NO_SETTINGS, Flag, SettingsOptions, setting, settings_from


def up(
    *,
    shards: Annotated[str | None, setting("cluster.shards", "N", "parameter-server processes")] = None,
    workers: Annotated[str | None, setting("cluster.workers", "N", "learners")] = None,
    tokens: Annotated[
        str | None, setting("run.tokens", "N", "end when this many tokens are merged, such as 2M; 0: never")
    ] = None,
    seed: Annotated[str | None, setting("run.seed", "N", "of the initial weights and of the order of the data")] = None,
    data: Annotated[str | None, setting("data.source", "PATH", "file or folder of text, or 'stdlib'")] = None,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder for versions, logs, addresses and results")
    ] = None,
    track: Annotated[
        str | None, setting("worker.track", "TRACKER", "tensorboard:DIR, wandb:PROJECT or csv:FILE: learners' curves")
    ] = None,
    fresh: Annotated[Flag, Parameter(help="delete the run in the folder and begin anew")] = False,
    report: Annotated[
        Path | None, Parameter(metavar="FILE.json", help="the report", show_default="report.json in the folder")
    ] = None,
    export: Annotated[
        Path | None,
        Parameter(metavar="FILE.safetensors", help="the model", show_default="model.safetensors in the folder"),
    ] = None,
    on: Annotated[
        Literal["here", "ray"], Parameter(help="where: this machine, or the Ray cluster that this machine is in")
    ] = "here",
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Run shards and workers as processes of this machine and show their state. At the end, evaluate and export the
    global model. Ctrl-C ends the run in order, a second one at once.
    """
    from diloco_deploy.folder import Outputs
    from diloco_deploy.ray_up import bring_up_on_ray
    from diloco_deploy.up import bring_up

    flags = {
        "cluster.shards": shards, "cluster.workers": workers, "cluster.folder": folder, "run.tokens": tokens,
        "run.seed": seed, "data.source": data, "worker.track": track,
    }  # fmt: skip
    settings = settings_from(options, flags).for_built_in()
    if on == "ray":
        return bring_up_on_ray(settings, Outputs(report=report, model=export), fresh=fresh)
    return bring_up(settings, Outputs(report=report, model=export), fresh=fresh)
