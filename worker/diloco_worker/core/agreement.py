"""Whether the shards form one run, and when their refusals or diverging values end a learner.

Each shard must agree with the first one that joined. A shard that disagrees counts as away, and the others go on.
`Agreement` and `Objections` belong to the network thread; `Shards` and `Diverging` to the training thread, which hears
only from shards that agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from diloco_common.codec import get_codec
from diloco_common.errors import ConfigError, DilocoError, ManifestMismatch, NotFinite, Superseded
from diloco_common.wire.manifest import Manifest, TensorSpec, cut
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.events import Joined

REFUSALS_MAX = 5
"""Rounds in a row that refuse a fragment as not finite, until the learner restarts from the global values."""
ANEW_MAX = 3
"""Maximum number of such restarts. Then the learner ends: its data or rates cause it again and again."""


class Agreement:
    """The run, as described by the shards that have joined."""

    def __init__(self, num_addresses: int, tensors: Sequence[TensorSpec]) -> None:
        """`tensors`: the learner's model."""
        self._num_addresses = num_addresses
        self._tensors = tensors
        self._first: Joined | None = None  # its settings count as those of the run
        self._manifest: Manifest | None = None
        self._index_of: dict[str, int] = {}  # address -> shard index; never changes

    def take(self, joined: Joined) -> None:
        """A shard gave a lease: accept what it says about the run and itself, or raise and change nothing.

        Raises ConfigError if the addresses are not those of one run, or versions are made by other rules;
        ManifestMismatch if it cuts the model differently or claims fragments of others; UnknownEncoding.
        """
        manifest = self._manifest or self._cut(joined)
        self._check_index(joined)
        self._check_settings(joined, self._first or joined, manifest)
        named = {status.fragment_id for status in joined.fragments}
        if not named <= (owned := {f.fragment_id for f in manifest.owned_by(joined.shard_index)}):
            raise ManifestMismatch(
                f"{joined.address} says that it owns fragments {sorted(named - owned)[:5]}, but the manifest places "
                "them elsewhere; install equal versions on both sides"
            )
        self._first, self._manifest = self._first or joined, manifest
        self._index_of[joined.address] = joined.shard_index

    def _cut(self, joined: Joined) -> Manifest:
        if joined.num_shards != self._num_addresses:
            raise ConfigError(
                f"the run has {joined.num_shards} shards (shard.count of {joined.address}), "
                f"but {self._num_addresses} addresses are given; name all of them"
            )
        try:
            return cut(self._tensors, joined.num_fragments, joined.num_shards)
        except ValueError as error:
            raise ManifestMismatch(f"the model cannot be cut as {joined.address} says: {error}") from None

    def _check_index(self, joined: Joined) -> None:
        index, address = joined.shard_index, joined.address
        if (before := self._index_of.get(address, index)) != index:
            raise ConfigError(f"{address} was shard {before} and says now that it is shard {index}")
        other = next((a for a, i in self._index_of.items() if i == index and a != address), None)
        if other is not None:
            raise ConfigError(
                f"{other} and {address} both are shard {index}; "
                "name every shard once, and give each its own shard.index"
            )

    def _check_settings(self, joined: Joined, first: Joined, manifest: Manifest) -> None:
        """Compare with the first shard, also after a shard comes back."""
        before = f"{first.address} {'before' if joined.address == first.address else ''}".strip()
        if joined.rules and first.rules and joined.rules != first.rules:
            raise ConfigError(
                f"{joined.address} makes versions by {joined.rules}, {before} by {first.rules}; start all "
                "shards with the same settings, and with the same sources of rules that are not ours"
            )
        policy = joined.policy
        if joined.address in self._index_of:
            # Each shard may change its H, and a learner accepts any pull encoding.
            policy = replace(policy, sync_every=first.policy.sync_every, pull_encoding=first.policy.pull_encoding)
        if joined.manifest_digest != manifest.digest or policy != first.policy:
            raise ManifestMismatch(
                f"{joined.address} cuts the model in {joined.num_fragments} fragments for {joined.num_shards} shards "
                f"with {joined.policy}, {before} in {first.num_fragments} for {first.num_shards} with "
                f"{first.policy}; start all shards with the same settings, and the learners again where they changed"
            )
        for encoding in (joined.policy.push_encoding, joined.policy.pull_encoding):
            get_codec(encoding)


class Shards:
    """The state of the shards, by the addresses that the learner was given."""

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._joined: dict[int, Joined] = {}  # by index
        self._stopped: set[int] = set()

    @property
    def joined(self) -> Collection[Joined]:
        """The latest `Joined` of each shard."""
        return self._joined.values()

    @property
    def are_complete(self) -> bool:
        return len(self._joined) == self._num_addresses

    @property
    def have_stopped(self) -> bool:
        return len(self._stopped) == self._num_addresses

    def has_stopped(self, shard_index: int) -> bool:
        return shard_index in self._stopped

    def join(self, joined: Joined) -> bool:
        """A shard gave a lease. Returns whether it is new."""
        is_new = joined.shard_index not in self._joined
        self._joined[joined.shard_index] = joined
        self._stopped.discard(joined.shard_index)
        return is_new

    def stop(self, shard_index: int) -> None:
        """The shard has reached the token budget. In another epoch it may not have."""
        self._stopped.add(shard_index)


class Objections:
    """Objections of shards against this learner. A majority of all shards ends it; if there is one shard, it suffices.

    `Superseded` is counted separately: the other process with this id joins every shard that it reaches, so each shard
    reports it. All other objections mean a wrong start. While no shard has accepted this learner yet, an address at
    which nobody listens has no vote on those, since the address itself may be wrong.
    """

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._against: dict[str, DilocoError] = {}
        self._has_joined = False

    def raised(self, address: str, error: DilocoError, num_gone: int = 0) -> bool:
        """A shard refuses this learner for good. Returns whether that ends the learner.

        `num_gone`: addresses at which nobody has listened for long.
        """
        self._against[address] = error
        is_superseded = isinstance(error, Superseded)
        alike = sum(isinstance(e, Superseded) == is_superseded for e in self._against.values())
        voters = self._num_addresses if self._has_joined or is_superseded else self._num_addresses - num_gone
        return 2 * alike > voters

    def withdrawn(self, address: str) -> None:
        self._has_joined = True
        self._against.pop(address, None)


class Diverging:
    """Decides when a learner whose values are NaN or infinite restarts from the global values, and when it gives up.

    Versions are added to such values and cannot repair them, and the optimizer's moments are mostly not finite either,
    so the process would train in vain without anybody noticing. NaN reaches all fragments within a step. If only
    one of several shards reports it, it is not believed.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self.times_anew = 0
        """Restarts from the global values so far."""
        self._full: dict[int, int] = {}
        """Fragment -> shard, of fragments with too many refusals in a row."""
        self._refused: defaultdict[int, set[int]] = defaultdict(set)
        """Fragment -> rounds that refused it since it was last accepted or merged, however many ranks they answered."""

    def answered(
        self, fragment_id: int, shard_index: int, round_number: int, answer: PushAnswer
    ) -> NotFinite | None:  # fmt: skip
        """A push has its outcome. Returns the error if most shards have now refused too often."""
        refused = self._refused[fragment_id]
        if answer.outcome is Outcome.REJECTED and answer.code == NotFinite.code:
            refused.add(round_number)
        elif answer.outcome is Outcome.ACCEPTED:
            self.merged(fragment_id)
        if len(refused) >= REFUSALS_MAX:
            self._full[fragment_id] = shard_index
        if 2 * len(set(self._full.values())) <= self._num_shards:
            return None
        return NotFinite(
            f"the model holds NaN or infinite values, and {REFUSALS_MAX} rounds in a row refused them. This learner "
            "ends. Restart it with a new optimizer and without state=: it starts from the values of the run. If this "
            "happens again, lower its rate, or clip its gradients"
        )

    def begin_anew(self) -> bool:
        """The model takes the global values. Returns False if that has been done too often."""
        if self.times_anew >= ANEW_MAX:
            return False
        self.times_anew += 1
        self._full.clear()
        self._refused.clear()
        return True

    def merged(self, fragment_id: int) -> None:
        """A contribution is in a version. In an island, ranks do not hear that a push was accepted."""
        self._refused[fragment_id].clear()
        self._full.pop(fragment_id, None)
