"""What a shard measures."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from diloco_common.metrics.registry import COUNTS, SECONDS, Totals, new_registry, start_at_zero

CloseReason = Literal["all", "grace", "lease"]
"""Why a round closed: all asked contributed, the grace window ended, all missing lost their leases."""
ComputePhase = Literal["inspect", "seed", "merge", "encode"]
"""What a shard's compute thread does: norms of what came in, version 0, merging up to the encoded version, and encoding
for an observer."""
LearnerState = Literal["alive", "stalled", "evicted", "left"]
"""As in the core: evicted is one whose lease ran out, left one that said goodbye."""
LEARNER_STATES: tuple[LearnerState, ...] = get_args(LearnerState)

REJECTIONS = (
    "MANIFEST_MISMATCH", "UNKNOWN_FRAGMENT", "UNKNOWN_ENCODING", "NOT_SEEDED", "WRONG_EPOCH", "WRONG_ROUND",
    "TOO_STALE", "BAD_SIZE", "BAD_CHECKSUM", "BAD_ENCODING", "CONTRIBUTION_CONFLICT", "NOT_FINITE", "NORM_TOO_LARGE",
)  # fmt: skip
"""Codes of a rejected contribution, as docs/errors.md lists them."""


class ShardMetrics:
    """What a shard measures. Safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self._ready = Gauge("diloco_shard_ready", "1 while the shard can do its work.", registry=registry)
        self._epoch = Gauge("diloco_shard_epoch", "Restores of this shard.", registry=registry)
        self._settings = Gauge(
            "diloco_shard_settings", "Settings that alerts compare with, by name.", ["setting"], registry=registry
        )
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
        self._tokens = Totals(
            "diloco_shard_contributed_tokens_total",
            "Tokens of contributions, once per fragment, by fate: accepted ones end as merged or fenced (their learner "
            "lost its lease first); late, refused and fenced ones are carried on by a learner that lives.",
            ["fate"],
            registry,
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
        self._oldest_round = Gauge(
            "diloco_shard_oldest_round_seconds",
            "How long the open round that was opened first has been collecting; 0 without one.",
            registry=registry,
        )
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
        self._save_seconds = Histogram(
            "diloco_shard_save_seconds",
            "Making a version durable: writing, and waiting for the disk.",
            buckets=SECONDS,
            registry=registry,
        )
        self._saved_bytes = Counter(
            "diloco_shard_saved_bytes_total", "Bytes of versions made durable.", registry=registry
        )
        self._save_failures = Counter(
            "diloco_shard_save_failures_total",
            "Attempts to make a version durable that the disk refused; repeats count.",
            registry=registry,
        )
        self._checkpoint_version = Gauge(
            "diloco_shard_checkpoint_version", "The newest regular checkpoint of this life.", registry=registry
        )
        self._checkpoint_failures = Counter(
            "diloco_shard_checkpoint_failures_total",
            "Attempts to add to a regular checkpoint that failed; repeats count.",
            registry=registry,
        )
        self._versions_lost = Counter(
            "diloco_shard_versions_lost_total",
            "Announced versions that this shard came back without, as learners told that hold them.",
            registry=registry,
        )
        self._versions_not_durable = Gauge(
            "diloco_shard_versions_not_durable",
            "Versions that are computed but not on disk yet.",
            registry=registry,
        )
        self._disk_free = Gauge(
            "diloco_shard_disk_free_bytes",
            "Free space where versions are kept; NaN where they are kept in memory only.",
            registry=registry,
        )
        self._disk_free.set(float("nan"))  # unknown is not zero
        self._tokens_merged = Totals(
            "diloco_shard_tokens_merged_total",
            "Tokens merged in this run, averaged over the shard's fragments.",
            [],
            registry,
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
        self._learner_state = Gauge(
            "diloco_shard_learner_state",
            "1 for the state that the learner is in, 0 for the others.",
            ["learner", "state"],
            registry=registry,
        )
        self._states: dict[str, LearnerState] = {}
        self._learner_contributions = Totals(
            "diloco_shard_learner_contributions_total",
            "Contributions by learner and fate: asked for, contributed, merged.",
            ["learner", "fate"],
            registry,
        )

        start_at_zero(self._learners, ("alive", "stalled"))
        start_at_zero(self._compute_seconds, ("inspect", "seed", "merge", "encode"))
        start_at_zero(self._contributions, ("accepted", "duplicate", "late"))
        start_at_zero(self._rejected, REJECTIONS)
        start_at_zero(self._evictions, ("LEASE_EXPIRED", "STALLED"))
        start_at_zero(self._rounds_closed, ("all", "grace", "lease"))

    # The shard itself

    def ready(self, is_ready: bool) -> None:
        self._ready.set(is_ready)

    def epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def settings(self, settings: Mapping[str, float]) -> None:
        """By name, such as sync.quorum."""
        for name, value in settings.items():
            self._settings.labels(name).set(value)

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

    def learner_state(self, learner: str, state: LearnerState) -> None:
        if self._states.get(learner) != state:
            self._states[learner] = state
            for one in LEARNER_STATES:
                self._learner_state.labels(learner, one).set(one == state)

    def learner_contributions(self, learner: str, *, asked: int, contributed: int, merged: int) -> None:
        """Totals over all generations of the learner."""
        for fate, total in (("asked", asked), ("contributed", contributed), ("merged", merged)):
            self._learner_contributions.follow(total, learner, fate)

    def forget(self, learner: str) -> None:
        """Drop the series of a learner that has been gone for long. Repeating it is fine."""
        for gauge in self._per_learner:
            with contextlib.suppress(KeyError):
                gauge.remove(learner)
        if self._states.pop(learner, None):
            for state in LEARNER_STATES:
                self._learner_state.remove(learner, state)
        self._learner_contributions.forget(learner)

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

    def contributed_tokens(self, *, accepted: int, merged: int, late: int, refused: int, fenced: int) -> None:
        """Totals of this life of the shard."""
        fates = {"accepted": accepted, "merged": merged, "late": late, "refused": refused, "fenced": fenced}
        for fate, total in fates.items():
            self._tokens.follow(total, fate)

    def received(self, num_bytes: int) -> None:
        self._received.inc(num_bytes)

    def sent(self, num_bytes: int) -> None:
        self._sent.inc(num_bytes)

    # Rounds

    def open_rounds(self, count: int, *, oldest_s: float) -> None:
        """`oldest_s` since the first of them was opened."""
        self._open_rounds.set(count)
        self._oldest_round.set(oldest_s)

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

    def saved(self, num_bytes: int, seconds: float) -> None:
        """A version is durable."""
        self._saved_bytes.inc(num_bytes)
        self._save_seconds.observe(seconds)

    def save_failed(self) -> None:
        self._save_failures.inc()

    def checkpointed(self, version: int) -> None:
        """A regular checkpoint is whole."""
        self._checkpoint_version.set(version)

    def checkpoint_failed(self) -> None:
        self._checkpoint_failures.inc()

    def versions_lost(self, count: int) -> None:
        self._versions_lost.inc(count)

    def versions_not_durable(self, count: int) -> None:
        self._versions_not_durable.set(count)

    def disk_free(self, num_bytes: int) -> None:
        self._disk_free.set(num_bytes)

    def version(self, fragment: int, version: int) -> None:
        """A version that came by seeding or restoring, without a round."""
        self._version.labels(str(fragment)).set(version)

    def tokens(self, *, merged: int, budget: int) -> None:
        """`merged` is the whole of the run so far; what it was when the shard was restored counts too."""
        self._tokens_merged.follow(merged)
        self._tokens_budget.set(budget)
