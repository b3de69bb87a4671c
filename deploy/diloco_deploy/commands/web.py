"""`diloco web`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.options import Config, Flag, SettingsOptions, setting, settings_from
from diloco_common.wire.addresses import split_addresses


def web(
    *,
    shards: Annotated[
        str | None, Parameter(metavar="HOST:PORT,...", help="HTTP addresses of the run's shards (their shard.http)")
    ] = None,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "without --shards: folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
    listen: Annotated[str, Parameter(metavar="HOST:PORT", help="where to serve the page")] = "127.0.0.1:7171",
    tls: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="shards serve over TLS: folder of an observer's or admin's certificate"),
    ] = None,
    token_file: Annotated[
        str | None, Parameter(metavar="FILE", help="the shared secret of the run; viewers are asked for it, too")
    ] = None,
    certificate: Annotated[
        Path | None, Parameter(metavar="FOLDER", help="serve over HTTPS with this one, such as that of a shard here")
    ] = None,
    insecure: Annotated[Flag, Parameter(help="let --listen be in plaintext where other machines reach it")] = False,
) -> int:
    """Serve a page that shows a run as it happens: loss, learners, rounds, shards, events. Ends with Ctrl-C.

    Shards are asked once per second. The page is for this machine alone, unless --listen says otherwise. Where shards
    ask for a certificate or a token, viewers are asked for the key in the address that is printed.
    """
    from diloco_deploy.web.command import show

    flags = {
        "cluster.folder": folder, "security.token_file": token_file, "security.insecure": "true" if insecure else None,
    }  # fmt: skip
    settings = settings_from(SettingsOptions(config), flags)
    where, security = settings.cluster.folder, settings.security
    addresses = split_addresses(shards or "")
    return show(where, addresses, listen, security, tls=tls or security.tls, certificate=certificate)
