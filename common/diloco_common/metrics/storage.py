"""Whether a shard's disk keeps up: versions made durable, checkpoints, and room."""

from __future__ import annotations

from diloco_common.metrics.registry import SECONDS, Declare


class Storage:
    """Versions on their way to the disk, and lost versions."""

    def __init__(self, declare: Declare) -> None:
        self._save_seconds = declare.histogram(
            "diloco_shard_save_seconds", "Time to make a version durable: writing, and waiting for the disk.", SECONDS
        )
        self._saved_bytes = declare.counter("diloco_shard_saved_bytes_total", "Bytes of versions made durable.")
        self._save_failures = declare.counter(
            "diloco_shard_save_failures_total",
            "Attempts to make a version durable that the disk refused; repeats count.",
        )
        self._versions_not_durable = declare.gauge(
            "diloco_shard_versions_not_durable", "Versions that are computed but not on disk yet."
        )
        self._versions_lost = declare.counter(
            "diloco_shard_versions_lost_total",
            "Announced versions that this shard came back without, as reported by learners that hold them.",
        )
        self._disk_free = declare.gauge(
            "diloco_shard_disk_free_bytes",
            "Free space where versions are kept; NaN if they are kept in memory only.",
        )
        self._disk_free.set(float("nan"))  # unknown is not zero
        self._checkpoint_version = declare.gauge(
            "diloco_shard_checkpoint_version", "The newest regular checkpoint since the shard started."
        )
        self._checkpoint_failures = declare.counter(
            "diloco_shard_checkpoint_failures_total",
            "Attempts to add to a regular checkpoint that failed; repeats count.",
        )

    def saved(self, num_bytes: int, seconds: float) -> None:
        """A version is durable."""
        self._saved_bytes.inc(num_bytes)
        self._save_seconds.observe(seconds)

    def save_failed(self) -> None:
        self._save_failures.inc()

    def not_durable(self, count: int) -> None:
        self._versions_not_durable.set(count)

    def lost(self, count: int) -> None:
        self._versions_lost.inc(count)

    def disk_free(self, num_bytes: int) -> None:
        self._disk_free.set(num_bytes)

    def checkpointed(self, version: int) -> None:
        """A regular checkpoint is whole."""
        self._checkpoint_version.set(version)

    def checkpoint_failed(self) -> None:
        self._checkpoint_failures.inc()
