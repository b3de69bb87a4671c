"""The traffic of a shard: contributions, the fate of their tokens, and payload bytes."""

from __future__ import annotations

from diloco_common.metrics.registry import COUNTS, Declare, start_at_zero

REJECTIONS = (
    "MANIFEST_MISMATCH", "UNKNOWN_FRAGMENT", "UNKNOWN_ENCODING", "NOT_SEEDED", "WRONG_EPOCH", "WRONG_ROUND",
    "TOO_STALE", "BAD_SIZE", "BAD_CHECKSUM", "BAD_ENCODING", "CONTRIBUTION_CONFLICT", "NOT_FINITE", "NORM_TOO_LARGE",
    "QUARANTINED", "IMPLAUSIBLE",
)  # fmt: skip
"""Codes of a rejected contribution, as docs/errors.md lists them."""


class Contributions:
    """Contributions and versions on the wire."""

    def __init__(self, declare: Declare) -> None:
        self._contributions = declare.counter(
            "diloco_shard_contributions_total", "Contributions that arrived whole and valid, by outcome.", "outcome"
        )
        self._rejected = declare.counter(
            "diloco_shard_contributions_rejected_total", "Contributions that a guard refused, by code.", "code"
        )
        self._tokens = declare.totals(
            "diloco_shard_contributed_tokens_total",
            "Tokens of contributions, once per fragment, by fate. Accepted tokens end as merged, or as fenced if their "
            "learner lost its lease first. A live learner carries late, refused and fenced tokens on.",
            "fate",
        )
        self._staleness = declare.histogram(
            "diloco_shard_staleness_versions", "Latest version minus base version of accepted contributions.", COUNTS
        )
        self._received = declare.counter(
            "diloco_shard_received_bytes_total", "Payload bytes of contributions and seeds."
        )
        self._sent = declare.counter("diloco_shard_sent_bytes_total", "Payload bytes of versions.")
        start_at_zero(self._contributions, ("accepted", "duplicate", "late"))
        start_at_zero(self._rejected, REJECTIONS)

    def accepted(self, *, staleness: int) -> None:
        self._contributions.labels("accepted").inc()
        self._staleness.observe(staleness)

    def duplicate(self) -> None:
        self._contributions.labels("duplicate").inc()

    def late(self) -> None:
        self._contributions.labels("late").inc()

    def rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def tokens(self, *, accepted: int, merged: int, late: int, refused: int, fenced: int) -> None:
        """Totals of this process."""
        fates = {"accepted": accepted, "merged": merged, "late": late, "refused": refused, "fenced": fenced}
        for fate, total in fates.items():
            self._tokens.follow(total, fate)

    def received(self, num_bytes: int) -> None:
        self._received.inc(num_bytes)

    def sent(self, num_bytes: int) -> None:
        self._sent.inc(num_bytes)
