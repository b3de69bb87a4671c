"""What a learner knows of one shard: its lease, how the run is cut, and the versions that are to be pulled from it.

Changed by `Connection` alone, in the network thread. Pusher and puller read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import LearnerPolicy, Pulse
from diloco_worker.core.events import Announced, Gone, Joined

Name = tuple[int, int]
"""Epoch and number of a version."""


class Lease(NamedTuple):
    """The right of one learner to contribute to one shard."""

    epoch: int
    """Of the shard that gave it."""
    generation: int
    """Counts anew in each epoch; 0: no lease."""


NO_LEASE = Lease(0, 0)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who joins: one process of one learner."""

    run_id: str
    learner_id: str
    process_id: str
    rank: int = 0
    """Of this process among those that are this learner."""

    @property
    def identity(self) -> Identity:
        """The identity in Join, which needs no lease."""
        return Identity(self.run_id, self.learner_id, rank=self.rank)

    def under(self, lease: Lease) -> Identity:
        """The identity in calls that need a lease."""
        return replace(self.identity, generation=lease.generation, epoch=lease.epoch)


class ToPull:
    """Which version of each fragment is to be pulled from one shard: the one that it has announced last."""

    is_by_name = False
    """That version and no other, also if it is held: somebody may have dropped it."""

    def __init__(self) -> None:
        self.now: dict[int, Name] = {}
        """Fragment -> version; forgotten with the shard's epoch."""

    def announced(self, fragment_id: int, version: Name) -> None:
        """The shard has this version."""
        self.now[fragment_id] = version

    def newest(self, fragment_id: int) -> Name | None:
        """The version that the shard has announced last; None: it has announced none."""
        return self.now.get(fragment_id)

    def begun(self, fragment_id: int, version: Name) -> Announced | None:
        """Its bytes begin to come. Returns what the others are to hear."""
        return None

    def pulled(self, fragment_id: int, version: Name) -> None:
        """It has come. It stays here: what is held is not pulled again."""

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        """The shard no longer holds it. Returns what the others are to hear."""
        self._drop(fragment_id, version)
        return None

    def fetch(self, fragment_id: int, version: Name) -> None:
        """All ranks are to pull it."""

    def ended(self, fragment_id: int, version: Name, *, is_applied: bool) -> None:
        """All ranks have applied it, or dropped it."""

    def forget(self) -> None:
        """The shard is in another epoch."""
        self.now.clear()

    def _drop(self, fragment_id: int, version: Name) -> None:
        if self.now.get(fragment_id) == version:
            del self.now[fragment_id]


class AsTold(ToPull):
    """Of a rank that is not the leader: what all ranks have agreed on, once."""

    is_by_name = True

    def announced(self, fragment_id: int, version: Name) -> None:
        """Only the leader attends."""

    def fetch(self, fragment_id: int, version: Name) -> None:
        self.now[fragment_id] = version

    def pulled(self, fragment_id: int, version: Name) -> None:
        self._drop(fragment_id, version)

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        self._drop(fragment_id, version)
        return Gone(fragment_id, *version)


class AndTell(AsTold):
    """Of the leader: it pulls at once, which makes the shard hold the version for the others, and tells them.

    Of each fragment one version at a time, until all ranks have decided on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[int, Name] = {}
        self._newest: dict[int, Name] = {}  # announced meanwhile
        self._applied: dict[int, Name] = {}
        self._said: dict[int, Name] = {}

    def announced(self, fragment_id: int, version: Name) -> None:
        self._newest[fragment_id] = version
        self._begin(fragment_id)

    def newest(self, fragment_id: int) -> Name | None:
        found = (versions.get(fragment_id) for versions in (self._newest, self._under_way, self._applied))
        return next((version for version in found if version is not None), None)

    def begun(self, fragment_id: int, version: Name) -> Announced | None:
        """The shard holds it from now on: the others may pull it."""
        if self._under_way.get(fragment_id) == version != self._said.get(fragment_id):
            self._said[fragment_id] = version
            return Announced(fragment_id, *version)
        return None

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        """It was superseded before the pull began; or the lease has ended since, and what it held."""
        self._drop(fragment_id, version)
        if self._said.get(fragment_id) == version:
            return Gone(fragment_id, *version)
        if self._under_way.get(fragment_id) == version:
            del self._under_way[fragment_id]
            self._begin(fragment_id)
        return None

    def fetch(self, fragment_id: int, version: Name) -> None:
        """It is under way."""

    def ended(self, fragment_id: int, version: Name, *, is_applied: bool) -> None:
        if is_applied:
            self._applied[fragment_id] = version
        elif self._said.get(fragment_id) != version:
            return  # of the shard's epoch before: in this one nobody has heard of it yet, and its name may be the same
        if self._under_way.get(fragment_id) == version:
            del self._under_way[fragment_id]
            self._said.pop(fragment_id, None)
            self._begin(fragment_id)

    def forget(self) -> None:
        super().forget()
        for versions in (self._under_way, self._newest, self._said):
            versions.clear()

    def _begin(self, fragment_id: int) -> None:
        """Pull the newest version, unless one is under way, or it is that which all have."""
        newest = self._newest.get(fragment_id)
        if newest is None or fragment_id in self._under_way:
            return
        del self._newest[fragment_id]
        if newest != self._applied.get(fragment_id):
            self._under_way[fragment_id] = self.now[fragment_id] = newest


class ConnectionState:
    """What one learner knows of one shard."""

    def __init__(self, caller: Caller, address: str, to_pull: ToPull | None = None) -> None:
        self.caller = caller
        self.address = address
        self.to_pull = to_pull or ToPull()
        self.lease = NO_LEASE
        """The last one, until it is over."""
        self.joined: Joined | None = None
        """As it joined last."""
        self.manifest: Manifest | None = None
        """Known once a shard was joined."""
        self.pulse = Pulse(0, 0)
        self.owned: frozenset[int] = frozenset()
        """Ids of the fragments that the shard has named as its own. It may speak of no others."""

    @property
    def epoch(self) -> int:
        """Of the shard, as it joined last."""
        return 0 if self.joined is None else self.joined.epoch

    @property
    def shard_index(self) -> int | None:
        return None if self.joined is None else self.joined.shard_index

    @property
    def index(self) -> int | None:
        """The learner's number, as this shard counts."""
        return None if self.joined is None else self.joined.index

    @property
    def policy(self) -> LearnerPolicy:
        assert self.joined is not None
        return self.joined.policy

    @property
    def heartbeat_s(self) -> float:
        return 1.0 if self.joined is None else self.joined.heartbeat_s

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

    def take_lease(self, joined: Joined) -> bool:
        """The shard gave a lease. Says whether it is in another epoch: what it announced before is gone."""
        is_another = joined.epoch != self.epoch
        if is_another:
            self.to_pull.forget()
        self.joined = joined
        self.lease = Lease(joined.epoch, joined.generation)
        self.owned = frozenset(status.fragment_id for status in joined.fragments)
        self.pulse = joined.pulse
        return is_another

    def lost_lease(self) -> None:
        """The lease is over."""
        self.lease = NO_LEASE
