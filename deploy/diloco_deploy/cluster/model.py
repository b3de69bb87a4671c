"""A cluster: all members and learners, and their totals. Pure: answers and times are passed in.

`diloco status` makes a model from one answer per member; `diloco up` and the live page keep one over time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_common import units
from diloco_common.wire.addresses import Role
from diloco_deploy import ASK_S
from diloco_deploy.cluster.members import SeenLearner, SeenMember, Status, forget_most, put_together

PACE_S = 30.0
"""Time over which the pace of a run is measured."""


@dataclass(frozen=True)
class Totals:
    """Totals of a cluster. Shards share nothing, so their counters are summed."""

    unit: str
    """"tokens" or "samples"."""
    tokens: int
    """Tokens trained by all workers, by their own count. A worker that returns continues from its checkpoint."""
    tokens_merged: int
    """Progress of the run: merged tokens, averaged over the fragments."""
    tokens_budget: int
    tokens_per_s: float
    tokens_carried: int
    loss: float | None
    """Mean training loss of the workers that report one."""
    rounds: int
    participants_mean: float
    late: int
    evictions: int
    """Leases ended by shards. A worker that dies loses one at every shard."""
    bytes_pushed: int
    bytes_pulled: int
    done: bool


class Cluster:
    """The known state of a cluster. Owned by one thread."""

    def __init__(self, members: Mapping[str, SeenMember] | None = None) -> None:
        self.members = dict(members or {})
        self.forgotten = 0
        """Learners dropped because they were away for too long."""
        self._learners: dict[str, SeenLearner] = {}
        self._unread = set(self.members)  # members whose last change is not in `_learners` yet

    @property
    def shards(self) -> list[SeenMember]:
        return [member for member in self.members.values() if member.role == "shard"]

    @property
    def workers(self) -> list[SeenMember]:
        return [member for member in self.members.values() if member.role == "worker"]

    # ------------------------------------------------------------ answers

    def expect(self, name: str, role: Role) -> None:
        self.members.setdefault(name, SeenMember(name, role))

    def await_learner(self, learner_id: str) -> None:
        self._learners.setdefault(learner_id, SeenLearner(learner_id, "awaited"))

    def begins_anew(self, name: str) -> None:
        self._before_change_of(name)
        self.members[name].begins_anew()

    def process(self, name: str, state: str, why: str = "", code: str = "") -> None:
        """Set the state of a member's process. A member that left is not expected, but its work counts."""
        member = self.members[name]
        member.process, member.why_not, member.why_code = state, why, code
        self._unread.add(name)

    def heard(self, name: str, status: Status, now: float, asked_at: float = 0.0) -> None:
        self._before_change_of(name)
        self.members[name].heard(status, now, asked_at)

    # ------------------------------------------------------------ state

    @property
    def learners(self) -> dict[str, SeenLearner]:
        """Combined only when needed, since that visits every learner of every shard."""
        if self._unread:
            self._roll()
        return self._learners

    def state_of(self, member: SeenMember, now: float) -> str:
        """A member's state in one word: its process's first, then its state at the shards, then the one it reports."""
        if member.process != "up":
            return member.process + (f" {units.clock(now - member.since)}" if member.since is not None else "")
        if not member.status:
            return "starting"
        if member.heard_at is not None and now - member.heard_at > ASK_S:
            return f"silent {now - member.heard_at:.0f}s"
        if member.role == "shard":
            return "done" if member.get("done") else "ready" if member.get("ready") else "not ready"
        seen = self.learners.get(member.name)
        if seen is not None and seen.state in ("away", "left_out", "stalled", "partly"):
            return seen.state
        return str(member.get("state", "up"))

    @property
    def tokens_merged(self) -> int | None:
        """Progress of the run: the mean over all fragments of the model. None: no shard has answered."""
        said = [shard.listing for shard in self.shards if shard.listing]
        if not said:
            return None
        weights = [max(1, sum(not f.get("companion") for f in one.get("fragments") or ())) for one in said]
        merged = sum(w * int(one.get("tokens_merged") or 0) for w, one in zip(weights, said, strict=True))
        return round(merged / sum(weights))

    @property
    def tokens_budget(self) -> int:
        return max((shard.tokens_budget for shard in self.shards), default=0)

    def count(self, key: str) -> int:
        return sum(shard.count(key) for shard in self.shards)

    def totals(self) -> Totals:
        shards, workers = self.shards, self.workers
        rounds = self.count("rounds")
        losses = [float(worker.get("loss")) for worker in workers if worker.get("loss") is not None]
        return Totals(
            unit=next((w.get("unit") for w in workers if w.get("unit") == "samples"), "tokens"),
            tokens=sum(worker.tokens for worker in workers),
            tokens_merged=self.tokens_merged or 0,
            tokens_budget=self.tokens_budget,
            tokens_per_s=sum(float(w.get("tokens_per_s", 0.0)) for w in workers if w.process != "died"),
            tokens_carried=sum(worker.count("tokens_carried") for worker in workers),
            loss=sum(losses) / len(losses) if losses else None,
            rounds=rounds,
            participants_mean=sum(shard.contributions for shard in shards) / rounds if rounds else 0.0,
            late=self.count("late"),
            evictions=self.count("evictions"),
            bytes_pushed=self.count("bytes_pushed"),
            bytes_pulled=self.count("bytes_pulled"),
            done=bool(shards) and all(shard.get("done", False) for shard in shards),
        )

    def versions(self) -> dict[str, int]:
        """The version of every fragment, including companions."""
        listed = (fragment for shard in self.shards for fragment in shard.get("fragments", ()))
        found = {int(fragment["id"]): int(fragment["version"]) for fragment in listed}
        return {str(fragment): version for fragment, version in sorted(found.items())}

    def _before_change_of(self, name: str) -> None:
        member = self.members[name]
        if member.role == "shard":
            if member.status and name in self._unread:  # or learners that only this answer lists would be lost
                self._roll()
            self._unread.add(name)

    def _roll(self) -> None:
        self._learners = put_together(self.shards, self._learners)
        if num_forgotten := forget_most(self._learners):
            self.forgotten += num_forgotten
            for shard in self.shards:
                shard.past_learners = {i: past for i, past in shard.past_learners.items() if i in self._learners}
        self._unread.clear()


class Pace:
    """Measures the pace over the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def heard(self, now: float, merged: int) -> None:
        """Add a measurement. The time before the first version does not count."""
        if merged == 0:
            self._seen.clear()
        self._seen.append((now, merged))
        while now - self._seen[0][0] > PACE_S:
            self._seen.popleft()

    def left_s(self, budget: int) -> float | None:
        """Seconds until the budget is reached at this pace; None: there is no budget, or no pace yet."""
        if not budget or len(self._seen) < 2:
            return None
        (then, before), (last, merged) = self._seen[0], self._seen[-1]
        if merged <= before or last - then < PACE_S / 8:  # the pace would be a guess
            return None
        return max(0, budget - merged) * (last - then) / (merged - before)
