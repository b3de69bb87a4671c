"""What a learner knows of one shard: its lease, how the run is cut, and the versions that the shard announced.

Changed by `Connection` alone, in the network thread. Pusher and puller read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import JoinAnswer, LearnerPolicy, Pulse
from diloco_worker.core.events import Joined
from diloco_worker.core.pushes import Lease

NO_LEASE = Lease(0, 0)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who joins: one process of one learner."""

    run_id: str
    learner_id: str
    process_id: str
    rank: int = 0
    """Of this process in its island."""

    @property
    def identity(self) -> Identity:
        """The identity in Join, which needs no lease."""
        return Identity(self.run_id, self.learner_id, rank=self.rank)

    def under(self, lease: Lease) -> Identity:
        """The identity in calls that need a lease."""
        return replace(self.identity, generation=lease.generation, epoch=lease.epoch)


class ConnectionState:
    """What one learner knows of one shard: its lease, its epoch, and what it has announced."""

    def __init__(self, caller: Caller, address: str) -> None:
        self.caller = caller
        self.address = address
        self.lease = NO_LEASE
        """The last one, until it is over."""
        self.epoch = 0
        """Of the shard, as it joined last."""
        self.shard_index: int | None = None
        self.index: int | None = None
        """The learner's number, as this shard counts."""
        self.policy: LearnerPolicy | None = None
        self.manifest: Manifest | None = None
        """Known once a shard was joined."""
        self.heartbeat_s = 1.0
        self.pulse = Pulse(0, 0)
        self.owned: frozenset[int] = frozenset()
        """Ids of the fragments that the shard has named as its own. It may speak of no others."""
        self.announced: dict[int, tuple[int, int]] = {}
        """Fragment -> epoch and version to pull; forgotten with the shard's epoch."""

    @property
    def fragment_ids(self) -> tuple[int, ...]:
        """The ids of the fragments that the shard owns; none as long as that is not known."""
        if self.manifest is None or self.shard_index is None:
            return ()
        return tuple(fragment.fragment_id for fragment in self.manifest.owned_by(self.shard_index))

    @property
    def has_lease(self) -> bool:
        return self.lease.generation > 0

    @property
    def identity(self) -> Identity:
        """Under the current lease."""
        return self.caller.under(self.lease)

    def joined(self, answer: JoinAnswer) -> bool:
        """The shard gave a lease. Says whether it is in another epoch: what it announced before is gone."""
        is_another = answer.epoch != self.epoch
        if is_another:
            self.announced.clear()
        self.lease = Lease(answer.epoch, answer.generation)
        self.epoch = answer.epoch
        self.shard_index = answer.shard_index
        self.owned = frozenset(status.fragment_id for status in answer.fragments)
        self.heartbeat_s = answer.heartbeat_s
        self.policy = answer.policy
        self.index = answer.index
        self.pulse = answer.pulse
        return is_another

    def take_lease(self, joined: Joined) -> bool:
        """The leader of the island has a lease: as `joined`. Nothing is new to the leader itself."""
        is_another = joined.epoch != self.epoch
        if is_another:
            self.announced.clear()
        self.lease = Lease(joined.epoch, joined.generation)
        self.epoch = joined.epoch
        self.shard_index = joined.shard_index
        self.owned = frozenset(status.fragment_id for status in joined.fragments)
        self.heartbeat_s = joined.heartbeat_s
        self.policy = joined.policy
        return is_another

    def lost_lease(self) -> None:
        """The lease is over."""
        self.lease = NO_LEASE
