"""`diloco config`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app
from diloco_common.options import NO_SETTINGS, Flag, Json, SettingsOptions, load_from

app = new_app("config", "Show the settings of a run, and where each one comes from.")


@app.command(help="show every setting, as a file for --config")
def show(
    *,
    origin: Annotated[Flag, Parameter(help="say where each setting comes from: a line of a file, a variable")] = False,
    given: Annotated[Flag, Parameter(help="only those that are no defaults")] = False,
    json: Json = False,
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Show every setting with its value, as TOML that --config takes. With --origin each says where it comes from: a
    line of the file, an environment variable, --set, or the default.
    """
    from diloco_deploy.config import as_lines, settings_with_origins

    found = settings_with_origins(load_from(options, {}), only_given=given)
    if json:
        import json as encoder

        print(
            encoder.dumps({name: {"value": one.value, "origin": one.source} for name, one in found.items()}, indent=2)
        )
    else:
        print("\n".join(as_lines(found, origin=origin)))
    return 0
