"""What a learner measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from diloco_common.metrics.registry import SECONDS, new_registry, start_at_zero

PushOutcome = Literal["accepted", "duplicate", "late", "rejected", "failed"]
"""What became of a push: the four of the protocol, and "failed" for no answer."""
SyncPhase = Literal["snapshot", "encode", "decode", "apply"]
"""What synchronisation computes on a learner."""

_STALL_SECONDS = (0.00001, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class WorkerMetrics:
    """What a learner measures. Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.registry = registry = new_registry()
        self._inner_steps = Counter("diloco_worker_inner_steps_total", "Inner steps taken.", registry=registry)
        self._tokens = Counter("diloco_worker_tokens_total", "Tokens trained on.", registry=registry)
        self._loss = Gauge("diloco_worker_loss", "Training loss of the last inner step.", registry=registry)
        self._loss.set(float("nan"))  # unknown is not zero
        self._step_seconds = Histogram(
            "diloco_worker_inner_step_seconds",
            "From the end of one inner step to the end of the next.",
            buckets=SECONDS,
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
            buckets=SECONDS,
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
            buckets=SECONDS,
            registry=registry,
        )

        self._sync_seconds = Counter(
            "diloco_worker_sync_seconds_total",
            "CPU time that synchronisation took, by what for; snapshot and apply in the training thread.",
            ["phase"],
            registry=registry,
        )

        start_at_zero(self._sync_seconds, ("snapshot", "encode", "decode", "apply"))
        start_at_zero(self._pushes, ("accepted", "duplicate", "late", "rejected", "failed"))

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
