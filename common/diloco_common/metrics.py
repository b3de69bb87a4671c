"""Every metric of shards and workers: names, help, labels and buckets stand here and nowhere else.

Names follow the Prometheus conventions (base units, `_total` for counters) and the glossary. Each process has
its own registry, because a worker may live in a process that has metrics of its own. Labels are bounded:
fragments, codes of errors.py, and learner ids, which the shard checks before they get here and forgets when
they are gone.

The methods are named after what happened; the gauges of one sort are set together.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector

PushOutcome = Literal["accepted", "duplicate", "late", "rejected", "failed"]
"""What became of a push: the four of the protocol, and "failed" for no answer."""
CloseReason = Literal["all", "grace", "lease"]
"""Why a round closed: all asked contributed, the grace window ended, all missing lost their leases."""
ComputePhase = Literal["inspect", "seed", "merge", "encode"]
"""What a shard's compute thread does: norms of what came in, version 0, merging up to the encoded version, and encoding
for an observer."""
SyncPhase = Literal["snapshot", "encode", "decode", "apply"]
"""What synchronisation computes on a learner."""

_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_STALL_SECONDS = (0.00001, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class ShardMetrics:
    """What a shard measures. Safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = registry = _new_registry()
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
            buckets=_COUNTS,
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
            buckets=_COUNTS,
            registry=registry,
        )
        self._round_seconds = Histogram(
            "diloco_shard_round_seconds",
            "From opening a round to announcing its version.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._quorum_seconds = Histogram(
            "diloco_shard_quorum_seconds",
            "From opening a round to its quorum.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._merge_seconds = Histogram(
            "diloco_shard_merge_seconds",
            "Merging contributions and taking the outer step.",
            buckets=_SECONDS,
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
            buckets=_SECONDS,
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

        _start_at_zero(self._learners, ("alive", "stalled"))
        _start_at_zero(self._compute_seconds, ("inspect", "seed", "merge", "encode"))
        _start_at_zero(self._contributions, ("accepted", "duplicate", "late"))
        _start_at_zero(self._rounds_closed, ("all", "grace", "lease"))
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

    def version(self, fragment: int, version: int) -> None:
        """A version that came by seeding or restoring, without a round."""
        self._version.labels(str(fragment)).set(version)

    def tokens(self, *, merged: int, budget: int) -> None:
        """`merged` is the whole of the run so far; what it was when the shard was restored counts too."""
        self._tokens_merged.inc(max(merged - self._tokens_merged_before, 0))
        self._tokens_merged_before = max(merged, self._tokens_merged_before)
        self._tokens_budget.set(budget)


class WorkerMetrics:
    """What a learner measures. Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.registry = registry = _new_registry()
        self._inner_steps = Counter("diloco_worker_inner_steps_total", "Inner steps taken.", registry=registry)
        self._tokens = Counter("diloco_worker_tokens_total", "Tokens trained on.", registry=registry)
        self._loss = Gauge("diloco_worker_loss", "Training loss of the last inner step.", registry=registry)
        self._loss.set(float("nan"))  # unknown is not zero
        self._step_seconds = Histogram(
            "diloco_worker_inner_step_seconds",
            "From the end of one inner step to the end of the next.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._stall_seconds = Histogram(
            "diloco_worker_sync_stall_seconds",
            "How long learner.step held the training loop.",
            buckets=_STALL_SECONDS,
            registry=registry,
        )

        self._pushes = Counter(
            "diloco_worker_pushes_total",
            "Pushes of contributions, by outcome; repeats count.",
            ["outcome"],
            registry=registry,
        )
        self._unmerged = Gauge(
            "diloco_worker_contributions_unmerged",
            "Contributions pushed, or waiting to be, that are in no version yet.",
            registry=registry,
        )
        self._tokens_carried = Counter(
            "diloco_worker_tokens_carried_total",
            "Tokens that missed a round and went on into a later one, averaged over fragments.",
            registry=registry,
        )
        self._pushed_bytes = Counter(
            "diloco_worker_pushed_bytes_total", "Payload bytes pushed; repeats count.", registry=registry
        )
        self._pulled_bytes = Counter("diloco_worker_pulled_bytes_total", "Payload bytes pulled.", registry=registry)
        self._encode_seconds = Histogram(
            "diloco_worker_encode_seconds",
            "Making and encoding one pseudo-gradient.",
            buckets=_SECONDS,
            registry=registry,
        )

        self._connected_shards = Gauge(
            "diloco_worker_connected_shards", "Shards where the learner holds a lease.", registry=registry
        )
        self._reconnects = Counter(
            "diloco_worker_reconnects_total", "Control streams opened after the first one.", registry=registry
        )
        self._version = Gauge(
            "diloco_worker_version",
            "Version that was applied last, by fragment.",
            ["fragment"],
            registry=registry,
        )
        self._version_age = Gauge(
            "diloco_worker_version_age_seconds",
            "Time since a version was applied, by fragment.",
            ["fragment"],
            registry=registry,
        )
        self._apply_seconds = Histogram(
            "diloco_worker_apply_seconds",
            "Laying one version under the learner's own progress.",
            buckets=_SECONDS,
            registry=registry,
        )

        self._sync_seconds = Counter(
            "diloco_worker_sync_seconds_total",
            "CPU time that synchronisation took, by what for; apply in the training thread.",
            ["phase"],
            registry=registry,
        )

        _start_at_zero(self._sync_seconds, ("snapshot", "encode", "decode", "apply"))
        _start_at_zero(self._pushes, ("accepted", "duplicate", "late", "rejected", "failed"))

    def stepped(self, *, tokens: int, seconds: float, loss: float | None) -> None:
        """One inner step ended."""
        self._inner_steps.inc()
        self._tokens.inc(tokens)
        self._step_seconds.observe(seconds)
        if loss is not None:
            self._loss.set(loss)

    def stalled(self, seconds: float) -> None:
        """learner.step returned after `seconds`."""
        self._stall_seconds.observe(seconds)

    def encoded(self, seconds: float) -> None:
        self._encode_seconds.observe(seconds)

    def pushed(self, outcome: PushOutcome, num_bytes: int) -> None:
        self._pushes.labels(outcome).inc()
        self._pushed_bytes.inc(num_bytes)

    def contributions_unmerged(self, count: int) -> None:
        self._unmerged.set(count)

    def carried(self, tokens: int | float) -> None:
        self._tokens_carried.inc(tokens)

    def pulled(self, num_bytes: int) -> None:
        self._pulled_bytes.inc(num_bytes)

    def applied(self, fragment: int, version: int, seconds: float) -> None:
        self._apply_seconds.observe(seconds)
        self._version.labels(str(fragment)).set(version)
        at = self._clock()
        self._version_age.labels(str(fragment)).set_function(lambda: self._clock() - at)

    def computed(self, phase: SyncPhase, cpu_seconds: float) -> None:
        self._sync_seconds.labels(phase).inc(cpu_seconds)

    def connected(self, shards: int) -> None:
        self._connected_shards.set(shards)

    def reconnected(self) -> None:
        self._reconnects.inc()


class _Registry(CollectorRegistry):
    """A registry without the `_created` series that the library adds to every counter and histogram."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _new_registry() -> CollectorRegistry:
    registry = _Registry()
    ProcessCollector(registry=registry)
    build = Gauge(
        "diloco_build_info",
        "Versions of this process; always 1.",
        ["version", "python", "torch", "grpcio"],
        registry=registry,
    )
    build.labels(
        _installed("decoupled-diloco"), platform.python_version(), _installed("torch"), _installed("grpcio")
    ).set(1)
    return registry


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _start_at_zero(metric: Counter | Gauge, values: tuple[str, ...]) -> None:
    """Rates and alerts need a series before its first event."""
    for value in values:
        metric.labels(value)
