"""When a learner dials a shard again: after which refusals, after which silence, and how soon."""

from __future__ import annotations

from diloco_common.errors import (
    Busy,
    Draining,
    LeaseExpired,
    NotJoined,
    NotSeeded,
    StaleGeneration,
    Stalled,
    TornUpload,
    WrongEpoch,
)

JOIN_AGAIN = (NotJoined, LeaseExpired, Stalled, StaleGeneration, WrongEpoch)
"""The lease is over, or a repeated Join of this very process replaced it; a new one is to be had."""
TRY_AGAIN = (Draining, Busy, NotSeeded, TornUpload)
"""Not now."""
SILENCE_HEARTBEATS = 2.5
"""A shard that says nothing for so many heartbeats is frozen or cut off: dial again."""
STEADY_S = 5.0
"""A connection that held for so long is dialed again without the wait that its predecessors earned."""

FIRST_S = 0.2
GROWTH = 1.3
LONGEST_S = 2.0


def backoff_s(attempt: int, jitter: float) -> float:
    """Seconds before retry number `attempt` (from 0), with `jitter` drawn evenly from [0, 1).

    Grows from 0.2 s to 2 s, with the time that the shard has been away: it is at most a third of that, and in the mean
    a learner comes half of it late to a shard that is back. Half of it is random, so that learners that lost the same
    shard do not come back in step.
    After 10 s of failures the wait is at least 1 s: at most one connect per second. At most 2 s, as a dial that began
    just before a link healed may be silent for 2.5 s, and the learner is to be back 5 s after healing.
    """
    longest = min(LONGEST_S, FIRST_S * GROWTH ** min(attempt, 32))
    return longest * (0.5 + 0.5 * jitter)
