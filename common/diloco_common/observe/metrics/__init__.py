"""Every metric of shards and workers: names, help, labels and buckets are defined in this folder only.

Names follow the Prometheus conventions (base units, `_total` for counters) and the glossary. Each process has its own
registry, because a worker may run in a process with other metrics. Labels are bounded: fragments, codes of errors.py,
and learner ids, which the shard has checked and forgets after the learner is gone. docs/metrics.md lists all metrics.
"""

from diloco_common.observe.metrics.shard import ComputePhase, ReaderMetrics, ShardMetrics
from diloco_common.observe.metrics.worker import PushOutcome, SyncPhase, WorkerMetrics

__all__ = ["ComputePhase", "PushOutcome", "ReaderMetrics", "ShardMetrics", "SyncPhase", "WorkerMetrics"]
