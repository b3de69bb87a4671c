"""Calls to a shard: their time limits, waits between retries, and reading the answer to a Pull."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from diloco_common.codec import Chunk, Payload, PayloadReceiver
from diloco_common.errors import BadRequest
from diloco_common.wire.messages import SLOWEST_BYTES_PER_S, PullHeader, PullRequest

SILENCE_HEARTBEATS = 2.5
"""A shard silent for this many heartbeats is frozen or cut off: dial again."""
CALL_S = 15.0
"""Seconds for a call apart from its bytes."""
SAY_EVERY_S = 10.0
"""Seconds between two log lines about the same thing that lasts."""
LONG_S = 60.0
"""What has lasted for so many seconds is no hiccup: it is said, or nobody waits for it any longer."""
SETTLE_S = 5.0
"""Seconds for pushes in flight to be answered when a learner ends."""
HURRY_S = SETTLE_S / 10
"""Like `SETTLE_S`, for whoever is in a hurry: after Ctrl-C, for example."""

FIRST_S = 0.2
GROWTH = 1.3
LONGEST_S = 2.0
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


async def read_version(
    answer: AsyncGenerator[PullHeader | Chunk, None], request: PullRequest, num_elements: int,
    heard: Callable[[], None] = lambda: None,
) -> tuple[PullHeader, Payload | None]:  # fmt: skip
    """Read the answer to a Pull, and close it; no payload if the caller already has that version.

    `heard` is called for the header and for each chunk. Raises Unavailable, or a Refusal of the call or of the answer.
    """
    async with aclosing(answer) as parts:
        header = await anext(parts, None)
        if not isinstance(header, PullHeader):
            raise BadRequest("the shard answered Pull without a header")
        if header.fragment_id != request.fragment_id:
            raise BadRequest(f"the shard answered with fragment {header.fragment_id}, not {request.fragment_id}")
        heard()
        if header.payload is None:
            return header, None
        if header.payload.num_elements != num_elements:
            raise BadRequest(
                f"fragment {header.fragment_id} has {header.payload.num_elements} elements, not {num_elements}"
            )
        have = request.have[1] if request.have is not None else None
        if header.base_version is not None and header.base_version != have:
            raise BadRequest(
                f"fragment {header.fragment_id} came as a change since version {header.base_version}, "
                "which is not what was asked for"
            )
        receiver = PayloadReceiver(header.payload)
        async for part in parts:
            if isinstance(part, PullHeader):
                raise BadRequest("the shard answered Pull with two headers")
            receiver.add(part)
            heard()
        return header, receiver.finish()
