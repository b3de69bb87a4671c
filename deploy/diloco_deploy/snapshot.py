"""A snapshot of a cluster, and the sums over its members.

Pure: built from the JSON that every process serves at /status. `polling.py` asks for it, `watch.py` keeps track over
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_common.endpoints import Role
from diloco_deploy.progress import Status, tokens_merged
from diloco_deploy.standing import standing, state_at

SILENT_AFTER_S = 3.0
"""A process is shown as silent if it has not answered for this long."""


@dataclass(frozen=True)
class Member:
    """One shard or worker, and its answers."""

    name: str
    role: Role
    process: str = "starting"
    """"starting", "up", "died", "ended", "lost" or "left" (`diloco scale`)."""
    status: Status | None = None
    """Its last answer; kept when the process ends."""
    past: tuple[Status, ...] = ()
    """The last answers of its earlier processes, oldest first. Each process counts from 0 again."""
    silent_s: float = 0.0
    """Seconds since it last answered."""

    def count(self, key: str) -> int:
        """A counter, summed over all processes of the member."""
        return sum(int(status.get(key) or 0) for status in self.statuses)

    def highest(self, key: str) -> int:
        """A number that the next process goes on with, such as the tokens of a worker with a checkpoint."""
        return max((int(status.get(key) or 0) for status in self.statuses), default=0)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the last answer."""
        found = (self.status or {}).get(key)
        return default if found is None else found

    @property
    def statuses(self) -> tuple[Status, ...]:
        """The last answers of all its processes, oldest first."""
        return (*self.past, *([self.status] if self.status else []))


@dataclass(frozen=True)
class Totals:
    """A cluster in numbers. Shards share nothing, so their counters are summed."""

    unit: str
    """What workers count as tokens: "tokens" or "samples"."""
    tokens: int
    """Tokens trained by all workers, by their own count. (A worker that comes back goes on from its checkpoint.)"""
    tokens_merged: int
    """Progress of the run: tokens merged into a fragment, mean over the fragments."""
    tokens_budget: int
    tokens_per_s: float
    tokens_carried: int
    loss: float | None
    """Training loss, mean over the workers that report one."""
    rounds: int
    participants_mean: float
    late: int
    evictions: int
    """Leases ended by shards. A worker that dies loses one at every shard."""
    bytes_pushed: int
    bytes_pulled: int
    done: bool
    """Every shard has reached the token budget."""


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment."""

    members: tuple[Member, ...]
    elapsed_s: float = 0.0
    losses: tuple[float, ...] = ()
    """The course of the training loss, oldest first."""
    eta_s: float | None = None
    doing: str = "training"
    """The present activity of the cluster, in a few words."""

    @property
    def shards(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "shard")

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "worker")

    def totals(self) -> Totals:
        """The sums over all members."""
        shards, workers = self.shards, self.workers
        rounds = sum(shard.count("rounds") for shard in shards)
        contributions = sum(
            float(status.get("participants_mean") or 0) * int(status.get("rounds") or 0)
            for shard in shards
            for status in shard.statuses
        )
        losses = [float(worker.get("loss")) for worker in workers if worker.get("loss") is not None]
        return Totals(
            unit=next((w.get("unit") for w in workers if w.get("unit") == "samples"), "tokens"),
            tokens=sum(worker.highest("tokens") for worker in workers),
            tokens_merged=tokens_merged(shard.statuses for shard in shards) or 0,
            tokens_budget=max((shard.highest("tokens_budget") for shard in shards), default=0),
            tokens_per_s=sum(worker_rate(worker) for worker in workers if worker.process != "died"),
            tokens_carried=sum(worker.count("tokens_carried") for worker in workers),
            loss=sum(losses) / len(losses) if losses else None,
            rounds=rounds,
            participants_mean=contributions / rounds if rounds else 0.0,
            late=sum(shard.count("late") for shard in shards),
            evictions=sum(shard.count("evictions") for shard in shards),
            bytes_pushed=sum(shard.count("bytes_pushed") for shard in shards),
            bytes_pulled=sum(shard.count("bytes_pulled") for shard in shards),
            done=bool(shards) and all(shard.get("done", False) for shard in shards),
        )

    def versions(self) -> dict[int, int]:
        """The version of every fragment."""
        found = {
            int(fragment["id"]): int(fragment["version"])
            for shard in self.shards
            for fragment in shard.get("fragments", [])
        }
        return dict(sorted(found.items()))

    def learner_states(self) -> dict[str, str]:
        """One word for each learner, from what all shards say that answer (`standing`)."""
        answering = [shard for shard in self.shards if shard.process == "up" and shard.status is not None]
        at: dict[str, dict[str, str]] = {}
        for shard in answering:
            for learner in shard.get("learners", []):
                at.setdefault(str(learner["id"]), {})[shard.name] = state_at(learner)
        names = [shard.name for shard in answering]
        return {learner_id: standing(seen, names)[0] for learner_id, seen in at.items()}

    def state_of(self, member: Member) -> str:
        """One word for a member: the state of its process first, then its state at the shards, then its own."""
        if member.process != "up":
            return member.process
        if member.status is None:
            return "starting"
        if member.silent_s > SILENT_AFTER_S:
            return f"silent {member.silent_s:.0f}s"
        if member.role == "shard":
            return "done" if member.get("done") else "ready" if member.get("ready") else "not ready"
        seen = self.learner_states().get(member.name, "")
        return seen if seen in ("away", "quarantined", "stalled", "partly") else str(member.get("state", "up"))


def worker_rate(worker: Member) -> float:
    """Tokens per second of one worker."""
    return float(worker.get("tokens_per_s", 0.0))
