"""Rounds, their cost in CPU time, and the versions they make."""

from __future__ import annotations

from typing import Literal, get_args

from diloco_common.metrics.registry import COUNTS, SECONDS, Declare, start_at_zero

CloseReason = Literal["all", "grace", "lease"]
"""Why a round closed: all asked contributed, the grace window ended, all missing lost their leases."""
ComputePhase = Literal["inspect", "seed", "merge", "encode"]
"""Work of the compute thread: norms of contributions, version 0, merging up to the encoded version, and encoding for an
observer."""


class Rounds:
    """Rounds, from opening to version."""

    def __init__(self, declare: Declare) -> None:
        self._open_rounds = declare.gauge("diloco_shard_open_rounds", "Rounds that are collecting contributions.")
        self._oldest_round = declare.gauge(
            "diloco_shard_oldest_round_seconds",
            "Age of the oldest open round; 0 if none is open.",
        )
        self._grace_seconds = declare.gauge("diloco_shard_grace_seconds", "Grace window of the newest round.")
        self._quorum_seconds = declare.histogram(
            "diloco_shard_quorum_seconds", "From opening a round to its quorum.", SECONDS
        )
        self._rounds_closed = declare.counter(
            "diloco_shard_rounds_closed_total",
            "Rounds closed, by reason: all contributed, the grace window ended, or the missing lost their leases.",
            "why",
        )
        self._participants = declare.histogram(
            "diloco_shard_round_participants", "Contributions merged per round.", COUNTS
        )
        self._merge_seconds = declare.histogram(
            "diloco_shard_merge_seconds", "Merging contributions and taking the outer step.", SECONDS
        )
        self._compute_seconds = declare.counter(
            "diloco_shard_compute_seconds_total", "CPU time of the compute thread, by phase.", "phase"
        )
        self._round_seconds = declare.histogram(
            "diloco_shard_round_seconds", "From opening a round to announcing its version.", SECONDS
        )
        self._version = declare.gauge("diloco_shard_version", "Latest version, by fragment.", "fragment")
        start_at_zero(self._rounds_closed, get_args(CloseReason))
        start_at_zero(self._compute_seconds, get_args(ComputePhase))

    def open(self, count: int, *, oldest_s: float) -> None:
        """`oldest_s`: age of the oldest one."""
        self._open_rounds.set(count)
        self._oldest_round.set(oldest_s)

    def grace(self, seconds: float) -> None:
        self._grace_seconds.set(seconds)

    def quorum_reached(self, seconds: float) -> None:
        """`seconds` since the round was opened."""
        self._quorum_seconds.observe(seconds)

    def closed(self, why: CloseReason, participants: int) -> None:
        self._rounds_closed.labels(why).inc()
        self._participants.observe(participants)

    def merged(self, seconds: float) -> None:
        self._merge_seconds.observe(seconds)

    def computed(self, phase: ComputePhase, cpu_seconds: float) -> None:
        self._compute_seconds.labels(phase).inc(cpu_seconds)

    def committed(self, fragment: int, version: int, seconds: float) -> None:
        """`seconds` since the round was opened."""
        self.version(fragment, version)
        self._round_seconds.observe(seconds)

    def version(self, fragment: int, version: int) -> None:
        """A version that came from a seed or from disk, without a round."""
        self._version.labels(str(fragment)).set(version)
