"""Metrics of processes in which everything has happened."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from certificates import Certificates
from diloco_common.observe.metrics import ShardMetrics, WorkerMetrics
from diloco_common.trust.tls import TlsFiles, read_folder


def busy_shard() -> ShardMetrics:
    m = ShardMetrics()
    itself, learners, contributions, rounds, storage = m.itself, m.learners, m.contributions, m.rounds, m.storage
    itself.ready.set(1)
    itself.epoch.set(2)
    itself.call_refused("NOT_JOINED")
    itself.settings({"sync.quorum": 2})
    itself.tokens_merged.follow(5000)
    itself.tokens_budget.set(10_000)
    m.certificates.follow(certificate)
    learners.joins.follow(1)
    learners.evictions.follow(1, "LEASE_EXPIRED")
    learners.live(alive=3, stalled=1)
    learners.state("worker-1", "stalled")
    learners.contributions.follow_all({"asked": 5, "contributed": 4, "merged": 3}, "worker-1")
    learners.left_outs.follow(1)
    of_learner = {
        learners.inner_step: 10, learners.tokens: 1000, learners.step_seconds: 0.25, learners.loss: 2.5,
        learners.silent: 0.5, learners.left_out: 1, learners.kept: 0.5, learners.cosine: 0.2,
    }  # fmt: skip
    for gauge, value in of_learner.items():
        gauge.labels("worker-1").set(value)
    contributions.tokens.follow_all({"accepted": 900, "merged": 800, "late": 30, "refused": 20, "fenced": 10})
    contributions.staleness.observe(1)
    contributions.outcomes.follow_all({"accepted": 1, "duplicate": 1, "late": 1})
    contributions.rejected.follow(1, "NOT_FINITE")
    contributions.received.follow(100)
    contributions.sent.follow(200)
    rounds.open.set(4)
    rounds.oldest.set(2.5)
    rounds.grace.set(0.75)
    rounds.quorum_seconds.observe(0.1)
    rounds.closed.follow(1, "grace")
    rounds.participants.observe(2)
    rounds.merge_seconds.observe(0.02)
    rounds.round_seconds.observe(1.5)
    rounds.version(3, 7)
    storage.saved_bytes.follow(4096)
    storage.save_seconds.observe(0.05)
    storage.standby_wait_seconds.observe(0.01)
    storage.save_failures.inc()
    storage.versions_lost.follow(2)
    storage.not_durable.set(3)
    storage.disk_free.set(10_000_000)
    return m


@cache
def certificate() -> TlsFiles:
    """Of somebody, for ninety days."""
    with tempfile.TemporaryDirectory() as folder:
        return read_folder(Certificates(Path(folder)).issue("learner/worker-1", days=90.0))


def busy_worker(now: float = 0.0) -> WorkerMetrics:
    m = WorkerMetrics(clock=lambda: now)
    m.certificates.follow(certificate)
    m.training.begun("worker-1")
    m.training.stepped(tokens=1024, seconds=0.25, loss=2.5)
    m.training.stall_seconds.observe(0.0002)
    m.exchange.encode_seconds.observe(0.01)
    m.exchange.pushed("accepted", 500)
    m.exchange.unmerged.set(2)
    m.exchange.tokens_carried.inc(64)
    m.exchange.pulled_bytes.inc(700)
    m.exchange.applied(3, 7, 0.004)
    m.exchange.connected_shards.set(2)
    m.exchange.reconnects.inc()
    return m
