"""The finder of metrics in queries finds what is there: what it overlooks, nobody checks."""

from __future__ import annotations

import pytest

from promql import Query


@pytest.mark.parametrize(
    ("text", "selectors", "grouped_by"),
    [
        ("a_total", [("a_total", {})], set()),
        ('rate(a_total{x="1", y=~"b|c"}[5m])', [("a_total", {"x": "1", "y": ""})], set()),
        ("sum by (run, le) (rate(a_bucket[5m])) / on (run) b:c:d", [("a_bucket", {}), ("b:c:d", {})], {"run", "le"}),
        ("a == 0 unless b >= bool c and d", [("a", {}), ("b", {}), ("c", {}), ("d", {})], set()),
        ("predict_linear(a[1h], 4 * 3600) < 0", [("a", {})], set()),
        ('60 * a{z!="}"} > 0', [("a", {"z": ""})], set()),
        ("-rate(a[5m]) / on (run) group_left () (b > 0) or (c)", [("a", {}), ("b", {}), ("c", {})], {"run"}),
    ],
)
def test_a_query_names_its_metrics_and_labels(text: str, selectors: list[object], grouped_by: set[str]) -> None:
    query = Query("here", text)
    assert query.selectors == selectors
    assert query.grouped_by == grouped_by
