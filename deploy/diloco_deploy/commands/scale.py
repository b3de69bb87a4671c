"""`diloco scale`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from diloco_common.options import Config, setting


def scale(
    *,
    workers: Annotated[int, Parameter(metavar="N", help="so many from now on")],
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
) -> int:
    """Change the number of workers of a running `diloco up`. New ones join within seconds; those with the highest
    numbers leave in order, and what they have pushed is merged.
    """
    from diloco_common.options import SettingsOptions, settings_from
    from diloco_deploy.scale import scale_to

    return scale_to(settings_from(SettingsOptions(config), {"cluster.folder": folder}).cluster.folder, workers)
