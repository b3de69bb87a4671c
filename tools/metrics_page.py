"""Writes docs/metrics.md: every metric of shards and workers with its kind, meaning and labels.

`python tools/metrics_page.py` writes it, `--check` says whether it is up to date.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diloco_common.observe.metrics import Certificates, Declare, MetricTotals
from diloco_common.observe.metrics.shard import Contributions, FollowingMetrics, Itself, Learners, RoundMetrics, Storage
from diloco_common.observe.metrics.worker import ExchangeMetrics, Training
from written import ROOT, written

TARGET = ROOT / "docs/metrics.md"
HEAD = """\
# Metrics

Every metric of `/metrics`, with kind and labels, as `tools/metrics_page.py` lists them. Each process also has
`diloco_build_info` with its versions, and the usual `process_...`.
[recording.yml](../deploy/prometheus/rules/recording.yml) derives further series. [Operations](operations.md) says what
to look at.
"""


class Page(Declare):
    """Turns the declared metrics into lines of a list."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.rows: list[str] = []

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        self._note(name, "gauge", what, labels)
        return super().gauge(name, what, *labels)

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        self._note(name, "counter", what, labels)
        return super().counter(name, what, *labels)

    def histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        self._note(name, "histogram", what, ())
        return super().histogram(name, what, buckets)

    def totals(self, name: str, what: str, *labels: str) -> MetricTotals:
        self._note(name, "counter", what, labels)
        return super().totals(name, what, *labels)

    def _note(self, name: str, kind: str, what: str, labels: Sequence[str]) -> None:
        by = "".join(f", `{label}`" for label in labels)
        self.rows.append(f"- `{name}` ({kind}{by}): {what}\n")


def section(heading: str, group: type, *arguments: object) -> str:
    page = Page()
    group(page, *arguments)
    return f"\n## {heading}\n\n{''.join(page.rows)}"


def main() -> int:
    text = (
        HEAD
        + section("Shards: themselves", Itself)
        + section("Shards: learners", Learners)
        + section("Shards: contributions", Contributions)
        + section("Shards: rounds", RoundMetrics)
        + section("Shards: storage", Storage)
        + section("Workers: training", Training)
        + section("Workers: exchange", ExchangeMetrics, time.monotonic)
        + section("Mirrors and standbys", FollowingMetrics)
        + section("Both: certificates", Certificates)
    )
    return written(TARGET, text, __doc__)


if __name__ == "__main__":
    sys.exit(main())
