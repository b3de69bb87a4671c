"""One shard or worker over all of its processes, and one learner over all shards, from answers at /status. Pure.

Shards do not know of each other, so each reports the learners that it knows. The terminal, `--json` and the page are
views of the members and learners built here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, NamedTuple

from diloco_common.wire.addresses import Role

Status = Mapping[str, Any]
COUNTERS = (
    "rounds", "late", "duplicates", "evictions", "versions_lost", "bytes_pushed", "bytes_pulled", "tokens_carried",
)  # fmt: skip
"""Counters that each process starts at 0."""
COUNTERS_OF_LEARNERS = ("asked", "merged")


class SeenReader(NamedTuple):
    """A mirror or a standby, as its shard reports it."""

    role: str
    name: str
    site: str
    """Empty: none."""
    state: str
    """"following" or "away"."""
    for_s: float


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
    """When it went away, by the clock of the model; None: unknown."""
    again: str = ""
    """What restarts it, as a text to show; empty: a person must."""
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
        return sum(one.get("state") in ("alive", "stalled") for one in self.get("learners", ()))

    def _contributions(self) -> float:
        return float(self.get("participants_mean", 0.0)) * int(self.get("rounds", 0))

    def _note(self) -> None:
        is_of_another_run = self.status.get("run") != self.listing.get("run")
        if self.status.get("fragments") or is_of_another_run or not self.listing.get("fragments"):
            self.listing = self.status


def counts_of(said: Mapping[str, Any]) -> Counter[str]:
    return Counter({key: int(said.get(key) or 0) for key in COUNTERS_OF_LEARNERS})


KEPT_S = 900.0
"""How long past events are remembered."""
SAME_S = 1.0
"""Tolerance for the time of an event, which is computed from its age."""
LEARNERS_MAX = 10_000
"""Maximum number of learners remembered. Beyond it, those away longest are dropped and counted."""
STATES = ("away", "awaited", "left_out", "stalled", "partly", "unknown", "training", "left")
"""Sorted by how much they need attention."""
HERE = ("training", "stalled", "left_out", "partly")
WITH_LEASE = ("alive", "stalled", "left_out")
STEP_S_MIN = 1e-6
"""Shortest credible step; a learner that reports less has no rate."""


@dataclass
class SeenLearner:
    learner_id: str
    state: str = "unknown"
    """"training", "stalled" (heartbeats, but no step), "left_out", "partly" (a lease at some shards only), "away" (no
    lease anywhere), "awaited" (expected, but never seen), "left", "unknown" (no shard answers)."""
    heard_at: float = -inf
    """When a shard last heard from it, by the clock of the model; minus infinity: never."""
    at: Mapping[str, str] = field(default_factory=dict)
    """Answering shard that knows it -> "alive", "stalled", "left_out", "evicted" or "left"."""
    away_at: tuple[str, ...] = ()
    """Answering shards where it has no lease."""
    said: Status = field(default_factory=dict)
    """Its entry from the shard that last heard from it, which is the most recent."""
    told: list[Status] = field(default_factory=list)
    """Its entries from all answering shards."""
    staleness: int | None = None
    """Staleness of its last accepted contribution, in versions: the worst of all shards."""
    counts: Counter[str] = field(default_factory=Counter)
    """asked and merged, over all shards and their earlier processes, as far as known."""
    missed: Counter[str] = field(default_factory=Counter)
    """Requested contributions that are in no version, by code."""

    @property
    def is_here(self) -> bool:
        return self.state in HERE

    @property
    def inner_step(self) -> int:
        return int(self.said.get("inner_step") or 0)

    @property
    def tokens(self) -> int:
        return int(self.said.get("tokens") or 0)

    @property
    def unit(self) -> str:
        """The unit of its tokens: "tokens" or "samples"."""
        return "samples" if self.said.get("unit") == "samples" else "tokens"

    @property
    def loss(self) -> float | None:
        """Its last reported loss. None: it reported none, or not a finite number."""
        loss = self.said.get("loss")
        return float(loss) if loss is not None and isfinite(float(loss)) else None

    @property
    def step_time_s(self) -> float:
        return float(self.said.get("step_time_s") or 0.0)

    @property
    def tokens_per_s(self) -> float:
        """From its own report; 0 if it is not here, has not reported, or reports an impossible rate."""
        if not self.is_here or not self.inner_step or self.step_time_s < STEP_S_MIN:
            return 0.0
        found = self.tokens / self.inner_step / self.step_time_s
        return found if isfinite(found) else 0.0

    @property
    def who_says(self) -> str:
        verb = "heard" if self.is_here else "evicted"
        count = sum((word in WITH_LEASE) == self.is_here and word != "left" for word in self.at.values())
        return f"{verb} by {count} shard{'' if count == 1 else 's'}"

    def as_status(self) -> Status:
        """Its status as its own /status would report it, as far as shards know it."""
        return {
            "role": "worker", "name": self.learner_id, "state": self.state, "inner_step": self.inner_step,
            "tokens": self.tokens, "unit": self.unit, "loss": self.loss, "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "contributions": {"merged": self.counts["merged"]},
            "from": "shards",
        }  # fmt: skip


def put_together(shards: Iterable[SeenMember], known: Mapping[str, SeenLearner]) -> dict[str, SeenLearner]:
    """The learners of a run, by id. Those that no shard knows anymore keep their last state, and are away."""
    shards = list(shards)
    found: dict[str, SeenLearner] = {}
    states: dict[str, dict[str, str]] = {}
    for shard in shards:
        for said in shard.get("learners", ()):
            learner_id = str(said["id"])
            _add(found.setdefault(learner_id, SeenLearner(learner_id)), said, shard.heard_at or 0.0)
            if shard.answers:
                states.setdefault(learner_id, {})[shard.label] = _state_at(said)
                found[learner_id].told.append({**said, "shard": shard.label})
    for shard in shards:
        for learner_id, (counts, missed) in shard.past_learners.items():
            if learner_id not in found:  # it has not rejoined a restarted shard
                found[learner_id] = replace(
                    known.get(learner_id, SeenLearner(learner_id)), counts=Counter(), missed=Counter()
                )
            found[learner_id].counts.update(counts)
            found[learner_id].missed.update(missed)
    answering = [shard.label for shard in shards if shard.answers]
    for learner in found.values():
        learner.at, old = states.get(learner.learner_id, {}), known.get(learner.learner_id)
        learner.state, learner.away_at = _standing(learner.at, answering)
        if not learner.at and old is not None and old.state == "left":
            learner.state = "left"
    for learner_id, old in known.items():
        if learner_id not in found:
            if old.is_here:
                old.state = "away" if answering else "unknown"
            found[learner_id] = old
    return found


def forget_most(learners: dict[str, SeenLearner]) -> int:
    """Drop the learners that have been away longest, if there are too many. Returns how many."""
    over = len(learners) - LEARNERS_MAX
    if over <= 0:
        return 0
    gone = sorted((one for one in learners.values() if not one.is_here), key=lambda one: one.heard_at)[:over]
    for one in gone:
        del learners[one.learner_id]
    return len(gone)


def _state_at(said: Status) -> str:
    state = str(said["state"])
    return "left_out" if said.get("left_out") and state in WITH_LEASE else state


def _standing(at: Mapping[str, str], answering: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The state of a learner, and the answering shards where it has no lease."""
    without = tuple(shard for shard in answering if at.get(shard) not in WITH_LEASE)
    words = set(at.values())
    if not answering:
        return "unknown", ()
    if not words.intersection(WITH_LEASE):
        return ("left" if words == {"left"} else "away"), without
    worst = next((word for word in ("left_out", "stalled") if word in words), "")
    return worst or ("partly" if without else "training"), without


def _add(learner: SeenLearner, said: Status, told_at: float) -> None:
    heard_at = told_at - float(said.get("silent_s") or 0.0)
    if heard_at >= learner.heard_at:
        learner.heard_at, learner.said = heard_at, said
    staleness = said.get("staleness")
    if staleness is not None:
        learner.staleness = max(int(staleness), learner.staleness or 0)
    learner.counts.update(counts_of(said))
    learner.missed.update(said.get("missed") or {})
