"""Every metric of shards and workers: names, help, labels and buckets stand in this folder and nowhere else.

Names follow the Prometheus conventions (base units, `_total` for counters) and the glossary. Each process has its own
registry, because a worker may live in a process with metrics of its own. Labels are bounded: fragments, codes of
errors.py, and learner ids. The shard checks learner ids before they get here, and forgets learners that are gone.
docs/metrics.md lists all metrics.
"""

from diloco_common.observe.metrics.reader import ReaderMetrics
from diloco_common.observe.metrics.shard import ComputePhase, ShardMetrics
from diloco_common.observe.metrics.worker import PushOutcome, SyncPhase, WorkerMetrics

__all__ = ["ComputePhase", "PushOutcome", "ReaderMetrics", "ShardMetrics", "SyncPhase", "WorkerMetrics"]
