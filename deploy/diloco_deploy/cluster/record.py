"""What `diloco up` leaves in its folder for whoever looks at it: the record of its members, and their addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from diloco_common.settings import Settings
from diloco_common.wire.addresses import dialable, read_address, write_json


class MemberRecord(BaseModel):
    """The process of one member, as its supervisor knows it."""

    role: Literal["shard", "worker"]
    process: str
    """starting, up, died, ended or lost, as in `members.SeenMember`."""
    since: float
    """Unix time of the change to this."""
    why: str = ""
    """How it ended last: "died (signal 9)"."""
    restarts: int = 0


class ClusterRecord(BaseModel):
    """Who belongs to a cluster of `diloco up`. In the file `run/cluster.json` of its folder while it runs."""

    run: str
    shards: int
    workers: int
    fragments: int
    quorum: int = 1
    """Contributions that close a round; 1 also where all are waited for."""
    training: bool = False
    """Workers may come and go (`diloco scale`)."""
    members: dict[str, MemberRecord] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> ClusterRecord:
        """Of a cluster that begins: nobody is there yet."""
        cluster, sync = settings.cluster, settings.sync
        return cls(
            run=settings.run.id, shards=cluster.shards, workers=cluster.workers, fragments=sync.fragments,
            quorum=1 if sync.quorum == "all" else sync.quorum,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write it into the folder of the cluster, whole or not at all. Raises OSError."""
        write_json(record_file(folder), self.model_dump(mode="json"))


def record_file(folder: Path) -> Path:
    return folder / "run" / "cluster.json"


def read_record(folder: Path) -> ClusterRecord | None:
    """The record in the folder of a cluster; None: no cluster runs there, or an older version of ours does."""
    try:
        return ClusterRecord.model_validate(json.loads(record_file(folder).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def addresses_in(folder: Path) -> dict[str, str]:
    """Name -> host:port of HTTP of every process with an address file in the folder of a cluster."""
    found = (read_address(path) for path in sorted((folder / "run").glob("*.json")))
    return {one.name: dialable(one.http) for one in found if one is not None}
