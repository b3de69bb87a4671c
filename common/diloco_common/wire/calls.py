"""The times that several parts share: of calls, retries, looks, reports and goodbyes."""

from __future__ import annotations

SILENCE_HEARTBEATS = 2.5
"""A shard silent for this many heartbeats is frozen or cut off: dial again."""
CALL_S = 15.0
"""Seconds for a call apart from its bytes."""
SAY_EVERY_S = 10.0
"""Seconds between two lines about the same thing that lasts; what is shorter is not reported."""
LONG_S = 60.0
"""What has lasted for so many seconds is no hiccup: it is said, or nobody waits for it any longer."""
SETTLE_S = 5.0
"""Seconds for what is in flight to end: pushes of a learner that leaves, merges of a shard that does."""
HURRY_S = SETTLE_S / 10
"""Like `SETTLE_S`, for whoever is in a hurry: after Ctrl-C, for example."""
NOTICE_S = 30.0
"""Seconds of warning that a reclaimed machine gets; every goodbye fits within them."""
END_S = NOTICE_S + SETTLE_S
"""Seconds for a process to end after SIGTERM, before it is killed."""
DIAL_S = 2.0
"""Seconds to wait for the other side of a handshake; also the first pause between two searches for a cause."""
JOIN_WITHIN_S = 1.0
"""A Join that takes longer is sent again: its process looks younger to the shard, by the time that it was on the way.
Two processes that started within this time count as equally old."""
REPORT_EVERY_S = 0.02
"""Seconds between two reports of a learner; those of faster inner steps are combined."""
SLOWEST_BYTES_PER_S = 50_000
"""Slower transfers are ended and retried. 0.4 Mbit/s."""

FIRST_S, GROWTH, LONGEST_S = 0.2, 1.3, 2.0
"""Seconds before the first retry, how many times as long before each further one, and at most (`backoff_s`)."""
AGAIN_S = FIRST_S
"""Seconds before a call that was answered BUSY is repeated, and between two looks of who waits for nothing else."""


def call_s(num_bytes: int) -> float:
    return CALL_S + num_bytes / SLOWEST_BYTES_PER_S


def backoff_s(attempt: int, jitter: float) -> float:
    """Seconds before retry number `attempt` (from 0), with `jitter` drawn uniformly from [0, 1).

    Grows from 0.2 s to 2 s with the time that the shard has been away: it is at most a third of that time, so on
    average a learner notices a shard that is back half of that later. Half of it is random, so that learners that lost
    the same shard do not come back in step.
    After 10 s of failures the wait is at least 1 s, so at most one connect per second. It is at most 2 s, since a dial
    that began just before a link healed may be silent for 2.5 s, and the learner must be back 5 s after healing.
    """
    longest = min(LONGEST_S, FIRST_S * GROWTH ** min(attempt, 32))
    return longest * (0.5 + 0.5 * jitter)
