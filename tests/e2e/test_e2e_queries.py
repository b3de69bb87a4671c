"""Every query of rules and dashboards names metrics, labels and values that real processes really serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import LocalCluster, http_get, until
from prometheus_client.parser import text_string_to_metric_families

from promql import FROM_TARGETS, Query, in_dashboards, in_rules

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
QUERIES = [*in_rules(DEPLOY / "prometheus/rules"), *in_dashboards(DEPLOY / "grafana/dashboards")]
OF_PROMETHEUS = {
    "up": {"job": {"diloco-shard"}},
    "ALERTS": {"alertname": set(), "alertstate": {"firing"}},
}
Series = dict[str, dict[str, set[str]]]
"""Metric -> label -> values."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """What a shard and its worker serve after a worker died; and what is made of it by recording."""
    with LocalCluster(tmp_path_factory.mktemp("queries") / "run") as cluster:
        cluster.start(shards=1, workers=["ann", "bob"])
        cluster.workers["bob"].kill()
        shard, worker = cluster.shards[0].endpoints.http, cluster.workers["ann"].endpoints.http
        until(lambda: 'learner="bob",state="evicted"} 1.0' in http_get(shard, "/metrics")[1], "the eviction of bob")
        series: Series = {name: dict(labels) for name, labels in OF_PROMETHEUS.items()}
        for address in (shard, worker):
            for family in text_string_to_metric_families(http_get(address, "/metrics")[1]):
                for sample in family.samples:
                    labels = series.setdefault(sample.name, {})
                    for label, value in sample.labels.items():
                        labels.setdefault(label, set()).add(value)
    for query in QUERIES:
        if ":" in (name := query.where.split(": ")[1]):
            series[name] = {label: set() for label in query.grouped_by}
    return series


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_a_query_finds_what_it_asks_for(served: Series, query: Query) -> None:
    assert query.selectors
    labels: set[str] = set(FROM_TARGETS)
    for name, asked in query.selectors:
        assert name in served
        labels |= served[name].keys()
        for label, value in asked.items():
            assert label in served[name].keys() | FROM_TARGETS
            if value and label in served[name]:
                assert value in served[name][label]
    assert query.grouped_by <= labels
