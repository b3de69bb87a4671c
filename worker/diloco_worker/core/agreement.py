"""What all shards of a run say alike, and what enough of them must have against a learner to end it.

One shard speaks for its own fragments. What it says of itself must fit what the first one said of the run: a shard that
says otherwise is away for this learner, and the others go on. Owned by the network thread; `Shards` and `Diverging`, by
the training thread, which hears only of what is believed.
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
"""Rounds in a row that refuse a fragment of this learner because it is not finite. After the last one it begins anew
with the global values."""
ANEW_MAX = 3
"""So many times. Then it ends: something in its data or rates does it again and again."""


class Agreement:
    """The run, as the shards say that have joined."""

    def __init__(self, num_addresses: int, tensors: Sequence[TensorSpec]) -> None:
        """`tensors`: the learner's model."""
        self._num_addresses = num_addresses
        self._tensors = tensors
        self._first: Joined | None = None  # its settings are those of the run
        self._manifest: Manifest | None = None
        self._index_of: dict[str, int] = {}  # of each address; stays

    def take(self, joined: Joined) -> None:
        """A shard gave a lease. What it says of the run and of itself is believed, or nothing has changed.

        Raises ConfigError where the addresses are not a run's, or versions are made by other rules; ManifestMismatch
        where it cuts the model in another way, or claims what is not its own; UnknownEncoding.
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
        """The model, as the first shard says that all cut it."""
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
        """It is like the first one, also when it comes back."""
        before = f"{first.address} {'before' if joined.address == first.address else ''}".strip()
        if joined.rules and first.rules and joined.rules != first.rules:
            raise ConfigError(
                f"{joined.address} makes versions by {joined.rules}, {before} by {first.rules}; start all "
                "shards with the same settings, and with the same sources of rules that are not ours"
            )
        policy = joined.policy
        if joined.address in self._index_of:
            # H is the shard's alone, and of pulls a learner takes values in any case: both may change.
            policy = replace(policy, sync_every=first.policy.sync_every, pull_encoding=first.policy.pull_encoding)
        is_cut_alike = (joined.num_fragments, joined.num_shards) == (first.num_fragments, first.num_shards)
        if is_cut_alike and policy == first.policy and joined.manifest_digest != manifest.digest:
            raise ManifestMismatch(
                f"{joined.address} reads this model in another way than this learner: it is of another version, which "
                "knows other kinds of tensors (buffers, for example). Exchange the shards first, or keep those tensors "
                "with this learner, join(private=[...]); see docs/upgrades.md"
            )
        if joined.manifest_digest != manifest.digest or policy != first.policy:
            raise ManifestMismatch(
                f"{joined.address} cuts the model in {joined.num_fragments} fragments for {joined.num_shards} shards "
                f"with {joined.policy}, {before} in {first.num_fragments} for {first.num_shards} with "
                f"{first.policy}; start all shards with the same settings, and the learners again where they changed"
            )
        for encoding in (joined.policy.push_encoding, joined.policy.pull_encoding):
            get_codec(encoding)


class Shards:
    """One for each address that the learner was given, once it has joined."""

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._joined: dict[int, Joined] = {}  # by index
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
        """A shard gave a lease; says whether it is new."""
        is_new = joined.shard_index not in self._joined
        self._joined[joined.shard_index] = joined
        self._stopped.discard(joined.shard_index)
        return is_new

    def stop(self, shard_index: int) -> None:
        """It has reached the token budget; in another epoch it may not have."""
        self._stopped.add(shard_index)


class Objections:
    """What shards have against this learner. A majority of all shards ends it: one alone, where there is no other.

    Another process with its id counts by itself: that one joins every shard that it reaches, so each of them says so
    by its own. The rest are mistakes that the learner was started with: while no shard has spoken with it yet, an
    address at which nobody listens has no say in them. It may be the mistake.
    """

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._against: dict[str, DilocoError] = {}
        self._has_joined = False

    def raised(self, address: str, error: DilocoError, num_gone: int = 0) -> bool:
        """A shard refuses this learner in a way that trying again would not change. Says whether that ends it.

        `num_gone`: addresses at which nobody has listened for long.
        """
        self._against[address] = error
        is_superseded = isinstance(error, Superseded)
        alike = sum(isinstance(e, Superseded) == is_superseded for e in self._against.values())
        voters = self._num_addresses if self._has_joined or is_superseded else self._num_addresses - num_gone
        return 2 * alike > voters

    def withdrawn(self, address: str) -> None:
        """The shard speaks with this learner."""
        self._has_joined = True
        self._against.pop(address, None)


class Diverging:
    """When a learner whose values are NaN or infinite begins anew, and when it gives up.

    Nothing mends such values: every version is added to them, and the optimizer's moments are mostly not finite either.
    A process that went on would train in vain, and nobody would notice. NaN is in all fragments within a step. One
    shard that says so alone, of several, is not believed.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self.times_anew = 0
        """It took the global values because its own were not finite. Grows."""
        self._full: dict[int, int] = {}
        """Fragment -> its shard, where there were too many refusals in a row."""
        self._refused: defaultdict[int, set[int]] = defaultdict(set)
        """Fragment -> rounds that have refused it since it was accepted or merged. The answers of all
        ranks to one round come here."""

    def answered(
        self, fragment_id: int, shard_index: int, round_number: int, answer: PushAnswer
    ) -> NotFinite | None:  # fmt: skip
        """A push has its outcome. Returns what is wrong, if that was one refusal too many for most of the shards."""
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
        """The model takes the global values. Returns False where that was done so often that it does not help."""
        if self.times_anew >= ANEW_MAX:
            return False
        self.times_anew += 1
        self._full.clear()
        self._refused.clear()
        return True

    def merged(self, fragment_id: int) -> None:
        """A contribution is in a version. Where there are several ranks, they do not hear that a push is accepted."""
        self._refused[fragment_id].clear()
        self._full.pop(fragment_id, None)
