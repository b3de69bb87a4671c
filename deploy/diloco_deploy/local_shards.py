"""The way to the shards that `diloco up` runs in a folder: addresses, run and certificate. Asks nobody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from diloco_common.errors import CannotConnect
from diloco_common.settings_loader import load_saved
from diloco_common.wire.addresses import dialable, read_address
from diloco_deploy.own_certificates import OwnCertificates


class LocalShards(NamedTuple):
    """What a caller of them needs."""

    addresses: tuple[str, ...]
    run: str
    tls: Path | None
    """Folder of an observer's certificate, if the cluster has made itself one."""


def shards_in(folder: Path) -> LocalShards:
    """Those of the cluster in a folder. Raises CannotConnect: none is up there."""
    found = [read_address(path) for path in sorted((folder / "run").glob("shard-*.json"))]
    addresses = tuple(dialable(one.grpc) for one in found if one is not None)
    if not addresses:
        raise CannotConnect(f"no shards are up in {folder}; start them with `diloco up`, or name the shards (--shards)")
    run = load_saved(folder / "settings.json").settings.run.id
    return LocalShards(addresses, run, OwnCertificates.observer_in(folder))
