"""How a learner stands, from what the shards say of it: the same word in every table. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite

STEP_S_MIN = 1e-6
"""No step is shorter: a learner that reports less has no rate."""


def state_at(said: Mapping[str, object]) -> str:
    """What one shard says of a learner, in one word: "alive", "stalled", "quarantined", "evicted" or "left"."""
    state = str(said["state"])
    return "quarantined" if said.get("quarantine") and state in ("alive", "stalled") else state


def standing(at: Mapping[str, str], answering: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """One word for a learner, and the shards that answer and gave it no lease.

    `at`: shard -> its word, of those that answer and know the learner. The word is "training", "stalled",
    "quarantined", "partly" (a lease at some shards only), "away" (at none), "left", or "unknown" (no shard answers).
    """
    if not answering:
        return "unknown", ()
    here = {shard for shard, word in at.items() if word in ("alive", "stalled", "quarantined")}
    without = tuple(shard for shard in answering if shard not in here)
    words = set(at.values())
    if not here:
        return ("left" if words == {"left"} else "away"), without
    for word in ("quarantined", "stalled"):
        if word in words:
            return word, without
    return ("partly" if without else "training"), without


def tokens_per_s(tokens: int, steps: int, step_time_s: float) -> float:
    """By its own report; 0 where it has not said, or says what cannot be."""
    found = tokens / steps / step_time_s if steps and step_time_s >= STEP_S_MIN else 0.0
    return found if isfinite(found) else 0.0
