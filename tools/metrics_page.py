"""Writes docs/metrics.md: every metric of shards and workers with its kind, unit, labels and meaning.

`python tools/metrics_page.py` writes it, `--check` says whether it is up to date.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diloco_common.observe.metrics.registry import Certificates, Declare, Totals
from diloco_common.observe.metrics.shard import Contributions, Itself, Learners, Rounds, Storage
from diloco_common.observe.metrics.worker import Exchange, Training
from written import ROOT, written

TARGET = ROOT / "docs/metrics.md"
UNITS = ("seconds", "bytes", "tokens", "versions")
"""Units, as they occur in the names of metrics. Other metrics are counts or plain numbers."""
HEAD = """\
# Metrics

Every metric that `/metrics` of shards and workers shows. `tools/metrics_page.py` writes this page from
[the code](../common/diloco_common/observe/metrics). A metric without a unit is a count or a plain number. A histogram
has the series `..._bucket`, `..._sum` and `..._count`. Each process also has `diloco_build_info` with its versions,
`process_cpu_seconds_total`, `process_resident_memory_bytes` and similar metrics.

[recording.yml](../deploy/prometheus/rules/recording.yml) derives further series from these. [Operations](operations.md)
says which metrics to look at, and when.
"""


class Page(Declare):
    """Turns declared metrics into rows of a table."""

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

    def totals(self, name: str, what: str, *labels: str) -> Totals:
        self._note(name, "counter", what, labels)
        return super().totals(name, what, *labels)

    def _note(self, name: str, kind: str, what: str, labels: Sequence[str]) -> None:
        unit = next((unit for unit in UNITS if unit in name.split("_")), "")
        self.rows.append(f"| `{name}` | {kind} | {unit} | {', '.join(f'`{label}`' for label in labels)} | {what} |\n")


def section(heading: str, group: type, *arguments: object) -> str:
    page = Page()
    group(page, *arguments)
    table = "| metric | kind | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n" + "".join(page.rows)
    return f"\n## {heading}\n\n{inspect.getdoc(group)}\n\n{table}"


def main() -> int:
    text = (
        HEAD
        + section("Shards: themselves", Itself)
        + section("Shards: learners", Learners)
        + section("Shards: contributions", Contributions)
        + section("Shards: rounds", Rounds)
        + section("Shards: storage", Storage)
        + section("Workers: training", Training)
        + section("Workers: exchange", Exchange, time.monotonic)
        + section("Both: certificates", Certificates)
    )
    return written(TARGET, text, __doc__)


if __name__ == "__main__":
    sys.exit(main())
