"""One shard or worker over all of its processes, from what each of them says at /status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_common.wire.addresses import Role

Status = Mapping[str, Any]
"""One answer of /status."""
COUNTERS = (
    "rounds", "late", "duplicates", "evictions", "versions_lost", "bytes_pushed", "bytes_pulled", "tokens_carried",
)  # fmt: skip
"""Each process counts these from 0 again."""
COUNTERS_OF_LEARNERS = ("asked", "merged")


class SeenReader(NamedTuple):
    """A mirror or a standby, as its shard tells of it."""

    role: str
    name: str
    site: str
    """Empty: none."""
    state: str
    """"following" or "away"."""
    for_s: float


@dataclass
class SeenMember:
    """One shard or worker, and what it said."""

    name: str
    """It is asked under this name, which may be no more than an address."""
    role: Role
    process: str = "starting"
    """"starting", "up", "died", "ended", "lost" or "left" (`diloco scale`) of a process of `diloco up`; else "up" while
    it answers, or a word for people."""
    status: Status = field(default_factory=dict)
    """The last answer of its present process."""
    label: str = ""
    """What people call it."""
    heard_at: float | None = None
    asked_at: float = 0.0
    """For its last answer, by a clock that is never set."""
    why_not: str = "not asked yet"
    """Why it does not answer; empty: it does."""
    why_code: str = ""
    """The same as a code, where one is known: EXPIRED."""
    since: float | None = None
    """Since when it is gone, by the clock of the model; None: nobody knows."""
    again: str = ""
    """Who starts it again; empty: a person does."""
    starts: int = 0
    """Processes that have answered, before the present one."""
    listing: Status = field(default_factory=dict)
    """Its last answer that lists fragments: while a shard that was started again reads its versions, it has none."""
    tokens_before: int = 0
    """The most that an earlier process had trained. The next one goes on from a checkpoint."""
    budget_before: int = 0
    past: Counter[str] = field(default_factory=Counter)
    """Counters of its earlier processes, as far as they were heard of."""
    contributions_before: float = 0.0
    past_refused: Counter[str] = field(default_factory=Counter)
    past_learners: dict[str, tuple[Counter[str], Counter[str]]] = field(default_factory=dict)
    """Learner -> counts and missed of the shard's earlier processes."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name
        if self.status:
            self._note()

    @property
    def answers(self) -> bool:
        return self.process == "up" and bool(self.status)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the last answer."""
        found = self.status.get(key)
        return default if found is None else found

    def heard(self, status: Status, now: float, asked_at: float = 0.0) -> None:
        """It has answered."""
        self.status, self.heard_at, self.asked_at, self.why_not, self.why_code = status, now, asked_at, "", ""
        self._note()

    def begins_anew(self) -> None:
        """Another process takes its place: what this one had counted is kept."""
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
        """Whether an answer is of another process than the last one. Epochs tell; else the uptime does.

        An answer that took long, or a clock that was set, is no start.
        """
        if not self.status:
            return False
        if "epoch" in self.status and "epoch" in status:
            return bool(self.status["epoch"] != status["epoch"])
        before, passed_s = float(self.get("uptime_s", 0.0)), asked_at - self.asked_at
        return float(status.get("uptime_s") or 0.0) < before + 0.5 * passed_s - 1.0

    # ------------------------------------------------------------ over all of its processes

    def count(self, key: str) -> int:
        return self.past[key] + int(self.get(key, 0))

    @property
    def tokens(self) -> int:
        """That a worker has trained. (Those of a shard are counted by what became of them.)"""
        return max(self.tokens_before, int(self.get("tokens", 0))) if self.role == "worker" else 0

    @property
    def tokens_budget(self) -> int:
        """Of the run, as a shard says it."""
        return int(self.get("tokens_budget", 0)) if self.status else self.budget_before

    @property
    def contributions(self) -> float:
        """In all rounds of a shard."""
        return self.contributions_before + self._contributions()

    @property
    def refused(self) -> Counter[str]:
        return self.past_refused + Counter(self.get("rejected", {}))

    @property
    def versions(self) -> tuple[int, int] | None:
        """The lowest and the highest of a shard's fragments of the model; None: it lists none."""
        found = [int(one["version"]) for one in self.get("fragments", ()) if not one.get("companion")]
        return (min(found), max(found)) if found else None

    @property
    def open_rounds(self) -> int:
        return sum(bool(one.get("round_open")) for one in self.get("fragments", ()))

    @property
    def followers(self) -> list[SeenReader]:
        """Mirrors and standbys of this shard: those that follow it, then those that are away."""
        told = (("following", self.get("readers", ())), ("away", self.get("readers_away", ())))
        return [
            SeenReader(str(one["role"]), str(one.get("name")), str(one.get("site") or ""), state, float(one["for_s"]))
            for state, those in told
            for one in those
            if one.get("role") in ("mirror", "standby")
        ]

    @property
    def learners_held(self) -> int:
        """Learners with a lease at this shard."""
        return sum(one.get("state") in ("alive", "stalled") for one in self.get("learners", ()))

    def _contributions(self) -> float:
        return float(self.get("participants_mean", 0.0)) * int(self.get("rounds", 0))

    def _note(self) -> None:
        is_of_another_run = self.status.get("run") != self.listing.get("run")
        if self.status.get("fragments") or is_of_another_run or not self.listing.get("fragments"):
            self.listing = self.status


def counts_of(said: Mapping[str, Any]) -> Counter[str]:
    """What one shard has counted of a learner."""
    return Counter({key: int(said.get(key) or 0) for key in COUNTERS_OF_LEARNERS})
