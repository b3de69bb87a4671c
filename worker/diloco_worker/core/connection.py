"""What a learner knows about one shard: its lease, how the run is cut, which versions to pull, and when to dial again.

Only `Connection` changes it, in the network thread. Pusher and puller read it.

`Dialing` decides when to dial the shard again after a refusal or silence:

join --lease--> attend --broken--> wait --> attend ...
                  |---- lease over --> wait --> join
                  |---- refused for good: join, and tell the others (agreement.py decides what ends a learner)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_common import errors
from diloco_common.errors import BadRequest, ConfigError, DilocoError, Refusal, Superseded, Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import DIAL_S, LONG_S, SAY_EVERY_S, SETTLE_S, backoff_s
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import LearnerPolicy, Pulse
from diloco_worker.core.events import Announced, Gone, Joined
from diloco_worker.core.fragment import NO_LEASE, Lease

Name = tuple[int, int]
"""Epoch and number of a version."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One process of one learner."""

    run_id: str
    learner_id: str
    process_id: str
    rank: int = 0
    """Rank of this process within its island."""
    born: float = 0.0
    """When it took its `process_id`, by its own clock, in seconds."""

    @property
    def identity(self) -> Identity:
        """The identity for Join, which needs no lease."""
        return Identity(self.run_id, self.learner_id, rank=self.rank)

    def under(self, lease: Lease) -> Identity:
        """The identity for calls that need a lease."""
        return replace(self.identity, generation=lease.generation, epoch=lease.epoch)


class PullTargets:
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


class AgreedPullTargets(PullTargets):
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


class LeaderPullTargets(AgreedPullTargets):
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
    """What one learner knows about one shard."""

    def __init__(self, caller: Caller, address: str, to_pull: PullTargets | None = None) -> None:
        self.caller = caller
        self.address = address
        self.to_pull = to_pull or PullTargets()
        self.lease = NO_LEASE
        """The latest lease, until it is over."""
        self.joined: Joined | None = None
        self.manifest: Manifest | None = None
        self.pulse = Pulse(0, 0)
        self.owned: frozenset[int] = frozenset()
        """Fragments that the shard has named as its own. It may speak of no others."""
        self.unseeded: set[int] = set()
        """Fragments for which the shard offered this learner no version at the last Join, and has announced none since:
        it wants the learner's values. In an island, only the leader hears announcements."""

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

    def check_owned(self, fragment_id: int) -> None:
        """Raises BadRequest."""
        if fragment_id not in self.owned:
            raise BadRequest(f"{self.address} speaks of fragment {fragment_id}, which it did not name in Join")

    def take_lease(self, joined: Joined) -> bool:
        """The shard gave a lease. Returns whether its epoch is new, so that its earlier announcements are void."""
        is_another = joined.epoch != self.epoch
        if is_another:
            self.to_pull.forget()
        self.joined = joined
        self.lease = Lease(joined.epoch, joined.generation)
        self.owned = frozenset(status.fragment_id for status in joined.fragments)
        self.unseeded = {status.fragment_id for status in joined.fragments if not status.seeded}
        self.pulse = joined.pulse
        return is_another

    def announced(self, fragment_id: int, version: Name) -> None:
        """The shard has this version for the learner. Raises BadRequest if the fragment is not the shard's."""
        self.check_owned(fragment_id)
        self.unseeded.discard(fragment_id)
        self.to_pull.announced(fragment_id, version)

    def lost_lease(self) -> None:
        self.lease = NO_LEASE


JOIN_AGAIN = (errors.NotJoined, errors.LeaseExpired, errors.StaleGeneration, errors.WrongEpoch)
"""The lease is over, or a repeated Join of this process replaced it: join again."""
TRY_AGAIN = (errors.Draining, errors.Busy, errors.NotSeeded, errors.TornUpload)
ALWAYS = (Superseded, ConfigError, errors.ManifestMismatch)
"""Objections even if the shard accepted this learner before: another process is this learner now, or the shard has
changed. Unknown errors count as such, too."""
STAYS = (errors.ForeignCertificate, errors.WrongHost, errors.TlsMismatch, errors.NotAShard)
"""Only other settings or files can fix these. An expired certificate is not among them: it may be renewed while the
learner runs, or a clock corrected."""
STAYS_S = 1.5 * DIAL_S
"""Seconds for which such a failure must stay the same: long enough to look for the cause twice."""
GONE_S = 10.0
"""After this time with nobody listening, a shard is not just restarting: a learner that ends does not wait for it."""


@dataclass(frozen=True, slots=True)
class Redial:
    """The connection ended: dial again after `after_s` seconds."""

    after_s: float
    is_lease_over: bool
    """Whether to join; otherwise attend under the current lease."""
    is_news: bool
    """Whether to log it: the first time, and then occasionally."""
    why: str
    is_objection: bool = False
    """Whether this shard would refuse every further try."""


class Dialing:
    """The attempts of one learner to reach one shard. Time is passed in, in seconds."""

    def __init__(self) -> None:
        self._attempt = 0  # attempts since the last good connection
        self._silent_s = 0.0  # waited since the last log line
        self._was_up = False
        self.refused_since: float | None = None
        """The time since which nobody has listened there; None: somebody does, or it is not known."""
        self._began = 0.0
        self._had_lease = False
        self._same_since = 0.0
        self._same: type[DilocoError] | None = None  # of STAYS, or Revoked: the error of every attempt since then

    def begin(self, now: float, *, has_lease: bool) -> None:
        """An attempt begins: to join, if there is no lease, and to attend."""
        self._began, self._had_lease = now, has_lease

    def is_up(self) -> None:
        """The shard answers on the control stream."""
        self._was_up, self.refused_since, self._same = True, None, None

    def ended(self, error: DilocoError | None, now: float, jitter: float) -> Redial:
        """The attempt, or the connection that it made, ended. `error` is None if the shard ended the stream.

        `jitter` is drawn uniformly from [0, 1).
        """
        why = "the stream ended" if error is None else str(error)
        is_refused = isinstance(error, Unavailable) and error.is_refused
        self.refused_since = (now if self.refused_since is None else self.refused_since) if is_refused else None
        is_for_good = isinstance(error, Refusal | ConfigError) and not isinstance(error, JOIN_AGAIN + TRY_AGAIN)
        is_lease_over = isinstance(error, (*JOIN_AGAIN, Superseded))
        if is_for_good and error is not None:
            why = f"{error} [{error.code}]"
        stays = self._is_here_to_stay(error, now) or (is_for_good and not self._was_up)  # wrong from the start
        is_objection = stays or isinstance(error, ALWAYS) or type(error) is DilocoError
        # Do not back off as for a silent shard: this one has ended the lease, or the connection lasted.
        if (isinstance(error, JOIN_AGAIN) and self._had_lease) or now - self._began > SETTLE_S:
            self._attempt, self._silent_s = 0, 0.0
        is_news = self._attempt == 0 or self._silent_s >= SAY_EVERY_S
        if is_news:
            self._silent_s = 0.0
        after_s = backoff_s(self._attempt, jitter)
        self._attempt += 1
        self._silent_s += after_s
        return Redial(after_s, is_lease_over, is_news, why, is_objection)

    def _is_here_to_stay(self, error: DilocoError | None, now: float) -> bool:
        """Whether waiting will not help. After a connection was up, only a revocation is such an error: for others the
        learner trains on and logs the problem."""
        kind = type(error) if isinstance(error, (*STAYS, errors.Revoked)) else None
        if kind is None or kind is not self._same:
            self._same, self._same_since = kind, now
        lasted_s = now - self._same_since
        if kind is errors.Revoked:
            return lasted_s >= LONG_S
        return kind is not None and not self._was_up and lasted_s >= STAYS_S
