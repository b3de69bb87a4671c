"""What a learner shares among its links, and what one link knows of its shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_common import rpc
from diloco_common.identity import Identity
from diloco_common.logs import Log
from diloco_common.manifest import Manifest, TensorSpec
from diloco_common.messages import LearnerPolicy, Progress
from diloco_common.metrics import WorkerMetrics
from diloco_worker.core.pushes import Lease
from diloco_worker.inbox import Inbox
from diloco_worker.transfer import Transfer


@dataclass(frozen=True)
class LinkContext:
    """What all links of one learner share."""

    run_id: str
    learner_id: str
    process_id: str
    token: str | None
    tensors: tuple[TensorSpec, ...]
    inbox: Inbox
    transfer: Transfer
    metrics: WorkerMetrics
    log: Log
    progress: Callable[[], Progress]
    """The learner's latest report."""
    connected: set[str] = field(default_factory=set)
    """Addresses of the shards whose control stream is up."""


class Session:
    """What one link knows of its shard: changed by `ShardLink` alone, read by its puller and pusher."""

    def __init__(self, address: str, context: LinkContext) -> None:
        self.address = address
        self.context = context
        self.shard_index: int | None = None
        self.generation = 0
        """0: no lease."""
        self.epoch = 0
        self.policy: LearnerPolicy | None = None
        self.manifest: Manifest | None = None
        """Known once every shard was joined."""
        self.heartbeat_s = 1.0
        self.tokens_merged: dict[int, int] = {}
        """Fragment -> tokens merged into the version pulled last, in whichever life of the shard."""

    @property
    def lease(self) -> Lease:
        return Lease(self.epoch, self.generation)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Identity under the current lease, for a call."""
        c = self.context
        return rpc.metadata_of(Identity(c.run_id, c.learner_id, self.generation, self.epoch), c.token)
