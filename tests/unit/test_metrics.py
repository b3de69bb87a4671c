"""Metrics: what each event counts, that labels stay bounded, that names are as Prometheus wants them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from busy import busy_shard, busy_worker, certificate
from diloco_common.observe.metrics import ReaderMetrics, ShardMetrics, WorkerMetrics


def values(registry: CollectorRegistry) -> dict[str, float]:
    """All series that are not those of the process, as `name{label=value}` -> value."""
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("diloco_")
    }


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ("diloco_shard_ready", 1),
        ("diloco_shard_refused_calls_total{code=NOT_JOINED}", 1),
        ("diloco_shard_joins_total", 1),
        ("diloco_shard_evictions_total{code=LEASE_EXPIRED}", 1),
        ("diloco_shard_learners{state=alive}", 3),
        ("diloco_shard_learners{state=stalled}", 1),
        ("diloco_shard_learner_inner_step{learner=worker-1}", 10),
        ("diloco_shard_learner_silent_seconds{learner=worker-1}", 0.5),
        ("diloco_shard_contributions_total{outcome=accepted}", 1),
        ("diloco_shard_contributions_rejected_total{code=NOT_FINITE}", 1),
        ("diloco_shard_received_bytes_total", 100),
        ("diloco_shard_learner_state{learner=worker-1}{state=stalled}", 1),
        ("diloco_shard_learner_state{learner=worker-1}{state=alive}", 0),
        ("diloco_shard_learner_contributions_total{learner=worker-1}{fate=merged}", 3),
        ("diloco_shard_learner_left_out{learner=worker-1}", 1),
        ("diloco_shard_settings{setting=sync.quorum}", 2),
        ("diloco_shard_contributed_tokens_total{fate=merged}", 800),
        ("diloco_shard_oldest_round_seconds", 2.5),
        ("diloco_shard_quorum_seconds_sum", 0.1),
        ("diloco_shard_rounds_closed_total{why=grace}", 1),
        ("diloco_shard_round_seconds_sum", 1.5),
        ("diloco_shard_version{fragment=3}", 7),
        ("diloco_shard_tokens_merged_total", 5000),
        ("diloco_shard_tokens_budget", 10_000),
        ("diloco_shard_save_failures_total", 1),
        ("diloco_shard_versions_lost_total", 2),
    ],
)
def test_what_happens_in_a_shard_is_counted(series, value):
    assert values(busy_shard().registry)[series] == value


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ("diloco_worker_inner_steps_total", 1),
        ("diloco_worker_loss", 2.5),
        ("diloco_worker_inner_step_seconds_sum", 0.25),
        ("diloco_worker_sync_stall_seconds_sum", 0.0002),
        ("diloco_worker_pushes_total{outcome=accepted}", 1),
        ("diloco_worker_pushes_total{outcome=failed}", 0),
        ("diloco_worker_pushed_bytes_total", 500),
        ("diloco_worker_contributions_unmerged", 2),
        ("diloco_worker_version{fragment=3}", 7),
        ("diloco_worker_reconnects_total", 1),
    ],
)
def test_what_happens_in_a_worker_is_counted(series, value):
    assert values(busy_worker().registry)[series] == value


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
    m = busy_shard()
    m.learners.silent.labels("worker-2").set(0.1)

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


def test_the_page_of_metrics_leaves_none_out(repository: Path):
    page = (repository / "docs/metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `(\w+)` \((\w+)[,)]", page, flags=re.MULTILINE)
    served = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type)
        for metrics in (busy_shard(), busy_worker(), following())
        for family in metrics.registry.collect()
        if family.name.startswith("diloco_") and family.name != "diloco_build_info"
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == served


@pytest.mark.parametrize("metrics", [busy_shard(), busy_worker()], ids=["shard", "worker"])
def test_when_certificates_expire_is_told_in_seconds_since_1970(metrics):
    files = certificate()
    own = values(metrics.registry)["diloco_certificate_expires_timestamp_seconds{which=own}"]
    assert own == files.certificate.not_valid_after_utc.timestamp()
    assert values(metrics.registry)["diloco_certificate_expires_timestamp_seconds{which=ca}"] > own
