"""`diloco status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.options import Config, Flag, Json, SettingsOptions, setting, settings_from
from diloco_common.wire.addresses import split_addresses


def status(
    *,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="ask these processes instead")] = None,
    tls: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="they serve over TLS: folder of an observer's or admin's certificate"),
    ] = None,
    token_file: Annotated[
        str | None, Parameter(metavar="FILE", help="with --http: send this token, so that other machines show all")
    ] = None,
    strict: Annotated[Flag, Parameter(help="exit code 7 unless everybody who is expected is there")] = False,
    watch: Annotated[Flag, Parameter(help="show it again every 2 s, until Ctrl-C")] = False,
    json: Json = False,
) -> int:
    """Show a running cluster: shards and workers, those that are away or dead too, and what that means.

    Any one shard is enough to ask: it knows how many there are, and hears from its learners which they do not reach.
    Exit code 0 if somebody answers, 5 if nobody does; with --strict, 7 if somebody who is expected is missing.
    """
    from diloco_common.command import QuietConsole
    from diloco_common.trust.security import read_bearer_token
    from diloco_deploy.show.status import Where, asker_for, check_watch, show_status, watch_status

    settings = settings_from(SettingsOptions(config), {"cluster.folder": folder, "security.token_file": token_file})
    where, bearer_token = settings.cluster.folder, read_bearer_token(settings.security)
    addresses = split_addresses(http or "")
    asker = asker_for(where, addresses, tls, bearer_token)
    whom = Where(where, addresses)
    if watch:
        check_watch(as_json=json, strict=strict)
        return watch_status(whom, console=QuietConsole(), asker=asker)
    return show_status(whom, as_json=json, strict=strict, console=QuietConsole(), asker=asker)
