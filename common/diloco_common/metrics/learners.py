"""The learners of one shard and how each is doing. This covers learners that Prometheus cannot reach."""

from __future__ import annotations

import contextlib
from typing import Literal, get_args

from diloco_common.metrics.registry import Declare, start_at_zero

LearnerState = Literal["alive", "stalled", "evicted", "left"]
"""As in the core. Evicted: the lease ran out. Left: the learner said goodbye."""
LEARNER_STATES: tuple[LearnerState, ...] = get_args(LearnerState)


class Learners:
    """Learners as one shard sees them."""

    def __init__(self, declare: Declare) -> None:
        self._learners = declare.gauge(
            "diloco_shard_learners",
            'Learners with a lease. "alive" counts all; "stalled" counts those that send heartbeats but end no step.',
            "state",
        )
        self._joins = declare.counter("diloco_shard_joins_total", "Leases given.")
        self._evictions = declare.counter("diloco_shard_evictions_total", "Leases ended by the shard, by code.", "code")

        self._learner_inner_step = declare.gauge(
            "diloco_shard_learner_inner_step", "Inner steps the learner has taken.", "learner"
        )
        self._learner_tokens = declare.gauge(
            "diloco_shard_learner_tokens", "Tokens the learner has trained on.", "learner"
        )
        self._learner_step_seconds = declare.gauge(
            "diloco_shard_learner_step_seconds", "Moving average of the seconds per inner step.", "learner"
        )
        self._learner_loss = declare.gauge(
            "diloco_shard_learner_loss", "Training loss of the learner's last step.", "learner"
        )
        self._learner_silent = declare.gauge(
            "diloco_shard_learner_silent_seconds", "Time since the learner's last message.", "learner"
        )
        self._learner_quarantined = declare.gauge(
            "diloco_shard_learner_quarantined", "1 while the learner is left out for its outliers.", "learner"
        )
        self._quarantines = declare.counter(
            "diloco_shard_quarantines_total", "Learners left out because of their outliers; repeats count."
        )
        self._per_learner = (
            self._learner_quarantined,
            self._learner_inner_step,
            self._learner_tokens,
            self._learner_step_seconds,
            self._learner_loss,
            self._learner_silent,
        )
        self._learner_state = declare.gauge(
            "diloco_shard_learner_state",
            "1 for the state of the learner, 0 for the other states.",
            "learner",
            "state",
        )
        self._states: dict[str, LearnerState] = {}
        self._learner_contributions = declare.totals(
            "diloco_shard_learner_contributions_total",
            "Contributions by learner and fate: asked for, contributed, merged.",
            "learner",
            "fate",
        )
        start_at_zero(self._learners, ("alive", "stalled"))
        start_at_zero(self._evictions, ("LEASE_EXPIRED", "STALLED"))

    def joined(self) -> None:
        self._joins.inc()

    def evicted(self, code: str) -> None:
        self._evictions.labels(code).inc()

    def live(self, *, alive: int, stalled: int) -> None:
        """`alive` includes the stalled learners."""
        self._learners.labels("alive").set(alive)
        self._learners.labels("stalled").set(stalled)

    def progress(self, learner: str, *, inner_step: int, tokens: int, step_seconds: float, loss: float | None) -> None:
        self._learner_inner_step.labels(learner).set(inner_step)
        self._learner_tokens.labels(learner).set(tokens)
        self._learner_step_seconds.labels(learner).set(step_seconds)
        if loss is not None:
            self._learner_loss.labels(learner).set(loss)

    def silent(self, learner: str, seconds: float) -> None:
        self._learner_silent.labels(learner).set(seconds)

    def state(self, learner: str, state: LearnerState) -> None:
        if self._states.get(learner) != state:
            self._states[learner] = state
            for one in LEARNER_STATES:
                self._learner_state.labels(learner, one).set(one == state)

    def quarantined(self, learner: str, *, is_so: bool) -> None:
        self._learner_quarantined.labels(learner).set(is_so)

    def put_in_quarantine(self) -> None:
        self._quarantines.inc()

    def contributions(self, learner: str, *, asked: int, contributed: int, merged: int) -> None:
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
