"""Files that `diloco up` writes into its folder for other commands: the record of its members, and their addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from diloco_common.settings import Settings
from diloco_common.wire.addresses import dialable, read_address, write_json


class MemberRecord(BaseModel):
    role: Literal["shard", "worker"]
    process: str
    """starting, up, died, ended or lost; see `members.SeenMember`."""
    since: float
    """Unix time of the change to this state."""
    why: str = ""
    """How it last ended: "died (signal 9)"."""
    restarts: int = 0


class ClusterRecord(BaseModel):
    """The members of a cluster of `diloco up`; the file `run/cluster.json` of its folder while it runs."""

    run: str
    shards: int
    workers: int
    fragments: int
    quorum: int = 1
    """Contributions that close a round; 1 if the quorum is "all"."""
    training: bool = False
    """Whether workers may be added and removed (`diloco scale`)."""
    members: dict[str, MemberRecord] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> ClusterRecord:
        cluster, sync = settings.cluster, settings.sync
        return cls(
            run=settings.run.id, shards=cluster.shards, workers=cluster.workers, fragments=sync.fragments,
            quorum=1 if sync.quorum == "all" else sync.quorum,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write it into the cluster's folder, atomically. Raises OSError."""
        write_json(record_file(folder), self.model_dump(mode="json"))


def record_file(folder: Path) -> Path:
    return folder / "run" / "cluster.json"


def read_record(folder: Path) -> ClusterRecord | None:
    """The record in a cluster's folder; None: no cluster runs there, or one of an older version."""
    try:
        return ClusterRecord.model_validate(json.loads(record_file(folder).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def addresses_in(folder: Path) -> dict[str, str]:
    """Name -> host:port of HTTP, for every process with an address file in a cluster's folder."""
    found = (read_address(path) for path in sorted((folder / "run").glob("*.json")))
    return {one.name: dialable(one.http) for one in found if one is not None}
