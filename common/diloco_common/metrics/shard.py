"""All metrics of a shard. Most groups have a file of their own."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_common.metrics.certificates import Certificates
from diloco_common.metrics.contributions import Contributions
from diloco_common.metrics.learners import Learners
from diloco_common.metrics.registry import Declare, new_registry
from diloco_common.metrics.rounds import Rounds
from diloco_common.metrics.storage import Storage


class Itself:
    """The shard and its part of the run."""

    def __init__(self, declare: Declare) -> None:
        self._ready = declare.gauge("diloco_shard_ready", "1 while the shard is ready.")
        self._epoch = declare.gauge("diloco_shard_epoch", "Epoch of this shard.")
        self._settings = declare.gauge("diloco_shard_settings", "Settings that alerts compare with.", "setting")
        self._refused_calls = declare.counter("diloco_shard_refused_calls_total", "Calls refused, by code.", "code")
        self._tokens_merged = declare.totals(
            "diloco_shard_tokens_merged_total", "Tokens merged in this run, averaged over the shard's fragments."
        )
        self._tokens_budget = declare.gauge(
            "diloco_shard_tokens_budget", "Merged tokens at which the run ends; 0 for a run without end."
        )

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

    def tokens(self, *, merged: int, budget: int) -> None:
        """`merged` counts the whole run, including the time before a restart."""
        self._tokens_merged.follow(merged)
        self._tokens_budget.set(budget)


class ShardMetrics:
    """All metrics of a shard. Safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = new_registry()
        declare = Declare(self.registry)
        self.itself = Itself(declare)
        self.certificates = Certificates(declare)
        self.learners = Learners(declare)
        self.contributions = Contributions(declare)
        self.rounds = Rounds(declare)
        self.storage = Storage(declare)
