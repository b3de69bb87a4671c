"""`diloco promote`: a standby becomes the shard that it stood by for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.command import disk_errors
from diloco_common.errors import EXIT_OK, DataError
from diloco_common.options import number

_SECONDS = number(quantities.seconds, 0.0, 3600.0, "seconds, from 0 to 3600, such as 10s")
LOOK_S = 0.05


def promote(
    folder: Annotated[Path, Parameter(metavar="FOLDER", help="shard.data_dir of the standby, on its machine")],
    /,
    *,
    wait: Annotated[
        float, Parameter(converter=_SECONDS, metavar="10s", help="how long to wait until it serves")
    ] = 10.0,
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
    while owner_lives(folder) and time.monotonic() < began + wait:
        if any(name.startswith("epoch-") for name in disk.names()):
            print(f"it is the shard now, after {time.monotonic() - began:.1f} s")
            return EXIT_OK
        time.sleep(LOOK_S)
    print(f"no server serves from it yet: start diloco-server --data-dir {folder} with the settings of the shard")
    return EXIT_OK
