"""One learner over all shards: the only place that says how a learner is. Pure.

Shards do not know of each other, so each tells of the learners that it knows. The terminal, `--json` and the page are
views of what is put together here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from diloco_deploy.cluster.members import SeenMember, Status, counts_of

LEARNERS_MAX = 10_000
"""Learners that are remembered. Of more, those that have been away for longest are dropped, and counted."""
STATES = ("away", "awaited", "left_out", "stalled", "partly", "unknown", "training", "left")
"""In the order in which they want attention."""
HERE = ("training", "stalled", "left_out", "partly")
WITH_LEASE = ("alive", "stalled", "left_out")
STEP_S_MIN = 1e-6
"""No step is shorter: a learner that reports less has no rate."""


@dataclass
class SeenLearner:
    """One learner."""

    learner_id: str
    state: str = "unknown"
    """"training", "stalled" (heartbeats, but no step), "left_out", "partly" (a lease at some shards only), "away"
    (no lease anywhere), "awaited" (expected, and never seen), "left" (said goodbye), "unknown" (no shard answers that
    could know)."""
    heard_at: float = -inf
    """When a shard heard of it last, by the clock of the model; minus infinity: none ever did."""
    at: Mapping[str, str] = field(default_factory=dict)
    """Shard that answers and knows it -> "alive", "stalled", "left_out", "evicted" or "left"."""
    away_at: tuple[str, ...] = ()
    """Shards that answer, and where it has no lease."""
    said: Status = field(default_factory=dict)
    """The entry in the status of the shard that heard of it last: that one knows best how far it is."""
    told: list[Status] = field(default_factory=list)
    """Its entries in the statuses of the shards that answer."""
    staleness: int | None = None
    """Of its last accepted contribution, in versions: the worst of all shards."""
    counts: Counter[str] = field(default_factory=Counter)
    """asked and merged: over all shards and, as far as they were heard of, their earlier processes."""
    missed: Counter[str] = field(default_factory=Counter)
    """Why contributions that were asked for are in no version, by code."""

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
        """What it counts as tokens: "tokens" or "samples"."""
        return "samples" if self.said.get("unit") == "samples" else "tokens"

    @property
    def loss(self) -> float | None:
        """Of its last report. None: it has not said, or it is no number."""
        loss = self.said.get("loss")
        return float(loss) if loss is not None and isfinite(float(loss)) else None

    @property
    def step_time_s(self) -> float:
        return float(self.said.get("step_time_s") or 0.0)

    @property
    def tokens_per_s(self) -> float:
        """By its own report; 0: it is not here, has not said, or says what cannot be."""
        if not self.is_here or not self.inner_step or self.step_time_s < STEP_S_MIN:
            return 0.0
        found = self.tokens / self.inner_step / self.step_time_s
        return found if isfinite(found) else 0.0

    @property
    def who_says(self) -> str:
        """In words."""
        verb = "heard" if self.is_here else "evicted"
        count = sum((word in WITH_LEASE) == self.is_here and word != "left" for word in self.at.values())
        return f"{verb} by {count} shard{'' if count == 1 else 's'}"

    def as_status(self) -> Status:
        """What its own /status would say, as far as shards know it."""
        return {
            "role": "worker", "name": self.learner_id, "state": self.state, "inner_step": self.inner_step,
            "tokens": self.tokens, "unit": self.unit, "loss": self.loss, "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "contributions": {"merged": self.counts["merged"], "carried": self.missed["ABSENT"]},
            "from": "shards",
        }  # fmt: skip


def put_together(shards: Iterable[SeenMember], known: Mapping[str, SeenLearner]) -> dict[str, SeenLearner]:
    """The learners of a run, by id. Those that no shard knows any more stay as they were known, and are away."""
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
            if learner_id not in found:  # it has not come back to a shard that started again
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
    """Drop the learners that have been away for longest, if there are too many. Returns how many."""
    over = len(learners) - LEARNERS_MAX
    if over <= 0:
        return 0
    gone = sorted((one for one in learners.values() if not one.is_here), key=lambda one: one.heard_at)[:over]
    for one in gone:
        del learners[one.learner_id]
    return len(gone)


def _state_at(said: Status) -> str:
    """What one shard says of a learner, in one word."""
    state = str(said["state"])
    return "left_out" if said.get("left_out") and state in WITH_LEASE else state


def _standing(at: Mapping[str, str], answering: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """One word for a learner, and the shards that answer and gave it no lease."""
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
