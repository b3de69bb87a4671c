"""What a shard measures."""

from __future__ import annotations

import contextlib
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from diloco_common.metrics.registry import COUNTS, SECONDS, new_registry, start_at_zero

CloseReason = Literal["all", "grace", "lease"]
"""Why a round closed: all asked contributed, the grace window ended, all missing lost their leases."""
ComputePhase = Literal["inspect", "seed", "merge", "save", "encode"]
"""What a shard's compute thread does: norms of what came in, version 0, merging up to the encoded version, making it
durable, and encoding for an observer."""


class ShardMetrics:
    """What a shard measures. Safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self._ready = Gauge("diloco_shard_ready", "1 while the shard can do its work.", registry=registry)
        self._epoch = Gauge("diloco_shard_epoch", "Restores of this shard.", registry=registry)
        self._learners = Gauge(
            "diloco_shard_learners",
            'Learners with a lease: "alive" are all, "stalled" those that send heartbeats but end no step.',
            ["state"],
            registry=registry,
        )
        self._joins = Counter("diloco_shard_joins_total", "Leases given.", registry=registry)
        self._evictions = Counter(
            "diloco_shard_evictions_total", "Leases ended by the shard, by code.", ["code"], registry=registry
        )
        self._refused_calls = Counter(
            "diloco_shard_refused_calls_total", "Calls refused, by code.", ["code"], registry=registry
        )

        self._contributions = Counter(
            "diloco_shard_contributions_total",
            "Contributions that came whole and valid, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._rejected = Counter(
            "diloco_shard_contributions_rejected_total",
            "Contributions that a guard refused, by code.",
            ["code"],
            registry=registry,
        )
        self._staleness = Histogram(
            "diloco_shard_staleness_versions",
            "Latest version minus base version of accepted contributions.",
            buckets=COUNTS,
            registry=registry,
        )
        self._received = Counter(
            "diloco_shard_received_bytes_total",
            "Payload bytes of contributions and seeds.",
            registry=registry,
        )
        self._sent = Counter("diloco_shard_sent_bytes_total", "Payload bytes of versions.", registry=registry)

        self._open_rounds = Gauge("diloco_shard_open_rounds", "Rounds collecting contributions.", registry=registry)
        self._rounds_closed = Counter(
            "diloco_shard_rounds_closed_total",
            "Rounds closed: all asked contributed, the grace window ended, or the missing lost their leases.",
            ["why"],
            registry=registry,
        )
        self._participants = Histogram(
            "diloco_shard_round_participants",
            "Contributions merged per round.",
            buckets=COUNTS,
            registry=registry,
        )
        self._round_seconds = Histogram(
            "diloco_shard_round_seconds",
            "From opening a round to announcing its version.",
            buckets=SECONDS,
            registry=registry,
        )
        self._quorum_seconds = Histogram(
            "diloco_shard_quorum_seconds",
            "From opening a round to its quorum.",
            buckets=SECONDS,
            registry=registry,
        )
        self._merge_seconds = Histogram(
            "diloco_shard_merge_seconds",
            "Merging contributions and taking the outer step.",
            buckets=SECONDS,
            registry=registry,
        )
        self._compute_seconds = Counter(
            "diloco_shard_compute_seconds_total",
            "CPU time of the compute thread, by what for.",
            ["phase"],
            registry=registry,
        )
        self._grace_seconds = Gauge(
            "diloco_shard_grace_seconds",
            "Grace window of the round that was opened last.",
            registry=registry,
        )
        self._version = Gauge("diloco_shard_version", "Latest version, by fragment.", ["fragment"], registry=registry)
        self._tokens_merged = Counter(
            "diloco_shard_tokens_merged_total",
            "Tokens merged in this run, averaged over the shard's fragments.",
            registry=registry,
        )
        self._tokens_budget = Gauge(
            "diloco_shard_tokens_budget",
            "Merged tokens at which the run ends; 0 without end.",
            registry=registry,
        )

        def per_learner(name: str, what: str) -> Gauge:
            return Gauge(f"diloco_shard_learner_{name}", what, ["learner"], registry=registry)

        self._learner_inner_step = per_learner("inner_step", "Inner steps the learner has taken.")
        self._learner_tokens = per_learner("tokens", "Tokens the learner has trained on.")
        self._learner_step_seconds = per_learner("step_seconds", "Moving average of seconds per inner step.")
        self._learner_loss = per_learner("loss", "Training loss of the learner's last step.")
        self._learner_silent = per_learner("silent_seconds", "Time since the learner's last message.")
        self._per_learner = (
            self._learner_inner_step,
            self._learner_tokens,
            self._learner_step_seconds,
            self._learner_loss,
            self._learner_silent,
        )

        start_at_zero(self._learners, ("alive", "stalled"))
        start_at_zero(self._compute_seconds, ("inspect", "seed", "merge", "save", "encode"))
        start_at_zero(self._contributions, ("accepted", "duplicate", "late"))
        start_at_zero(self._rounds_closed, ("all", "grace", "lease"))
        self._tokens_merged_before = 0

    # The shard itself

    def ready(self, is_ready: bool) -> None:
        self._ready.set(is_ready)

    def epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def call_refused(self, code: str) -> None:
        self._refused_calls.labels(code).inc()

    # Learners

    def learner_joined(self) -> None:
        self._joins.inc()

    def learner_evicted(self, code: str) -> None:
        self._evictions.labels(code).inc()

    def learners(self, *, alive: int, stalled: int) -> None:
        """`alive` counts the stalled ones too."""
        self._learners.labels("alive").set(alive)
        self._learners.labels("stalled").set(stalled)

    def learner_progress(
        self, learner: str, *, inner_step: int, tokens: int, step_seconds: float, loss: float | None
    ) -> None:
        self._learner_inner_step.labels(learner).set(inner_step)
        self._learner_tokens.labels(learner).set(tokens)
        self._learner_step_seconds.labels(learner).set(step_seconds)
        if loss is not None:
            self._learner_loss.labels(learner).set(loss)

    def learner_silent(self, learner: str, seconds: float) -> None:
        self._learner_silent.labels(learner).set(seconds)

    def forget(self, learner: str) -> None:
        """Drop the series of a learner that has been gone for long. Repeating it is fine."""
        for gauge in self._per_learner:
            with contextlib.suppress(KeyError):
                gauge.remove(learner)

    # Contributions and versions on the wire

    def contribution_accepted(self, *, staleness: int) -> None:
        self._contributions.labels("accepted").inc()
        self._staleness.observe(staleness)

    def contribution_duplicate(self) -> None:
        self._contributions.labels("duplicate").inc()

    def contribution_late(self) -> None:
        self._contributions.labels("late").inc()

    def contribution_rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def received(self, num_bytes: int) -> None:
        self._received.inc(num_bytes)

    def sent(self, num_bytes: int) -> None:
        self._sent.inc(num_bytes)

    # Rounds

    def open_rounds(self, count: int) -> None:
        self._open_rounds.set(count)

    def grace(self, seconds: float) -> None:
        self._grace_seconds.set(seconds)

    def quorum_reached(self, seconds: float) -> None:
        """`seconds` since the round was opened."""
        self._quorum_seconds.observe(seconds)

    def round_closed(self, why: CloseReason, participants: int) -> None:
        self._rounds_closed.labels(why).inc()
        self._participants.observe(participants)

    def merged(self, seconds: float) -> None:
        self._merge_seconds.observe(seconds)

    def computed(self, phase: ComputePhase, cpu_seconds: float) -> None:
        self._compute_seconds.labels(phase).inc(cpu_seconds)

    def version_committed(self, fragment: int, version: int, seconds: float) -> None:
        """`seconds` since the round was opened."""
        self.version(fragment, version)
        self._round_seconds.observe(seconds)

    def version(self, fragment: int, version: int) -> None:
        """A version that came by seeding or restoring, without a round."""
        self._version.labels(str(fragment)).set(version)

    def tokens(self, *, merged: int, budget: int) -> None:
        """`merged` is the whole of the run so far; what it was when the shard was restored counts too."""
        self._tokens_merged.inc(max(merged - self._tokens_merged_before, 0))
        self._tokens_merged_before = max(merged, self._tokens_merged_before)
        self._tokens_budget.set(budget)
