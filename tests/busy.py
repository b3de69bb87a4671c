"""Metrics of processes in which everything has happened."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from certificates import Certificates
from diloco_common.metrics import ShardMetrics, WorkerMetrics
from diloco_common.tls import TlsFiles, read_folder


def busy_shard() -> ShardMetrics:
    m = ShardMetrics()
    m.itself.ready(True)
    m.itself.epoch(2)
    m.certificates.follow(certificate)
    m.itself.call_refused("NOT_JOINED")
    m.learners.joined()
    m.learners.evicted("LEASE_EXPIRED")
    m.learners.live(alive=3, stalled=1)
    m.learners.progress("worker-1", inner_step=10, tokens=1000, step_seconds=0.25, loss=2.5)
    m.learners.silent("worker-1", 0.5)
    m.learners.state("worker-1", "stalled")
    m.learners.contributions("worker-1", asked=5, contributed=4, merged=3)
    m.learners.quarantined("worker-1", is_so=True)
    m.learners.put_in_quarantine()
    m.itself.settings({"sync.quorum": 2})
    m.contributions.tokens(accepted=900, merged=800, late=30, refused=20, fenced=10)
    m.contributions.accepted(staleness=1)
    m.contributions.duplicate()
    m.contributions.late()
    m.contributions.rejected("NOT_FINITE")
    m.contributions.received(100)
    m.contributions.sent(200)
    m.rounds.open(4, oldest_s=2.5)
    m.rounds.grace(0.75)
    m.rounds.quorum_reached(0.1)
    m.rounds.closed("grace", 2)
    m.rounds.merged(0.02)
    m.rounds.committed(3, 7, 1.5)
    m.itself.tokens(merged=5000, budget=10_000)
    m.storage.saved(4096, 0.05)
    m.storage.save_failed()
    m.storage.lost(2)
    m.storage.not_durable(3)
    m.storage.disk_free(10_000_000)
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
    m.training.stalled(0.0002)
    m.exchange.encoded(0.01)
    m.exchange.pushed("accepted", 500)
    m.exchange.contributions_unmerged(2)
    m.exchange.carried(64)
    m.exchange.pulled(700)
    m.exchange.applied(3, 7, 0.004)
    m.exchange.connected(2)
    m.exchange.reconnected()
    return m
