"""Keeps track of a cluster over time: last answers, earlier processes, events, the course of loss and progress.

Pure: `up.py` hands in the answers and the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.wire.addresses import Role
from diloco_deploy.cluster.members import Status
from diloco_deploy.cluster.model import Cluster, Pace
from diloco_deploy.show.terminal import Snapshot

_LOSSES_MAX = 512
_SAME_EVENT_WITHIN_S = 1.0
_EVENTS_KEPT_S = 600.0


@dataclass(frozen=True)
class _Seen:
    """An event that was already told. Shards report its age, so its time varies a little between answers."""

    key: tuple[str, int, str, str, str]
    """Member, which of its processes, event, learner, code."""
    at: float
    """By the clock of the process: an answer that took long, or lay here for a while, is no new event."""
    told_at: float


class Watch:
    """The members of a cluster, as far as they are known. Owned by one thread."""

    def __init__(self, started_at: float) -> None:
        self.doing = "starting"
        self._started_at = started_at
        self.cluster = Cluster()
        self._losses: list[float] = []
        self._pace = Pace()
        self._seen: list[_Seen] = []
        self._disks: dict[str, str] = {}  # shard -> why its disk refuses versions

    def expect(self, name: str, role: Role) -> None:
        """A member exists from now on. A known member has started a new process."""
        if name in self.cluster.members:
            self.cluster.begins_anew(name)
        self.cluster.expect(name, role)

    def process(self, name: str, state: str) -> None:
        """The state of a member's process has changed. One that has left is not expected; what it did still counts."""
        self.cluster.process(name, state)

    def heard(self, name: str, status: Status, now: float) -> list[str]:
        """A member has answered. Returns its new events, as lines for people."""
        self.cluster.heard(name, status, now)
        if status.get("role") == "shard":
            self._pace.heard(now, self.cluster.tokens_merged or 0)
        return self._disk_refuses(name, status) + self._new_events(name, status, now)

    def sample_loss(self) -> None:
        """Add the present training loss to its course. Call this at a steady pace."""
        loss = self.cluster.totals().loss
        if loss is None:
            return
        self._losses.append(loss)
        if len(self._losses) > _LOSSES_MAX:  # halve the resolution, keep the whole course
            self._losses = [(a + b) / 2 for a, b in zip(self._losses[::2], self._losses[1::2], strict=False)]

    def snapshot(self, now: float) -> Snapshot:
        """The present state of the cluster."""
        left_s = self._pace.left_s(self.cluster.tokens_budget)
        return Snapshot(self.cluster, now - self._started_at, now, tuple(self._losses), left_s, self.doing)

    def _disk_refuses(self, name: str, status: Status) -> list[str]:
        """Says each reason once. The run stands still until the disk takes versions again."""
        reason = str(status.get("reason") or "")
        why = reason.removeprefix("storage: ") if reason.startswith("storage: ") else ""
        if why == self._disks.get(name, ""):
            return []
        self._disks[name] = why
        if not why:
            return [f"{name}: the disk takes versions again"]
        return [f"{name}: the disk takes no versions, and the run waits for it: {why} (STORAGE)"]

    def _new_events(self, name: str, status: Status, now: float) -> list[str]:
        lines = []
        self._seen = [seen for seen in self._seen if now - seen.told_at < _EVENTS_KEPT_S]
        life, uptime_s = self.cluster.members[name].starts, float(status.get("uptime_s", now))
        for event in status.get("events", []):
            ago_s = float(event.get("ago_s", 0.0))
            if ago_s > _EVENTS_KEPT_S:
                continue
            at = uptime_s - ago_s
            what, learner, code = (str(event.get(key) or "") for key in ("event", "learner", "code"))
            key = (name, life, what, learner, code)
            if any(seen.key == key and abs(seen.at - at) < _SAME_EVENT_WITHIN_S for seen in self._seen):
                continue
            self._seen.append(_Seen(key, at, now))
            lines.append(f"{name}: {learner} {what}".replace("  ", " ") + (f" ({code})" if code else ""))
        return lines
