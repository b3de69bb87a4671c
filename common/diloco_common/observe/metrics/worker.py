"""All metrics of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from diloco_common.observe.metrics import SECONDS, Certificates, Declare, MetricsRegistry

PushOutcome = Literal["accepted", "duplicate", "late", "rejected", "failed"]
"""The four answers of the protocol, and "failed" for no answer."""
SyncPhase = Literal["snapshot", "encode", "decode", "apply"]
"""The work that synchronization causes on a learner."""


class Training:
    """The training loop, and the cost of synchronization for it."""

    def __init__(self, declare: Declare) -> None:
        self._learner = declare.gauge("diloco_worker_learner", "Names the learner; always 1.", "learner")
        self.inner_steps = declare.counter("diloco_worker_inner_steps_total", "Inner steps taken.")
        self.tokens = declare.counter("diloco_worker_tokens_total", "Tokens trained on.")
        self.loss = declare.gauge("diloco_worker_loss", "Training loss of the last inner step.")
        self.loss.set(float("nan"))  # unknown is not zero
        self.step_seconds = declare.histogram(
            "diloco_worker_inner_step_seconds", "From the end of one inner step to the end of the next.", SECONDS
        )
        self.stall_seconds = declare.histogram(
            "diloco_worker_sync_stall_seconds",
            "How long learner.step took.",
            (0.00001, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
        )
        self._sync_seconds = declare.counter(
            "diloco_worker_sync_seconds_total",
            "CPU time of synchronization. The phases snapshot and apply run in the training thread.",
            "phase",
        )
        for phase in get_args(SyncPhase):
            self.computed(phase, 0.0)

    def begun(self, learner: str) -> None:
        self._learner.labels(learner).set(1)

    def stepped(self, *, tokens: int, seconds: float, loss: float | None) -> None:
        self.inner_steps.inc()
        self.tokens.inc(tokens)
        self.step_seconds.observe(seconds)
        if loss is not None:
            self.loss.set(loss)

    def computed(self, phase: SyncPhase, cpu_seconds: float) -> None:
        self._sync_seconds.labels(phase).inc(cpu_seconds)


class ExchangeMetrics:
    """Contributions sent, versions received, and connections."""

    def __init__(self, declare: Declare, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pushes = declare.counter(
            "diloco_worker_pushes_total", "Pushes of contributions, with repeats.", "outcome"
        )
        self.unmerged = declare.gauge(
            "diloco_worker_contributions_unmerged",
            "Contributions that are in no version yet.",
        )
        self.tokens_carried = declare.counter(
            "diloco_worker_tokens_carried_total",
            "Tokens carried into a later round, averaged over fragments.",
        )
        self._pushed_bytes = declare.counter("diloco_worker_pushed_bytes_total", "Payload bytes pushed, with repeats.")
        self.pulled_bytes = declare.counter("diloco_worker_pulled_bytes_total", "Payload bytes pulled.")
        self.near_bytes = declare.counter("diloco_worker_near_bytes_total", "Of these, from a mirror of its site.")
        self.encode_seconds = declare.histogram(
            "diloco_worker_encode_seconds", "Time to make and encode one pseudo-gradient.", SECONDS
        )
        self._version = declare.gauge("diloco_worker_version", "Version applied last, by fragment.", "fragment")
        self._version_age = declare.gauge(
            "diloco_worker_version_age_seconds", "Time since the last version was applied, by fragment.", "fragment"
        )
        self._apply_seconds = declare.histogram("diloco_worker_apply_seconds", "Time to apply one version.", SECONDS)
        self.connected_shards = declare.gauge(
            "diloco_worker_connected_shards", "Shards where the learner holds a lease."
        )
        self.reconnects = declare.counter("diloco_worker_reconnects_total", "Control streams opened after the first.")
        for outcome in get_args(PushOutcome):
            self._pushes.labels(outcome)

    def pushed(self, outcome: PushOutcome, num_bytes: int) -> None:
        self._pushes.labels(outcome).inc()
        self._pushed_bytes.inc(num_bytes)

    def applied(self, fragment: int, version: int, seconds: float) -> None:
        self._apply_seconds.observe(seconds)
        self._version.labels(str(fragment)).set(version)
        at = self._clock()
        self._version_age.labels(str(fragment)).set_function(lambda: self._clock() - at)


class WorkerMetrics:
    """All metrics of a worker. Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = MetricsRegistry()
        declare = Declare(self.registry)
        self.training = Training(declare)
        self.exchange = ExchangeMetrics(declare, clock)
        self.certificates = Certificates(declare)
