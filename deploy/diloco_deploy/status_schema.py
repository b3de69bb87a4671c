"""The types of what `diloco status --json` prints, and of the record that `diloco up` keeps of its members.

The live page reads the record too, and /status of the shards by itself. Fields are only ever added. Durations are in
seconds; no field is a secret.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_common.endpoints import write_json
from diloco_common.errors import EXIT_OK
from diloco_common.settings import Settings
from diloco_deploy.snapshot import Totals

SCHEMA = 1
"""Of ClusterStatus. Grows when a field changes its meaning."""
EXIT_DEGRADED = 7
"""With --strict: somebody who is expected is not there."""

Presence = Literal["alive", "away", "dead", "starting", "left", "unknown"]
"""alive: it answers, or others hear it. away: expected, and neither answers nor is heard. dead: its process is known to
have ended. starting: its process is not up yet. left: it said goodbye, or did its work. unknown: nobody was asked."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")


class MemberStatus(_Model):
    """One shard or worker that is there, or ought to be."""

    name: str
    role: Literal["shard", "worker"]
    presence: Presence
    state: str
    """One word for people: training, ready, away, dead, evicted, quarantined, stalled, ..."""
    since_s: float | None = None
    """How long it has been away or dead; None: it is not, or nobody knows."""
    why: str = ""
    """Who says so, in words; empty: it answered itself."""
    answered: bool
    """Whether it answered itself."""
    restarts: int = 0
    """How often its process was started again, as far as `diloco up` counts."""
    status: dict[str, Any] | None = None
    """Its /status. Of a worker that was not asked: what the shards know of it."""


class Problem(_Model):
    """Something that a person would want to know."""

    code: str
    """As in docs/errors.md."""
    member: str
    words: str
    """What it is, what it means, what to do."""


class ExpectedStatus(_Model):
    """How many members there ought to be."""

    shards: int | None
    """None: no shard says."""
    workers: int | None
    """Those of `diloco up`; elsewhere those that have joined and have not said goodbye."""


class ClusterStatus(_Model):
    """A cluster at one moment."""

    schema_version: int = SCHEMA
    run: str | None = None
    """run.id, as a member says it."""
    complete: bool
    """Everybody who is expected is there."""
    expected: ExpectedStatus
    problems: list[Problem] = Field(default_factory=list)
    totals: Totals
    versions: dict[str, int]
    """Fragment -> version, of the shards that answered."""
    members: list[MemberStatus]

    def exit_code(self, *, strict: bool) -> int:
        """Of `diloco status`."""
        return EXIT_DEGRADED if strict and not self.complete else EXIT_OK


# ---------------------------------------------------------------- the record of `diloco up`


class MemberRecord(_Model):
    """The process of one member, as its supervisor knows it."""

    role: Literal["shard", "worker"]
    process: str
    """starting, up, died, ended or lost, as in `snapshot.Member`."""
    since: float
    """Unix time of the change to this."""
    why: str = ""
    """How it ended last: "died (signal 9)"."""
    restarts: int = 0


class ClusterRecord(_Model):
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
