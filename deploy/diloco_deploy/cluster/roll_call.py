"""Compares a cluster's expected members with those present, from answers, the record of `diloco up`, and shards.

Shards do not know each other. But each knows their number, and hears from its learners which others they do not reach.
So one answering shard is enough to notice a missing one. `diloco up` writes the record and the addresses of its
processes into its folder; everything else is pure.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from diloco_common import units
from diloco_common.errors import Expired
from diloco_common.settings import Settings
from diloco_common.wire.addresses import Role, dialable, read_address, write_json
from diloco_deploy.cluster.findings import Finding, findings, natural
from diloco_deploy.cluster.members import WITH_LEASE, SeenMember, Status, put_together
from diloco_deploy.cluster.model import Cluster


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

    shards: int
    workers: int
    quorum: int = 1
    """Contributions that close a round; 1 if the quorum is "all"."""
    training: bool = False
    """Whether workers may be added and removed (`diloco scale`)."""
    members: dict[str, MemberRecord] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> ClusterRecord:
        cluster, sync = settings.cluster, settings.sync
        return cls(
            shards=cluster.shards, workers=cluster.workers,
            quorum=1 if sync.quorum == "all" else sync.quorum,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write it into the cluster's folder, atomically. Raises OSError."""
        write_json(record_file(folder), self.model_dump(mode="json"))


def record_file(folder: Path) -> Path:
    return folder / "run" / "cluster.json"


def read_record(folder: Path) -> ClusterRecord | None:
    """The record in a cluster's folder; None: no cluster runs there."""
    try:
        return ClusterRecord.model_validate(json.loads(record_file(folder).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def addresses_in(folder: Path) -> dict[str, str]:
    """Name -> host:port of HTTP, for every process with an address file in a cluster's folder."""
    found = (read_address(path) for path in sorted((folder / "run").glob("*.json")))
    return {one.name: dialable(one.http) for one in found if one is not None}


Presence = Literal["alive", "away", "dead", "starting", "left", "unknown"]
"""alive: it answers, or others hear from it. away: expected, but not heard from. dead: its process is known to have
ended. starting: its process is not up yet. left: it said goodbye, or finished. unknown: no process that knows was
asked."""
_ROLES: dict[bool, Role] = {True: "worker", False: "shard"}
_OF_PROCESSES: dict[str, Presence] = {"died": "dead", "lost": "dead", "ended": "left"}


@dataclass(frozen=True)
class Present:
    """One shard or worker that is present or expected. The fields are those of `diloco status --json`."""

    name: str
    role: Role
    presence: Presence
    state: str = ""
    """The word to show: training, ready, away, dead, evicted, left_out, stalled, ..."""
    since_s: float | None = None
    """How long it has been away or dead; None: it is not, or unknown."""
    why: str = ""
    """The source of this, in words; empty: its own answer."""
    code: str = ""
    """The code of the reason why it does not answer, if known."""
    answered: bool = False
    restarts: int = 0
    """How often its process was restarted, as counted by `diloco up`."""
    status: Status | None = None
    """Its /status; for a worker that was not asked, what the shards know about it."""

    @property
    def is_missing(self) -> bool:
        return self.presence in ("away", "dead", "starting", "unknown")

    @property
    def word(self) -> str:
        """Its state, and for how long, if it is not alive."""
        return (self.state or self.presence) + (f" {units.clock(self.since_s)}" if self.since_s is not None else "")


@dataclass(frozen=True)
class Roll:
    present: tuple[Present, ...]
    cluster: Cluster
    problems: tuple[Finding, ...]

    @property
    def workers_expected(self) -> int:
        return sum(one.role == "worker" and one.presence != "left" for one in self.present)


def roll_call(
    asked: Mapping[str, str], answers: Mapping[str, Status], record: ClusterRecord | None, now: float,
    over: Mapping[str, str] | None = None,
) -> Roll:  # fmt: skip
    """Find all members. `asked`: name (or address, if no name is known) -> address; `answers`: by the same names.

    `over`: reasons for members whose certificate has expired.
    """
    call = _RollCall(asked, answers, record, now)
    found = [*call.shards(), *call.workers()]
    named = {present.name for present in found}
    found += [
        Present(name, _ROLES[name.startswith("worker")], "away", "no answer", why=f"nobody answers at {address}")
        for name, address in call.silent.items()
        if name not in named and not any(address in present.why for present in found)
    ]
    for name, why in (over or {}).items():
        at = asked[name]
        found = [
            replace(one, why=f"{at}: {why}", code=Expired.code) if name == one.name or f"at {at}" in one.why else one
            for one in found
        ]
    found.sort(key=lambda present: (present.role, natural(present.name)))
    cluster = Cluster({f"{one.role} {one.name}": _member(one, call.recorded.get(one.name)) for one in found})
    present = tuple(
        replace(one, state=cluster.state_of(member, 0.0) if one.presence == "alive" else one.state or one.presence)
        for one, member in zip(found, cluster.members.values(), strict=True)
    )
    return Roll(present, cluster, tuple(findings(cluster, 0.0)))


def _member(one: Present, recorded: MemberRecord | None) -> SeenMember:
    """The member for a model whose clock is 0 now."""
    if one.presence != "alive":
        since = None if one.since_s is None else -one.since_s
        return SeenMember(
            one.name, one.role, one.state or one.presence, one.status or {}, why_not=one.why, since=since,
            why_code=one.code, again=_again(one, recorded),
        )  # fmt: skip
    if one.status is None:  # learners reach it, but it was not asked
        return SeenMember(one.name, one.role, "heard")
    return SeenMember(one.name, one.role, "up", one.status)


def _again(one: Present, recorded: MemberRecord | None) -> str:
    if one.presence == "starting":
        return "wait: `diloco up` starts it"
    if recorded is not None and recorded.process == "lost":
        return f"`diloco up` has given up on it: see `diloco logs {one.name}`"
    if recorded is not None:
        return "if `diloco up` still runs, it starts it again"
    return ""


class _RollCall:
    def __init__(
        self, asked: Mapping[str, str], answers: Mapping[str, Status], record: ClusterRecord | None, now: float
    ) -> None:
        self.silent = {name: address for name, address in asked.items() if name not in answers}
        self.recorded = record.members if record else {}
        self._record, self._now = record, now
        self._heard = {str(status.get("name") or name): status for name, status in answers.items()}
        self._shards = [status for status in self._heard.values() if status.get("role") == "shard"]

    def shards(self) -> Iterator[Present]:
        """The shards: as many as the highest count that the record or any shard reports."""
        count = max([int(s.get("count") or 0) for s in self._shards] + [self._record.shards if self._record else 0])
        by_index = {int(shard["index"]): shard for shard in self._shards if shard.get("index") is not None}
        names = [f"shard-{index}" for index in range(count)]
        missing = [index for index in range(count) if index not in by_index and names[index] not in self.silent]
        unnamed = [name for name in self.silent if ":" in name]
        for index, name in enumerate(names):
            if (status := by_index.get(index)) is not None:
                yield self._answered(name, "shard", status)
                continue
            one = self._by_record(name, "shard") or self._by_learners(name, index)
            only = unnamed[0] if len(unnamed) == len(missing) == 1 and index in missing else ""
            if address := self.silent.get(name) or only:
                presence: Presence = "away" if one.presence in ("alive", "unknown") else one.presence
                state = "no answer" if presence == "away" else one.state
                said = f"nobody answers at {address}" + (f"; {one.why}" if one.why else "")
                one = replace(one, presence=presence, state=state, why=said)
            yield one

    def workers(self) -> Iterator[Present]:
        """The workers: those that answer, those of `diloco up`, and those known to shards."""
        own = {name: status for name, status in self._heard.items() if status.get("role") == "worker"}
        known = {one.name: one for one in self._learners()}
        ours = [name for name, one in self.recorded.items() if one.role == "worker"]
        for name in dict.fromkeys([*ours, *own, *known, *(name for name in self.silent if name.startswith("worker"))]):
            recorded = self._by_record(name, "worker")
            if name in own:
                yield self._answered(name, "worker", own[name])
            elif recorded is not None:
                yield replace(recorded, status=known[name].status if name in known else None)
            elif name in known:
                yield known[name]
            else:
                why = f"nobody answers at {self.silent.get(name, 'its address')}"
                yield Present(name, "worker", "away", "no answer", why=why)

    def _answered(self, name: str, role: Role, status: Status) -> Present:
        restarts = self.recorded[name].restarts if name in self.recorded else 0
        return Present(name, role, "alive", status=status, answered=True, restarts=restarts)

    def _by_record(self, name: str, role: Role) -> Present | None:
        """The record of a process that did not answer; None: there is none, or it is up."""
        one = self.recorded.get(name)
        if one is None or one.process == "up":
            return None
        presence = _OF_PROCESSES.get(one.process, "starting")
        since_s = max(0.0, self._now - one.since) if presence == "dead" else None
        return Present(name, role, presence, one.process, since_s, one.why, restarts=one.restarts)

    def _by_learners(self, name: str, index: int) -> Present:
        """A shard's presence, from what learners tell the other shards."""
        by_learner: dict[str, float | None] = {}  # learner -> how long it has not reached the shard; None: it does
        for shard in self._shards:
            for learner in shard.get("learners", ()):
                if learner.get("state") in WITH_LEASE and (said := learner.get("away")) is not None:
                    by_learner[str(learner["id"])] = _away_s(said, index)
        gone = [for_s for for_s in by_learner.values() if for_s is not None]
        if not by_learner:
            return Present(name, "shard", "unknown", "not asked")
        if 2 * len(gone) > len(by_learner):
            why = f"{len(gone)} of {len(by_learner)} learners do not reach it"
            return Present(name, "shard", "away", since_s=statistics.median(gone), why=why)
        why = f"{len(by_learner) - len(gone)} of {len(by_learner)} learners reach it"
        return Present(name, "shard", "alive", why=why)

    def _learners(self) -> Iterator[Present]:
        members = [SeenMember(f"{number}", "shard", "up", shard) for number, shard in enumerate(self._shards)]
        for name, learner in sorted(put_together(members, {}).items()):
            presence: Presence = "alive" if learner.is_here else "left" if learner.state == "left" else "away"
            away_s = 0.0 - learner.heard_at if presence == "away" else None
            why = "" if presence == "left" else learner.who_says
            yield Present(name, "worker", presence, learner.state, away_s, why, status=learner.as_status())


def _away_s(said: Sequence[Mapping[str, Any]], index: int) -> float | None:
    """How long a learner has not reached a shard that did not answer. A shard it never reached has no index."""
    named = {a.get("index"): float(a["for_s"]) for a in said}
    return named.get(index, named.get(None))
