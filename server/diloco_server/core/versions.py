"""Versions: seeds, commits and announces them, and detects lost ones.

Owns the manifest, the shard's fragments and the merge rule, and decides when the run ends. `rounds.py` chooses the
contributions of a version.

With `sync.merge = "auto"`, the run chooses its merge rule when its first learner names its optimizer, and keeps it:
agreement for Adam and similar ones, the mean for others. It takes the mean if a version is made before any learner has
named one. Learners with other optimizers are merged by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diloco_common.errors import ManifestMismatch, UnknownFragment
from diloco_common.settings import RunSettings, ShardSettings, SyncSettings
from diloco_common.wire.manifest import Manifest, TensorSpec, Tie, cut, differences
from diloco_common.wire.messages import ADAM, FrozenTensor, Held, Stop
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.effects import Outbox
from diloco_server.core.fragment import FragmentState, Phases, Restored
from diloco_server.core.influence import Influence
from diloco_server.core.ledger import BudgetReached, MergeChosen, MergeStays, VersionsLost
from diloco_server.core.membership import Member, Membership
from diloco_server.core.model import Frozen, check_model, check_model_digest
from diloco_server.core.record import Record, next_record


@dataclass(frozen=True, slots=True)
class Budget:
    """The run's token budget: the run ends once every fragment of the model has merged this many tokens."""

    tokens: int
    influence: Influence

    def believed(self, tokens_merged: int) -> int:
        """The merged tokens that a seed claims, but at most the budget: a run may have gone a little beyond it."""
        return min(tokens_merged, self.tokens) if self.tokens > 0 else tokens_merged

    def is_reached(self, state: FragmentState) -> bool:
        return 0 < self.tokens <= state.tokens_merged

    def rest_is_trained(self, state: FragmentState, live: Iterable[Member]) -> bool:
        """Whether the tokens trained since the last round fill the budget. Then the round does not wait for H steps."""
        if self.tokens <= 0:
            return False
        base = state.base_tokens
        trained = self.influence.claimed(
            [max(0, m.reported.tokens - base.get(m.learner_id, m.reported.tokens)) for m in live]
        )
        return trained > 0 and self.tokens <= state.tokens_merged + trained


class Versions:
    def __init__(
        self, run: RunSettings, shard: ShardSettings, sync: SyncSettings, epoch: int, influence: Influence,
        membership: Membership, outbox: Outbox,
    ) -> None:  # fmt: skip
        self.epoch = epoch
        self.merge = "" if sync.merge == "auto" else sync.merge
        """The name of the merge rule; empty: not chosen yet."""
        self._chooses = sync.merge == "auto"
        self.manifest: Manifest | None = None
        self.fragments: dict[int, FragmentState] = {}
        self.phases = Phases()
        self.budget = Budget(run.tokens, influence)
        self.began_with_nothing = True
        self.done = False
        """Whether the token budget is reached and the last version of every fragment is made. Never reset."""
        self.closing: dict[int, int] = {}
        """Once the model has its budget: fragments of buffers -> their last version. Its round opens after the model's
        last round, so it holds all statistics that learners have counted until then."""
        self._is_closing = False
        self.frozen = Frozen()
        self._knows_keys = False
        """Whether a learner has declared the names in this epoch; if not, they are those of the stored versions."""
        self._model_digest = run.model
        self._placed = shard
        self._num_fragments = sync.fragments
        self._membership = membership
        self._outbox = outbox
        self._as_sent: Sequence[TensorSpec] = ()  # the model as the last learner sent it

    # ------------------------------------------------------------ the model

    def adopt_or_check(self, tensors: Sequence[TensorSpec]) -> None:
        """Adopt the model of the first learner, or compare a later one with it. The settings may name a model.

        The model may be replaced while nothing is seeded and no learner has a lease. Raises ManifestMismatch.
        """
        in_use = any(s.seeded or s.computing for s in self.fragments.values()) or self._membership.live()
        if self.manifest is not None and in_use:
            if tensors != self._as_sent:  # comparing in any order takes ten times as long
                check_model(self.manifest, tensors)
                self._as_sent = tensors
            return
        check_model_digest(self._model_digest, tensors)
        if self.manifest is not None and not differences(self.manifest.tensors, tensors):
            return  # cutting a large model takes long
        try:
            self._adopt(cut(tensors, self._num_fragments, self._placed.count))
        except ValueError as error:
            raise ManifestMismatch(f"the model cannot be cut: {error}") from error

    def tell_keys(self, ties: Sequence[Tie]) -> None:
        """Take the state_dict names that the first learner of this epoch declares."""
        assert self.manifest is not None, "a model is adopted first"
        if not self._knows_keys and self.manifest.ties != tuple(ties):
            self.manifest = replace(self.manifest, ties=tuple(ties))
        self._knows_keys = True

    def check_frozen(self, frozen: Sequence[FrozenTensor]) -> None:
        """Compare a learner's frozen tensors with those declared before. Raises FrozenMismatch.

        They belong to the learners with leases and to the versions of this epoch. So if the first learner after a
        restart has other tensors and leaves again, these bind nobody.
        """
        if not self._membership.live() and not any(
            s.version and s.epoch == self.epoch for s in self.fragments.values()
        ):
            self.frozen.forget()
        self.frozen.check(frozen)

    def owned(self, fragment_id: int) -> FragmentState:
        """The state of a fragment that this shard owns. Raises UnknownFragment."""
        state = self.fragments.get(fragment_id)
        if state is None:
            mine = ", ".join(map(str, sorted(self.fragments))) or "none yet"
            raise UnknownFragment(f"shard {self._placed.index} owns fragments {mine}, not {fragment_id}")
        return state

    # ------------------------------------------------------------ the merge rule

    def hear_inner(self, learner_id: str, inner: str) -> None:
        if not self._chooses:
            return
        merge, what = ("agreement", "Adam or its kin") if inner == ADAM else ("mean", "another optimizer than Adam")
        if not self.merge:
            self._choose(merge, f"{learner_id} trains with {what}")
        elif merge != self.merge:
            self._outbox.note(MergeStays(self.merge, learner_id, f"it trains with {what}"))

    def merge_rule(self) -> str:
        if not self.merge:
            self._choose("mean", "no learner has said what it trains with: join(optimizer=) does")
        return self.merge

    def _choose(self, merge: str, why: str) -> None:
        self.merge = merge
        self._outbox.note(MergeChosen(merge, why))

    # ------------------------------------------------------------ making versions

    def restore(self, manifest: Manifest, fragments: Sequence[Restored]) -> None:
        """Continue from stored versions. Call it before any learner joins."""
        assert self.manifest is None, "a shard that has a model cannot be restored"
        self.began_with_nothing = False
        self._adopt(manifest)
        for restored in fragments:
            self.fragments[restored.record.fragment_id].restore(restored, self.epoch)
            if self._chooses:
                self.merge = self.merge or restored.record.merge
        self._check_budget()

    def mirror(self, manifest: Manifest, shard_index: int) -> None:
        """Adopt the model and the index of the mirrored shard."""
        if self.manifest is None or self.manifest.digest != manifest.digest:
            self._placed = self._placed.model_copy(update={"index": shard_index, "count": manifest.num_shards})
            self._adopt(manifest)
        self.manifest = manifest

    def mirrored(self, record: Record, published: Published) -> None:
        """The mirrored shard announced this version: announce it."""
        state = self.fragments[record.fragment_id]
        state.mirror(record, published)
        self._outbox.tell_live(state.announcement())

    def seed_record(self, fragment_id: int) -> Record:
        seeding = self.fragments[fragment_id].seeding
        assert seeding is not None
        return replace(seeding.copy(), epoch=self.epoch)

    def seeded(self, record: Record, values: Values, published: Published) -> None:
        """Version 0 and this record are durable: announce it."""
        state = self.fragments[record.fragment_id]
        state.seed(record, values, published)
        self._announce(state)

    def next_record(self, fragment_id: int) -> Record:
        """The record of the version that is being computed. Call it once per version.

        Learners may join or leave until `Shard.committed` receives the same record.
        """
        state = self.fragments[fragment_id]
        assert state.closed is not None
        return next_record(
            state.record, state.closed, self.epoch, self._membership,
            strangers_max=2 * self._placed.max_learners, merge=self.merge if self._chooses else "",
        )  # fmt: skip

    def committed(self, record: Record, published: Published) -> None:
        """The next version and this record are durable: announce it."""
        state = self.fragments[record.fragment_id]
        state.advance(record, published)
        self._forget_replaced(state)
        self._announce(state)

    def end_without(self) -> None:
        """Once the model has its budget and no learner is left, expect no last versions of buffers."""
        if self.closing and not self._membership.live():
            self.closing.clear()
            self._check_budget()

    # ------------------------------------------------------------ merged contributions

    def forget(self, learner_id: str) -> None:
        for state in self.fragments.values():
            state.forget(learner_id)

    def forget_others(self, learner_id: str, process_id: str) -> None:
        """Forget merges of earlier processes under this id."""
        for state in self.fragments.values():
            if state.record.merged_by.get(learner_id, process_id) != process_id:
                state.forget(learner_id)

    # ------------------------------------------------------------ lost versions

    def look_for_losses(self, learner_id: str, held: Sequence[Held], tokens_seen: int = 0) -> list[FragmentState]:
        """Look for versions that a learner holds and this shard has lost. Returns the fragments that were renamed.

        A lost version of the restored version's epoch is the hard case: another version will get its number. Then the
        restored version is renamed, so that this learner pulls it. `tokens_seen`: the tokens merged into the newest
        version that the learner has seen.
        """
        renamed = []
        for theirs in held:
            state = self.fragments.get(theirs.fragment_id)
            if state is not None and theirs.epoch != self.epoch and state.is_beside(theirs):
                state.forget(learner_id)  # none of these versions holds its contributions since then
            if state is None or theirs.epoch == self.epoch or not state.lacks(theirs):
                continue
            recovered = state.recovered
            version = 0 if recovered is None else recovered.version
            if theirs.version > state.seen_lost:
                state.seen_lost = theirs.version
                lost = max(0, tokens_seen - state.recovered_tokens)
                self._outbox.note(
                    VersionsLost(theirs.fragment_id, theirs.epoch, version, theirs.version, learner_id, lost)
                )
            if recovered is not None and theirs.epoch == recovered.epoch == state.epoch:
                state.rename(self.epoch)
                self._outbox.tell_live(state.announcement())
                renamed.append(state)
        return renamed

    def look_for_more(self, learner_id: str, tokens_seen: int, since: float) -> None:
        """Let a learner replace the values of fragments that were seeded from nothing after `since`, if it has seen
        more tokens. Until then it hears of no version, or it would lose its values."""
        for state in self.fragments.values():
            if state.knows_less(tokens_seen, since):
                state.may_bring[learner_id] = tokens_seen

    # ------------------------------------------------------------ questions

    @property
    def of_model(self) -> list[FragmentState]:
        return [s for s in self.fragments.values() if s.fragment.traits.is_of_model]

    @property
    def tokens_merged(self) -> int:
        states = self.of_model
        return sum(s.tokens_merged for s in states) // len(states) if states else 0

    def is_final(self, state: FragmentState) -> bool:
        """Whether the fragment gets no more versions. Buffers continue as long as the model."""
        return self.budget.is_reached(state) if state.fragment.traits.is_of_model else self.done

    @property
    def all_seeded(self) -> bool:
        return bool(self.fragments) and all(s.seeded for s in self.fragments.values())

    # ------------------------------------------------------------ helpers

    def _forget_replaced(self, state: FragmentState) -> None:
        """Forget processes that were replaced while the version was being written."""
        for learner_id, process_id in list(state.record.merged_by.items()):
            member = self._membership.get(learner_id)
            if member is not None and member.process_id != process_id:
                state.forget(learner_id)

    def _adopt(self, manifest: Manifest) -> None:
        self.manifest = manifest
        owned = manifest.owned_by(self._placed.index)
        self.phases = Phases()
        self.fragments = {f.fragment_id: FragmentState.unseeded(f, self.phases) for f in owned}

    def _announce(self, state: FragmentState) -> None:
        told = [m for m in self._membership.live() if m.learner_id not in state.may_bring]
        self._outbox.tell_all(told, state.announcement())
        if not state.fragment.traits.is_of_model or self.budget.is_reached(state):  # otherwise the run is not over
            self._check_budget()

    def _check_budget(self) -> None:
        states = self.of_model
        if self.done or not states or not all(s.seeded and self.budget.is_reached(s) for s in states):
            return
        if not self._is_closing:
            self._is_closing = True
            whole = (s for s in self.fragments.values() if s.fragment.traits.is_whole and s.seeded)
            self.closing = {s.fragment.fragment_id: s.version + (1 if s.collected is None else 2) for s in whole}
        self.closing = {i: last for i, last in self.closing.items() if self.fragments[i].version < last}
        if self.closing and self._membership.live():
            return
        if any(s.computing for s in self.fragments.values()):
            return  # a version of a buffer is on its way, and all learners should take the same last versions
        self.closing.clear()
        self.done = True
        self._outbox.note(BudgetReached(self.tokens_merged))
        self._outbox.tell_live(Stop())
