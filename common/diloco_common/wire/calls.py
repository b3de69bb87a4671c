"""The times that several parts of the code share: for calls, retries, checks, reports and goodbyes."""

from __future__ import annotations

SILENCE_HEARTBEATS = 2.5
"""A shard that is silent for this many heartbeats is frozen or cut off: connect again."""
CALL_S = 15.0
"""Seconds that a call may take, apart from the time for its bytes."""
SAY_EVERY_S = 10.0
"""Seconds between two log lines about the same lasting problem. A shorter problem is not reported."""
LONG_S = 60.0
"""A problem that lasts this many seconds is not a hiccup: it is reported, or the wait for its end stops."""
SETTLE_S = 5.0
"""Seconds for work in flight to end: the pushes of a leaving learner, or the merges of a shard that ends."""
HURRY_S = SETTLE_S / 10
"""Like `SETTLE_S`, for a process in a hurry: after Ctrl-C, for example."""
NOTICE_S = 30.0
"""Seconds of warning before a machine is reclaimed. Every goodbye takes less."""
END_S = NOTICE_S + SETTLE_S
"""Seconds for a process to end after SIGTERM, before it is killed."""
DIAL_S = 2.0
"""Seconds to wait for the other side of a handshake; also the first pause between two searches for a cause."""
JOIN_WITHIN_S = 1.0
"""A Join that takes longer is sent again: the time it was on the way makes its process look younger to the shard. Two
processes that started within this time count as equally old."""
REPORT_EVERY_S = 0.02
"""Seconds between two reports of a learner; those of faster inner steps are combined."""
SLOWEST_BYTES_PER_S = 50_000
"""Slower transfers are ended and retried. It is 0.4 Mbit/s."""

FIRST_S, GROWTH, LONGEST_S = 0.2, 1.3, 2.0
"""Seconds before the first retry, the factor from one retry to the next, and the maximum in seconds (`backoff_s`)."""
AGAIN_S = FIRST_S
"""Seconds before a call that was answered BUSY is repeated, and between two checks of a caller that only waits."""


def call_s(num_bytes: int) -> float:
    return CALL_S + num_bytes / SLOWEST_BYTES_PER_S


def backoff_s(attempt: int, jitter: float) -> float:
    """Seconds before retry number `attempt` (from 0), with `jitter` drawn uniformly from [0, 1).

    The wait grows from 0.2 s to 2 s with the time that the shard has been away, to which it adds about a third: a
    learner notices on average half a wait later that a shard is back. Half of it is random, so that learners that lost
    the same shard do not come back in step.
    After 10 s of failures the wait is at least 1 s, so a learner connects at most once a second. It is at most 2 s: an
    attempt that began just before a link heals may be silent for 2.5 s, and the learner must be back 5 s after that.
    """
    longest = min(LONGEST_S, FIRST_S * GROWTH ** min(attempt, 32))
    return longest * (0.5 + 0.5 * jitter)
