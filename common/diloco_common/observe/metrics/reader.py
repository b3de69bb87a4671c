"""All metrics of a mirror or a standby."""

from __future__ import annotations

from collections.abc import Callable

from diloco_common.observe.metrics.registry import Declare, MetricsRegistry


class FollowingMetrics:
    """How it follows its shard. Values computed at each scrape belong to the process that follows."""

    def __init__(self, declare: Declare) -> None:
        self.up = declare.gauge("diloco_reader_up", "1 while its shard sends.", "role")
        self.ready = declare.gauge("diloco_reader_ready", "1 while it holds a version of every fragment.", "role")
        self.behind_versions = declare.gauge(
            "diloco_reader_behind_versions", "Announced versions of one fragment that it has not taken yet.", "role"
        )
        self.behind_seconds = declare.gauge(
            "diloco_reader_behind_seconds",
            "Since it first lacked one of these; if its shard is silent, since its last message.",
            "role",
        )
        self.skipped = declare.totals(
            "diloco_reader_skipped_versions_total", "Versions that it skipped for newer ones."
        ).begin()


class ReaderMetrics:
    def __init__(self) -> None:
        self.registry = MetricsRegistry()
        self.following = FollowingMetrics(Declare(self.registry))

    def follow(self, role: str, look: Callable[[], tuple[bool, bool, int, float, int]]) -> None:
        """`look` returns whether it is up and ready, versions and seconds that it is behind, and versions skipped."""

        def sample() -> None:
            up, ready, versions, seconds, skipped = look()
            self.following.up.labels(role).set(up)
            self.following.ready.labels(role).set(ready)
            self.following.behind_versions.labels(role).set(versions)
            self.following.behind_seconds.labels(role).set(seconds)
            self.following.skipped.follow(skipped)

        self.registry.before_scrape = sample
