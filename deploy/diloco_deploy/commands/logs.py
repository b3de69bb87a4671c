"""`diloco logs`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.options import Config, Flag, number, setting

_LINES = number(quantities.count, 0, 1_000_000, "a whole number")


def logs(
    members: Annotated[
        list[str] | None, Parameter(metavar="MEMBER", help="such as worker-0; none: all", show_default=False)
    ] = None,
    /,
    *,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs, or ran")
    ] = None,
    config: Config = None,
    lines: Annotated[int, Parameter(converter=_LINES, metavar="N", help="of each member, the last ones")] = 20,
    follow: Annotated[Flag, Parameter(name=("--follow", "-f"), help="go on with what comes, until Ctrl-C")] = False,
) -> int:
    """Show the logs of a cluster on this machine, the last lines of each member."""
    from diloco_common.options import SettingsOptions, settings_from
    from diloco_deploy.logs import show_logs

    where = settings_from(SettingsOptions(config), {"cluster.folder": folder}).cluster.folder
    return show_logs(where / "logs", members or (), lines, follow=follow)
