"""Combines what all shards say about each learner. Pure.

Shards do not know of each other, so each reports the learners that it knows. The terminal, `--json` and the page are
views of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from diloco_deploy.cluster.members import SeenMember, Status, counts_of

LEARNERS_MAX = 10_000
"""Learners that are remembered. Above it, those away longest are dropped, and counted."""
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
        """By its own report; 0 if it is not here, has not reported, or reports the impossible."""
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
            "contributions": {"merged": self.counts["merged"], "carried": self.missed["ABSENT"]},
            "from": "shards",
        }  # fmt: skip


def put_together(shards: Iterable[SeenMember], known: Mapping[str, SeenLearner]) -> dict[str, SeenLearner]:
    """The learners of a run, by id. Those that no shard knows any more keep their last state, and are away."""
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
