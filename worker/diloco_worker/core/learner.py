"""The learner: what it does at a step boundary. Owned by the training thread.

The shell hands in what came from the shards (`collect`, `answered`, `arrived`, `rejoined`), and has encoded and sent
what `contribute` returns. Versions are applied between two steps. Nothing here waits for anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco_common.errors import WrongRound
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Outcome, PushAnswer
from diloco_worker.core.fragment import AskedRound, Fate, LearnerFragment, PendingContribution
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import Difference, FragmentTensors


@dataclass(frozen=True, slots=True)
class Applied:
    """A version was applied."""

    contribution: PendingContribution | None = None
    """The one whose fate the version tells; None: it tells none."""
    fate: Fate | None = None


class LearnerCore:
    """All fragments of one learner, and its counters."""

    def __init__(self, replica: Replica, manifest: Manifest, policy: LearnerPolicy) -> None:
        self.manifest = manifest
        self.policy = policy
        self.inner_step = 0
        self.tokens = 0
        self.contributions: Counter[str] = Counter()
        """Contributions by what became of them: taken, the fates (`Fate`), and refusals by code."""
        self.tokens_carried = 0
        """Tokens of contributions that were not merged and whose work the next ones hold, summed over the fragments of
        the model."""
        self._carried: list[PendingContribution] = []
        self.fragments = {
            f.fragment_id: LearnerFragment(f, FragmentTensors(replica.held(f), replica, policy))
            for f in manifest.fragments
        }
        self.of_model = [f for f in self.fragments.values() if f.fragment.traits.is_of_model]
        """Those that the progress of the run is counted by."""
        self.exported = [f for f in self.fragments.values() if f.fragment.traits.is_exported]
        """What a file of the model holds: with buffers."""

    @property
    def unmerged(self) -> int:
        """Contributions under way whose fate is not known: neither merged nor carried nor forgotten."""
        return sum(f.contribution is not None for f in self.fragments.values())

    @property
    def tokens_unmerged(self) -> float:
        """Tokens trained on that no version holds, as far as this learner has heard; averaged over the fragments of
        the model."""
        begun = (f for f in self.of_model if f.tensors.anchor is not None)
        return sum(f.tokens_since(self.tokens) for f in begun) / len(self.of_model)

    @property
    def last_rounds(self) -> frozenset[int]:
        """The fragments that a learner that ends wants a round of: no version has all of its work, and no contribution
        is under way whose fate might change that. Momentum goes with its learner."""
        begun = (f for f in self.exported if f.is_adopted and f.contribution is None)
        return frozenset(f.fragment.fragment_id for f in begun if f.tokens_since(self.tokens) > 0)

    # ------------------------------------------------------------ at a step boundary

    def stepped(self, tokens: int) -> None:
        """An inner step on `tokens` tokens has ended."""
        self.inner_step += 1
        self.tokens += tokens

    def contribute(self) -> list[PendingContribution]:
        """The contributions that rounds ask for, where there is something to contribute.

        They hold their snapshots. Where the replica reads later, these are still to be taken, soon and in any thread
        (`ContributionTensors.take_snapshot`): until then the fragment `is_being_read`. A round that asks again for the
        contribution that is under way gets the same one.
        """
        taken = []
        for fragment in self.fragments.values():
            asked, contribution = fragment.asked, fragment.contribution
            if asked is None or asked.epoch != fragment.epoch:
                continue
            if contribution is not None:
                if (contribution.round, contribution.shard_epoch) == (asked.round, asked.shard_epoch):
                    fragment.asked, contribution.asked_again = None, asked
                    taken.append(contribution)
                continue  # of an earlier round: wait until its fate is known
            if fragment.tokens_since(self.tokens) > 0:
                taken.append(fragment.contribute(self.tokens, self.inner_step))
                self.contributions["taken"] += 1
        return taken

    # ------------------------------------------------------------ what came from the shards

    def collect(self, directive: Collect, epoch: int) -> None:
        """A round of a shard in that epoch asks for a fragment. Answered once the learner has a version that was made
        in the epoch that the directive names."""
        fragment = self.fragments[directive.fragment_id]
        if directive.epoch != fragment.epoch or directive.round > fragment.version:
            fragment.asked = AskedRound(directive.round, epoch, directive.epoch)

    def answered(self, fragment_id: int, round_number: int, answer: PushAnswer, tokens: int = 0) -> None:
        """What holds for a contribution (of so many tokens, if said). LATE and REJECTED tell that it was not merged;
        that it was, only a version tells."""
        fragment = self.fragments[fragment_id]
        contribution = fragment.contribution
        if contribution is None or contribution.round != round_number or tokens not in (0, contribution.tokens):
            return
        if answer.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            return
        if answer.outcome is Outcome.REJECTED and answer.code != WrongRound.code:
            self.contributions[answer.code] += 1
        self._carry_on(fragment)
        fragment.asked = fragment.asked or contribution.asked_again

    def is_being_read(self, fragment_id: int) -> bool:
        """Whether `arrived` must wait for this fragment's snapshot. Ask again later."""
        return self.fragments[fragment_id].tensors.is_being_read

    def arrived(
        self, fragment_id: int, version: int, epoch: int, values: Tensor, merged_version: int,
        difference: Difference | None = None, forgotten_version: int = 0,
    ) -> Applied | None:  # fmt: skip
        """Apply a version, on the model's device; it is kept as the anchor.

        `difference`: from what `FragmentTensors.reference_of` gave for it. Returns None, and changes nothing, where the
        learner has this version or a later one of the same epoch.
        """
        fragment = self.fragments[fragment_id]
        assert not fragment.tensors.is_being_read
        if fragment.tensors.anchor is None:
            fragment.adopt(values, version, epoch, self.tokens, self.inner_step)
            return Applied()
        if epoch == fragment.epoch and version <= fragment.version:
            return None
        applied = self._resolve(fragment, version, epoch, merged_version, forgotten_version)
        merged = applied.fate in (Fate.MERGED, Fate.FORGOTTEN)
        if self.policy.on_commit == "carry":
            fragment.carry(values, version, epoch, merged=merged, difference=difference, steps=self.inner_step)
        else:
            fragment.overwrite(values, version, epoch, merged=merged, tokens=self.tokens, steps=self.inner_step)
        if fragment.asked is not None and fragment.asked.epoch == epoch and fragment.asked.round <= version:
            fragment.asked = None  # that round is over
        return applied

    def begin_without(self) -> None:
        """Train on from the model's own values where no version has come: its shard is away."""
        for fragment in self.fragments.values():
            if not fragment.is_adopted:
                fragment.begin_with_own(self.tokens, self.inner_step)

    def rejoined(self, statuses: Sequence[FragmentStatus], epoch: int) -> None:
        """A shard in that epoch answered Join. What an earlier epoch had not made a version of is gone, and must be
        sent again."""
        for status in statuses:
            fragment = self.fragments[status.fragment_id]
            contribution = fragment.contribution
            if fragment.asked is not None and fragment.asked.shard_epoch != epoch:
                fragment.asked = None
            if contribution is None or contribution.shard_epoch == epoch:
                continue
            fate = contribution.fate_in(status.version, status.epoch, status.merged_version, status.forgotten_version)
            if not status.seeded or fate is Fate.CARRIED:
                self._carry_on(fragment)

    def take_carried(self) -> list[PendingContribution]:
        """The contributions that turned out not to be merged since the last call."""
        carried, self._carried = self._carried, []
        return carried

    # ------------------------------------------------------------ helpers

    def _resolve(
        self, fragment: LearnerFragment, version: int, epoch: int, merged_version: int, forgotten_version: int
    ) -> Applied:
        """What this version tells of the contribution under way; gives it back if it never will be merged."""
        contribution = fragment.contribution
        if contribution is None or (version < contribution.round and contribution.tensors.snapshot is not None):
            return Applied()
        fate = contribution.fate_in(version, epoch, merged_version, forgotten_version)
        if fate is Fate.CARRIED:
            self._carry_on(fragment)
        else:
            self.contributions[fate.value] += 1
        return Applied(contribution, fate)

    def _carry_on(self, fragment: LearnerFragment) -> None:
        """The contribution was not merged: its work goes on into the next one."""
        assert fragment.contribution is not None
        self.contributions[Fate.CARRIED.value] += 1
        if fragment.fragment.traits.is_of_model:
            self.tokens_carried += fragment.contribution.tokens
        self._carried.append(fragment.contribution)
        fragment.give_back()
