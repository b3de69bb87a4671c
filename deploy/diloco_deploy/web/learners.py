"""Learners as rows: what all shards say of each, put together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from diloco_deploy.standing import standing, state_at, tokens_per_s

ROWS_MAX = 10_000
"""Learners that are remembered. Of more, those that have been away for longest are dropped, and counted."""
PAGE = 50

STATES = ("away", "awaited", "quarantined", "stalled", "partly", "unknown", "training", "left")
"""In the order in which they want attention."""
_COUNTS = ("asked", "contributed", "merged", "outliers")


@dataclass
class Learner:
    """One learner."""

    learner_id: str
    state: str = "unknown"
    """"training", "stalled" (heartbeats, but no step), "quarantined", "partly" (a lease at some shards only), "away"
    (no lease anywhere), "awaited" (expected, and never seen), "left" (said goodbye), "unknown" (no shard answers that
    could know)."""
    heard_at: float = 0.0
    """When a shard heard of it last, seconds since 1970."""
    away_at: tuple[str, ...] = ()
    """Shards that answer, and where it has no lease."""
    inner_step: int = 0
    tokens: int = 0
    unit: str = "tokens"
    """What it counts as tokens: "tokens" or "samples"."""
    loss: float | None = None
    step_time_s: float = 0.0
    staleness: int | None = None
    """Of its last accepted contribution, in versions: the worst of all shards."""
    counts: Counter[str] = field(default_factory=Counter)
    """asked, contributed, merged, outliers: over all shards, since the page began to look or they started."""
    missed: Counter[str] = field(default_factory=Counter)
    """Why contributions that were asked for are in no version, by code."""

    @property
    def is_here(self) -> bool:
        return self.state in ("training", "stalled", "quarantined", "partly")

    @property
    def tokens_per_s(self) -> float:
        """By its own report; 0: it is not here, has not said, or says what cannot be."""
        return tokens_per_s(self.tokens, self.inner_step, self.step_time_s) if self.is_here else 0.0

    def row(self) -> dict[str, Any]:
        """JSON."""
        return {
            "id": self.learner_id,
            "state": self.state,
            "heard_at": round(self.heard_at, 1),
            "away_at": list(self.away_at),
            "step": self.inner_step,
            "tokens": self.tokens,
            "loss": self.loss,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "staleness": self.staleness,
            "asked": self.counts["asked"],
            "merged": self.counts["merged"],
            "missed": dict(self.missed.most_common()),
        }


@dataclass(frozen=True)
class Sight:
    """What one shard says of all learners."""

    shard: str
    answers: bool
    heard_at: float
    learners: Iterable[Mapping[str, Any]]
    past: Mapping[str, tuple[Counter[str], Counter[str]]]
    """Learner -> counts and missed of the shard's earlier processes."""


def put_together(sights: Iterable[Sight], known: Mapping[str, Learner]) -> dict[str, Learner]:
    """The learners of a run, by id. Those that no shard knows any more stay as they were known, and are away."""
    sights = list(sights)
    found: dict[str, Learner] = {}
    states: dict[str, dict[str, str]] = {}
    for sight in sights:
        for said in sight.learners:
            learner_id = str(said["id"])
            learner = found.get(learner_id) or found.setdefault(learner_id, Learner(learner_id))
            _add(learner, said, sight)
            if sight.answers:
                states.setdefault(learner_id, {})[sight.shard] = state_at(said)
    for sight in sights:
        for learner_id in sight.past:
            if learner_id not in found:  # it has not come back to a shard that started again
                found[learner_id] = _as_known(learner_id, known.get(learner_id))
    for sight in sights:
        for learner_id, (counts, missed) in sight.past.items():
            found[learner_id].counts.update(counts)
            found[learner_id].missed.update(missed)
    answering = [sight.shard for sight in sights if sight.answers]
    for learner in found.values():
        seen, old = states.get(learner.learner_id, {}), known.get(learner.learner_id)
        learner.state, learner.away_at = standing(seen, answering)
        if not seen and old is not None and old.state == "left":
            learner.state = "left"
    for learner_id, old in known.items():
        if learner_id not in found:
            if old.is_here:
                old.state = "away" if answering else "unknown"
            found[learner_id] = old
    return found


def forget_most(learners: dict[str, Learner]) -> int:
    """Drop the learners that have been away for longest, if there are too many. Returns how many."""
    over = len(learners) - ROWS_MAX
    if over <= 0:
        return 0
    gone = sorted((one for one in learners.values() if not one.is_here), key=lambda one: one.heard_at)[:over]
    for one in gone:
        del learners[one.learner_id]
    return len(gone)


def page_of(learners: Iterable[Learner], *, sort: str, descending: bool, find: str, page: int) -> dict[str, Any]:
    """One page of rows as JSON. Raises ValueError: there is no such order."""
    if sort not in _ORDERS:
        raise ValueError(f"sort: one of {', '.join(_ORDERS)}")
    wanted = [one for one in learners if find.lower() in one.learner_id.lower()]
    wanted.sort(key=lambda one: one.learner_id)
    wanted.sort(key=_ORDERS[sort], reverse=descending)
    pages = max(1, -(-len(wanted) // PAGE))
    page = min(max(0, page), pages - 1)
    rows = [one.row() for one in wanted[page * PAGE : (page + 1) * PAGE]]
    return {"total": len(wanted), "page": page, "pages": pages, "rows": rows}


def _add(learner: Learner, said: Mapping[str, Any], sight: Sight) -> None:
    heard_at = sight.heard_at - float(said.get("silent_s") or 0.0)
    if heard_at >= learner.heard_at:  # the shard that heard of it last knows best how far it is
        learner.heard_at = heard_at
        learner.inner_step, learner.tokens = int(said.get("inner_step") or 0), int(said.get("tokens") or 0)
        learner.unit = "samples" if said.get("unit") == "samples" else "tokens"
        loss = float("nan") if said.get("loss") is None else float(said["loss"])
        learner.loss, learner.step_time_s = loss if isfinite(loss) else None, float(said.get("step_time_s") or 0.0)
    staleness = said.get("staleness")
    if staleness is not None:
        learner.staleness = max(int(staleness), learner.staleness or 0)
    learner.counts.update(counts_of(said))
    learner.missed.update(said.get("missed") or {})


def _as_known(learner_id: str, old: Learner | None) -> Learner:
    """How far it was when it was heard last, with counts that begin anew."""
    if old is None:
        return Learner(learner_id)
    return replace(old, counts=Counter(), missed=Counter())


def counts_of(said: Mapping[str, Any]) -> Counter[str]:
    return Counter({key: int(said.get(key) or 0) for key in _COUNTS})


def _loss(learner: Learner) -> float:
    return float("inf") if learner.loss is None else learner.loss


_ORDERS = {
    "attention": lambda one: STATES.index(one.state),
    "id": lambda one: one.learner_id,
    "step": lambda one: one.inner_step,
    "speed": lambda one: one.tokens_per_s,
    "loss": _loss,
    "staleness": lambda one: -1 if one.staleness is None else one.staleness,
    "merged": lambda one: one.counts["merged"],
    "heard": lambda one: one.heard_at,
}
