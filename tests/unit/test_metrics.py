"""Metrics: what each event counts, that labels stay bounded, that names are as Prometheus wants them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from certificates import Certificates
from diloco_common.observe.metrics import ReaderMetrics, ShardMetrics, WorkerMetrics
from diloco_common.trust.files import read_folder


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


def test_what_is_unknown_is_not_zero():
    unknown = values(WorkerMetrics().registry)["diloco_worker_loss"]
    assert unknown != unknown

    m = ShardMetrics()
    free = values(m.registry)["diloco_shard_disk_free_bytes"]
    assert free != free


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


def following() -> ReaderMetrics:
    metrics = ReaderMetrics()
    metrics.follow("standby", lambda: (True, True, 2, 1.5, 7))
    return metrics


def test_a_standby_says_how_far_it_is_behind() -> None:
    text = generate_latest(following().registry).decode()
    assert 'diloco_reader_behind_versions{role="standby"} 2.0' in text
    assert 'diloco_reader_behind_seconds{role="standby"} 1.5' in text
    assert "diloco_reader_skipped_versions_total 7.0" in text


@pytest.mark.parametrize("kind", [ShardMetrics, WorkerMetrics])
def test_when_certificates_expire_is_told_in_seconds_since_1970(kind: type[ShardMetrics | WorkerMetrics], tmp_path):
    files, metrics = read_folder(Certificates(tmp_path).issue("learner/worker-1", days=90.0)), kind()
    metrics.certificates.follow(lambda: files)
    own = values(metrics.registry)["diloco_certificate_expires_timestamp_seconds{which=own}"]
    assert own == files.certificate.not_valid_after_utc.timestamp()
    assert values(metrics.registry)["diloco_certificate_expires_timestamp_seconds{which=ca}"] > own
