"""The shards that a learner has joined: whether they make up one run, and which of them have stopped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from diloco_common.errors import ConfigError, ManifestMismatch
from diloco_common.manifest import Manifest
from diloco_worker.core.events import Joined


class Shards:
    """One for each address that the learner was given, once it has joined."""

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._joined: dict[int, Joined] = {}  # by index
        self._first: Joined | None = None  # of all, as it joined first: its settings are those of the run
        self._stopped: set[int] = set()

    @property
    def joined(self) -> Collection[Joined]:
        """As each of them joined last."""
        return self._joined.values()

    @property
    def are_complete(self) -> bool:
        return len(self._joined) == self._num_addresses

    @property
    def have_stopped(self) -> bool:
        """All of them have reached the token budget."""
        return len(self._stopped) == self._num_addresses

    def has_stopped(self, shard_index: int) -> bool:
        """It has reached the token budget."""
        return shard_index in self._stopped

    def join(self, joined: Joined) -> bool:
        """A shard gave a lease; says whether it is new. Raises ConfigError if the addresses are not a run's."""
        other = self._joined.get(joined.shard_index)
        if other is not None and other.address != joined.address:
            raise ConfigError(
                f"{other.address} and {joined.address} both are shard {joined.shard_index}; "
                "name every shard once, and give each its own shard.index"
            )
        if self._first is None and joined.num_shards != self._num_addresses:
            raise ConfigError(
                f"the run has {joined.num_shards} shards (shard.count of {joined.address}), "
                f"but {self._num_addresses} addresses are given; name all of them"
            )
        self._first = self._first or joined
        self._joined[joined.shard_index] = joined
        self._stopped.discard(joined.shard_index)
        return other is None

    def check(self, joined: Joined, manifest_digest: str, *, is_new: bool) -> None:
        """A shard that has joined is like the first one, also when it comes back. Raises ManifestMismatch where it cuts
        the model in another way, and ConfigError where it makes versions in another way."""
        first = self._first
        assert first is not None
        before = f"{first.address} {'before' if joined.address == first.address else ''}".strip()
        if joined.rules and first.rules and joined.rules != first.rules:
            raise ConfigError(
                f"{joined.address} makes versions by {joined.rules}, {before} by {first.rules}; start all "
                "shards with the same settings, and with the same sources of rules that are not ours"
            )
        policy = joined.policy
        if not is_new:  # H is the shard's alone, and of pulls a learner takes values in any case: both may change
            policy = replace(policy, sync_every=first.policy.sync_every, pull_encoding=first.policy.pull_encoding)
        is_cut_alike = (joined.num_fragments, joined.num_shards) == (first.num_fragments, first.num_shards)
        if is_cut_alike and policy == first.policy and joined.manifest_digest != manifest_digest:
            raise ManifestMismatch(
                f"{joined.address} reads this model in another way than this learner: it is of another version, which "
                "knows other kinds of tensors (buffers, for example). Exchange the shards first, or keep those tensors "
                "with this learner, join(private=[...]); see docs/upgrades.md"
            )
        if joined.manifest_digest != manifest_digest or policy != first.policy:
            raise ManifestMismatch(
                f"{joined.address} cuts the model in {joined.num_fragments} fragments for {joined.num_shards} shards "
                f"with {joined.policy}, {before} in {first.num_fragments} for {first.num_shards} with "
                f"{first.policy}; start all shards with the same settings, and the learners again where they changed"
            )

    def check_owned(self, joined: Joined, manifest: Manifest) -> None:
        """A shard names the fragments that the manifest places on it. Raises ManifestMismatch."""
        named = {status.fragment_id for status in joined.fragments}
        owned = {fragment.fragment_id for fragment in manifest.owned_by(joined.shard_index)}
        if not named <= owned:
            raise ManifestMismatch(
                f"{joined.address} says that it owns fragments {sorted(named - owned)[:5]}, but the manifest places "
                "them elsewhere; install equal versions on both sides"
            )

    def stop(self, shard_index: int) -> None:
        """It has reached the token budget; in another epoch it may not have."""
        self._stopped.add(shard_index)
