"""Every metric of shards and workers: names, help, labels and buckets are defined in this folder only.

Names follow the Prometheus conventions (base units, `_total` for counters) and the glossary. Each process has its own
registry, because a worker may run in a process with other metrics. Labels are bounded: fragments, codes of errors.py,
and learner ids, which the shard has checked and forgets after the learner is gone. docs/metrics.md lists all metrics.

This file has a registry, declarations, buckets and the metrics of every process; `shard.py` and `worker.py` add theirs.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Self

from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector

from diloco_common.trust.files import TlsFiles

COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
"""Buckets of small whole numbers."""
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class MetricsRegistry(CollectorRegistry):
    """A registry with the metrics and versions of the process itself,

    without the `_created` series that the library adds to every counter and histogram.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_scrape: Callable[[], None] = lambda: None
        """Sets the metrics that are computed only at a scrape."""
        ProcessCollector(registry=self)
        build = Declare(self).gauge(
            "diloco_build_info", "Versions of this process; always 1.", "version", "python", "torch", "grpcio"
        )
        build.labels(
            installed("decoupled-diloco"), platform.python_version(), installed("torch"), installed("grpcio")
        ).set(1)

    def collect(self) -> Iterable[Metric]:
        self.before_scrape()
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Declare:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry)

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)

    def totals(self, name: str, what: str, *labels: str) -> MetricTotals:
        return MetricTotals(name, what, labels, self._registry)


class MetricTotals:
    """A counter that follows totals kept elsewhere.

    It never falls: a total that starts over adds nothing until it exceeds the old one. There is no series before the
    first total, unless `begin` starts it at zero, as rates and alerts need. A zero followed by a shard's recovered
    total would look like that much work done at once.
    """

    def __init__(self, name: str, what: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._counter = Counter(name, what, labels, registry=registry if labels else None)
        self._registry = registry
        self._seen: dict[tuple[str, ...], float] = {}

    def begin(self, *values: str) -> Self:
        """Start the series of these values of its one label, or the only series, at zero."""
        for value in values:
            self.follow(0, value)
        if not values:
            self.follow(0)
        return self

    def follow(self, total: float, *labels: str) -> None:
        """The total for these labels is now this much."""
        seen = self._seen.get(labels)
        if seen is not None and total <= seen:  # true of most totals, most of the time
            return
        if seen is None and not labels:
            self._registry.register(self._counter)
        series = self._counter.labels(*labels) if labels else self._counter
        series.inc(total - (seen or 0))
        self._seen[labels] = total

    def follow_all(self, totals: Mapping[str, float], *labels: str) -> None:
        for value, total in totals.items():
            self.follow(total, *labels, value)

    def forget(self, first_label: str) -> None:
        for labels in [labels for labels in self._seen if labels[0] == first_label]:
            self._counter.remove(*labels)
            del self._seen[labels]


class Certificates:
    """The expiry of certificates, on shards and workers with `security.tls`."""

    def __init__(self, declare: Declare) -> None:
        self._expires = declare.gauge(
            "diloco_certificate_expires_timestamp_seconds",
            "When a certificate of this process expires, in seconds since 1970: its own, or the authority's (ca).",
            "which",
        )

    def follow(self, files: Callable[[], TlsFiles]) -> None:
        """From now on, report on these files as they were last read."""
        self._expires.labels("ca").set_function(lambda: _expires(files().ca))
        if files().pair is not None:
            self._expires.labels("own").set_function(lambda: _expires((files().pair or (b"", b""))[1]))


def _expires(pem: bytes) -> float:
    """When a certificate expires; of several, the first one in the file."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


@cache
def installed(distribution: str = "decoupled-diloco") -> str:
    """The version of a package that is installed here; "unknown" in a source tree."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
