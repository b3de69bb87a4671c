"""Metrics: what each event counts, that labels stay bounded, that names are as Prometheus wants them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.observe.metrics.worker import WorkerMetrics


def values(registry: CollectorRegistry) -> dict[str, float]:
    """All series that are not those of the process, as `name{label=value}` -> value."""
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("diloco_")
    }


def test_the_age_of_a_version_grows_until_the_next_one():
    now = [100.0]
    m = WorkerMetrics(clock=lambda: now[0])
    age = "diloco_worker_version_age_seconds{fragment=3}"

    m.exchange.applied(3, 1, 0.001)
    now[0] = 130.0
    assert values(m.registry)[age] == 30

    m.exchange.applied(3, 2, 0.001)
    assert values(m.registry)[age] == 0


def test_tokens_merged_never_fall_and_begin_where_a_restored_shard_does():
    m = ShardMetrics()
    for merged in (5000, 4000, 6000):
        m.itself.tokens_merged.follow(merged)

    assert values(m.registry)["diloco_shard_tokens_merged_total"] == 6000


def test_a_learner_that_is_forgotten_leaves_no_series():
    m = ShardMetrics()
    m.learners.state("worker-1", "stalled")
    m.learners.contributions.follow_all({"asked": 5, "merged": 3}, "worker-1")
    for learner in ("worker-1", "worker-2"):
        m.learners.silent.labels(learner).set(0.1)

    m.learners.forget("worker-1")
    m.learners.forget("worker-1")

    left = [series for series in values(m.registry) if "learner=" in series]
    assert left == ["diloco_shard_learner_silent_seconds{learner=worker-2}"]


def test_every_code_of_a_rejected_contribution_has_a_series_before_its_first_event(repository: Path):
    page = (repository / "docs/errors.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- explain: rejections -->\n\n")[2].partition("\n\n")[0].splitlines()
    codes = {code for row in rows for code in re.findall(r"`([A-Z_]+)`", row.partition(":")[0])}
    assert codes == {
        series.split("=")[1].rstrip("}")
        for series in values(ShardMetrics().registry)
        if series.startswith("diloco_shard_contributions_rejected_total")
    }
