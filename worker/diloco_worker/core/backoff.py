"""How long to wait before dialing again."""

from __future__ import annotations

FIRST_S = 0.2
GROWTH = 1.7
LONGEST_S = 3.0


def backoff_s(attempt: int, jitter: float) -> float:
    """Seconds before retry number `attempt` (from 0), with `jitter` drawn evenly from [0, 1).

    Grows from 0.2 s to 3 s; half of it is random, so that learners that lost the same shard do not come back in step.
    After 10 s of failures the wait is at least 1.5 s: less than one connect per second.
    """
    longest = min(LONGEST_S, FIRST_S * GROWTH ** min(attempt, 32))
    return longest * (0.5 + 0.5 * jitter)
