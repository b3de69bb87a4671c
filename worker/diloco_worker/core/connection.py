"""What a learner knows of one shard: its lease, how the run is cut, and which versions to pull.

Only `Connection` changes it, in the network thread. Pusher and puller read it.
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
    epoch: int
    generation: int
    """Starts again in each epoch; 0: no lease."""


NO_LEASE = Lease(0, 0)


@dataclass(frozen=True, slots=True)
class Caller:
    """One process of one learner."""

    run_id: str
    learner_id: str
    process_id: str
    rank: int = 0
    """Rank of this process within its island."""

    @property
    def identity(self) -> Identity:
        """The identity for Join, which needs no lease."""
        return Identity(self.run_id, self.learner_id, rank=self.rank)

    def under(self, lease: Lease) -> Identity:
        """The identity for calls that need a lease."""
        return replace(self.identity, generation=lease.generation, epoch=lease.epoch)


class ToPull:
    """The version of each fragment to pull from one shard: the one that it announced last."""

    is_by_name = False
    """Pull exactly that version, even if the process holds it: another rank may have dropped it."""

    def __init__(self) -> None:
        self.now: dict[int, Name] = {}
        """Fragment -> version; cleared when the shard's epoch changes."""

    def announced(self, fragment_id: int, version: Name) -> None:
        self.now[fragment_id] = version

    def newest(self, fragment_id: int) -> Name | None:
        """The version that the shard announced last; None: it has announced none."""
        return self.now.get(fragment_id)

    def begun(self, fragment_id: int, version: Name) -> Announced | None:
        """Its bytes begin to arrive. Returns the message for the other ranks."""
        return None

    def pulled(self, fragment_id: int, version: Name) -> None:
        """It has arrived. It stays in `now`: a version that is held is not pulled again."""

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        """The shard no longer holds it. Returns the message for the other ranks."""
        self._drop(fragment_id, version)
        return None

    def fetch(self, fragment_id: int, version: Name) -> None:
        """All ranks should pull it."""

    def ended(self, fragment_id: int, version: Name, *, is_applied: bool) -> None:
        """All ranks have applied it, or dropped it."""

    def forget(self) -> None:
        self.now.clear()

    def _drop(self, fragment_id: int, version: Name) -> None:
        if self.now.get(fragment_id) == version:
            del self.now[fragment_id]


class AsTold(ToPull):
    """For all ranks but the leader: pull each version that the ranks have agreed on, once."""

    is_by_name = True

    def announced(self, fragment_id: int, version: Name) -> None:
        """Nothing: only the leader attends."""

    def fetch(self, fragment_id: int, version: Name) -> None:
        self.now[fragment_id] = version

    def pulled(self, fragment_id: int, version: Name) -> None:
        self._drop(fragment_id, version)

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        self._drop(fragment_id, version)
        return Gone(fragment_id, *version)


class AndTell(AsTold):
    """For the leader: it pulls at once, so that the shard holds the version for the other ranks, and tells them.

    Only one version per fragment is in progress, until all ranks have decided on it.
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
        """From now on the shard holds the version, so the other ranks may pull it."""
        if self._under_way.get(fragment_id) == version != self._said.get(fragment_id):
            self._said[fragment_id] = version
            return Announced(fragment_id, *version)
        return None

    def gone(self, fragment_id: int, version: Name) -> Gone | None:
        """It was superseded before the pull began, or the lease that held it has ended."""
        self._drop(fragment_id, version)
        if self._said.get(fragment_id) == version:
            return Gone(fragment_id, *version)
        if self._under_way.get(fragment_id) == version:
            del self._under_way[fragment_id]
            self._begin(fragment_id)
        return None

    def fetch(self, fragment_id: int, version: Name) -> None:
        """Already in progress."""

    def ended(self, fragment_id: int, version: Name, *, is_applied: bool) -> None:
        if is_applied:
            self._applied[fragment_id] = version
        elif self._said.get(fragment_id) != version:
            return  # from the shard's previous epoch: a version of this one may have the same name
        if self._under_way.get(fragment_id) == version:
            del self._under_way[fragment_id]
            self._said.pop(fragment_id, None)
            self._begin(fragment_id)

    def forget(self) -> None:
        super().forget()
        for versions in (self._under_way, self._newest, self._said):
            versions.clear()

    def _begin(self, fragment_id: int) -> None:
        """Pull the newest version, unless one is in progress or all ranks have it."""
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
        """The latest lease, until it is over."""
        self.joined: Joined | None = None
        self.manifest: Manifest | None = None
        self.pulse = Pulse(0, 0)
        self.owned: frozenset[int] = frozenset()
        """Fragments that the shard has named as its own. It may speak of no others."""

    @property
    def epoch(self) -> int:
        return 0 if self.joined is None else self.joined.epoch

    @property
    def shard_index(self) -> int | None:
        return None if self.joined is None else self.joined.shard_index

    @property
    def index(self) -> int | None:
        """The learner's number, by this shard's count."""
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
        """Ids of the shard's fragments; empty until they are known."""
        if self.manifest is None or self.shard_index is None:
            return ()
        return tuple(fragment.fragment_id for fragment in self.manifest.owned_by(self.shard_index))

    @property
    def has_lease(self) -> bool:
        return self.lease.generation > 0

    @property
    def identity(self) -> Identity:
        return self.caller.under(self.lease)

    def take_lease(self, joined: Joined) -> bool:
        """The shard gave a lease. Returns whether its epoch is new, so that its earlier announcements are void."""
        is_another = joined.epoch != self.epoch
        if is_another:
            self.to_pull.forget()
        self.joined = joined
        self.lease = Lease(joined.epoch, joined.generation)
        self.owned = frozenset(status.fragment_id for status in joined.fragments)
        self.pulse = joined.pulse
        return is_another

    def lost_lease(self) -> None:
        self.lease = NO_LEASE
