"""One shard or worker over all of its processes, from their answers at /status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_common.wire.addresses import Role

Status = Mapping[str, Any]
COUNTERS = (
    "rounds", "late", "duplicates", "evictions", "versions_lost", "bytes_pushed", "bytes_pulled", "tokens_carried",
)  # fmt: skip
"""Counters that each process starts at 0."""
COUNTERS_OF_LEARNERS = ("asked", "merged")


@dataclass
class SeenMember:
    name: str
    """The name under which it is asked, which may be only an address."""
    role: Role
    process: str = "starting"
    """For a process of `diloco up`: "starting", "up", "died", "ended", "lost" or "left" (`diloco scale`); otherwise
    "up" while it answers, or a word to show."""
    status: Status = field(default_factory=dict)
    """The last answer of its current process."""
    label: str = ""
    heard_at: float | None = None
    asked_at: float = 0.0
    """When its last answer was requested, by a monotonic clock."""
    why_not: str = "not asked yet"
    """Why it does not answer; empty if it does."""
    why_code: str = ""
    """The code of that reason, if known: EXPIRED."""
    since: float | None = None
    """Since when it is gone, by the clock of the model; None: unknown."""
    again: str = ""
    """What restarts it; empty: a person does."""
    starts: int = 0
    """Earlier processes that have answered."""
    listing: Status = field(default_factory=dict)
    """Its last answer that lists fragments: a restarted shard lists none until it has read its versions."""
    tokens_before: int = 0
    """The most tokens that an earlier process had trained. The next one continues from a checkpoint."""
    budget_before: int = 0
    past: Counter[str] = field(default_factory=Counter)
    """Counters of its earlier processes, as far as known."""
    contributions_before: float = 0.0
    past_refused: Counter[str] = field(default_factory=Counter)
    past_learners: dict[str, tuple[Counter[str], Counter[str]]] = field(default_factory=dict)
    """Learner -> counts and missed contributions at the shard's earlier processes."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name
        if self.status:
            self._note()

    @property
    def answers(self) -> bool:
        return self.process == "up" and bool(self.status)

    def get(self, key: str, default: Any = None) -> Any:
        found = self.status.get(key)
        return default if found is None else found

    def heard(self, status: Status, now: float, asked_at: float = 0.0) -> None:
        self.status, self.heard_at, self.asked_at, self.why_not, self.why_code = status, now, asked_at, "", ""
        self._note()

    def begins_anew(self) -> None:
        """A new process takes its place: keep the counts of this one."""
        self.process = "starting"
        if not self.status:
            return
        self.starts += 1
        self.past.update({key: int(self.get(key, 0)) for key in COUNTERS})
        self.contributions_before += self._contributions()
        self.past_refused.update(self.status.get("rejected") or {})
        self.tokens_before, self.budget_before = self.tokens, self.tokens_budget
        for said in self.status.get("learners") or ():
            counts, missed = self.past_learners.setdefault(str(said["id"]), (Counter(), Counter()))
            counts.update(counts_of(said))
            missed.update(said.get("missed") or {})
        self.status = {}

    def is_succeeded_by(self, status: Status, asked_at: float) -> bool:
        """Whether an answer comes from a new process: by its epoch or, without one, by its uptime.

        A slow answer, or a clock that was set, is not taken for a restart.
        """
        if not self.status:
            return False
        if "epoch" in self.status and "epoch" in status:
            return bool(self.status["epoch"] != status["epoch"])
        before, passed_s = float(self.get("uptime_s", 0.0)), asked_at - self.asked_at
        return float(status.get("uptime_s") or 0.0) < before + 0.5 * passed_s - 1.0

    # ------------------------------------------------------------ over all processes

    def count(self, key: str) -> int:
        return self.past[key] + int(self.get(key, 0))

    @property
    def tokens(self) -> int:
        """Tokens that a worker has trained; 0 for a shard."""
        return max(self.tokens_before, int(self.get("tokens", 0))) if self.role == "worker" else 0

    @property
    def tokens_budget(self) -> int:
        return int(self.get("tokens_budget", 0)) if self.status else self.budget_before

    @property
    def contributions(self) -> float:
        return self.contributions_before + self._contributions()

    @property
    def refused(self) -> Counter[str]:
        return self.past_refused + Counter(self.get("rejected", {}))

    @property
    def versions(self) -> tuple[int, int] | None:
        """The lowest and highest version of a shard's model fragments; None: it lists none."""
        found = [int(one["version"]) for one in self.get("fragments", ()) if not one.get("companion")]
        return (min(found), max(found)) if found else None

    @property
    def open_rounds(self) -> int:
        return sum(bool(one.get("round_open")) for one in self.get("fragments", ()))

    @property
    def learners_held(self) -> int:
        return sum(one.get("state") in ("alive", "stalled") for one in self.get("learners", ()))

    def _contributions(self) -> float:
        return float(self.get("participants_mean", 0.0)) * int(self.get("rounds", 0))

    def _note(self) -> None:
        is_of_another_run = self.status.get("run") != self.listing.get("run")
        if self.status.get("fragments") or is_of_another_run or not self.listing.get("fragments"):
            self.listing = self.status


def counts_of(said: Mapping[str, Any]) -> Counter[str]:
    return Counter({key: int(said.get(key) or 0) for key in COUNTERS_OF_LEARNERS})
