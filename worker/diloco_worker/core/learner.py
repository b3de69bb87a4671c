"""The learner's decisions at a step boundary. Owned by the training thread.

The shell passes in the messages of shards (`collect`, `answered`, `arrived`, `rejoined`), and encodes and sends what
`contribute` returns. Versions are applied between two steps. Nothing here waits.
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
    contribution: PendingContribution | None = None
    """The contribution whose fate the version decides; None: none."""
    fate: Fate | None = None


class LearnerCore:
    """All fragments of one learner, and its counters."""

    def __init__(self, replica: Replica, manifest: Manifest, policy: LearnerPolicy) -> None:
        self.manifest = manifest
        self.policy = policy
        self.inner_step = 0
        self.tokens = 0
        self.contributions: Counter[str] = Counter()
        """Counts of contributions taken, of each `Fate`, and of refusals by code."""
        self.tokens_carried = 0
        """Tokens of contributions that were not merged, and whose work the next ones hold; over all model fragments."""
        self._carried: list[PendingContribution] = []
        self.fragments = {
            f.fragment_id: LearnerFragment(f, FragmentTensors(replica.held(f), replica, policy.push_encoding))
            for f in manifest.fragments
        }
        self.of_model = [f for f in self.fragments.values() if f.fragment.traits.is_of_model]
        """Fragments that count for the run's progress."""
        self.exported = [f for f in self.fragments.values() if f.fragment.traits.is_exported]
        """Fragments that a file of the model contains, including buffers."""

    @property
    def unmerged(self) -> int:
        return sum(f.contribution is not None for f in self.fragments.values())

    @property
    def tokens_unmerged(self) -> float:
        """Tokens trained that no version holds, as far as this learner knows; averaged over the model's fragments."""
        begun = (f for f in self.of_model if f.tensors.anchor is not None)
        return sum(f.tokens_since(self.tokens) for f in begun) / len(self.of_model)

    @property
    def last_rounds(self) -> frozenset[int]:
        """Fragments for which a learner that ends needs a last round: no version holds all of their work, and no
        contribution in flight might change that. Momentum is not handed over."""
        begun = (f for f in self.exported if f.is_adopted and f.contribution is None)
        return frozenset(f.fragment.fragment_id for f in begun if f.tokens_since(self.tokens) > 0)

    # ------------------------------------------------------------ at a step boundary

    def stepped(self, tokens: int) -> None:
        self.inner_step += 1
        self.tokens += tokens

    def contribute(self) -> list[PendingContribution]:
        """Take the contributions that rounds ask for, if there is work to contribute.

        A round that asks again for the contribution in flight gets the same one.
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
                continue  # of an earlier round: wait for its fate
            if fragment.tokens_since(self.tokens) > 0:
                taken.append(fragment.contribute(self.tokens, self.inner_step))
                self.contributions["taken"] += 1
        return taken

    # ------------------------------------------------------------ messages from the shards

    def collect(self, directive: Collect, epoch: int) -> None:
        """A round of a shard in that epoch asks for a fragment. It is answered once the learner has a version made in
        the epoch that the directive names."""
        fragment = self.fragments[directive.fragment_id]
        if directive.epoch != fragment.epoch or directive.round > fragment.version:
            fragment.asked = AskedRound(directive.round, epoch, directive.epoch)

    def answered(self, fragment_id: int, round_number: int, answer: PushAnswer, tokens: int = 0) -> None:
        """The outcome of a push (of a contribution with `tokens` tokens, if not 0). LATE and REJECTED show that it was
        not merged; only a version shows that it was."""
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

    def arrived(
        self, fragment_id: int, version: int, epoch: int, values: Tensor, merged_version: int,
        difference: Difference | None = None, forgotten_version: int = 0,
    ) -> Applied | None:  # fmt: skip
        """Apply a version on the model's device, and keep it as the anchor.

        `difference`: computed from `FragmentTensors.reference_of`. Returns None, and changes nothing, if the learner
        has this version or a later one of the same epoch.
        """
        fragment = self.fragments[fragment_id]
        if fragment.tensors.anchor is None:
            fragment.adopt(values, version, epoch, self.tokens, self.inner_step)
            return Applied()
        if epoch == fragment.epoch and version <= fragment.version:
            return None
        applied = self._resolve(fragment, version, epoch, merged_version, forgotten_version)
        merged = applied.fate in (Fate.MERGED, Fate.FORGOTTEN)
        fragment.carry(values, version, epoch, merged=merged, difference=difference, steps=self.inner_step)
        if fragment.asked is not None and fragment.asked.epoch == epoch and fragment.asked.round <= version:
            fragment.asked = None  # that round is over
        return applied

    def begin_without(self) -> None:
        """Train from the model's own values where no version has arrived because the shard is away."""
        for fragment in self.fragments.values():
            if not fragment.is_adopted:
                fragment.begin_with_own(self.tokens, self.inner_step)

    def rejoined(self, statuses: Sequence[FragmentStatus], epoch: int) -> None:
        """A shard in that epoch answered Join. Carry earlier epochs' contributions that no version holds."""
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
        carried, self._carried = self._carried, []
        return carried

    # ------------------------------------------------------------ helpers

    def _resolve(
        self, fragment: LearnerFragment, version: int, epoch: int, merged_version: int, forgotten_version: int
    ) -> Applied:
        """Decide the fate of the contribution in flight by this version; give it back if it can no longer be merged."""
        contribution = fragment.contribution
        if contribution is None or version < contribution.round:
            return Applied()
        fate = contribution.fate_in(version, epoch, merged_version, forgotten_version)
        if fate is Fate.CARRIED:
            self._carry_on(fragment)
        else:
            self.contributions[fate.value] += 1
        return Applied(contribution, fate)

    def _carry_on(self, fragment: LearnerFragment) -> None:
        """The contribution was not merged: the next one holds its work."""
        assert fragment.contribution is not None
        self.contributions[Fate.CARRIED.value] += 1
        if fragment.fragment.traits.is_of_model:
            self.tokens_carried += fragment.contribution.tokens
        self._carried.append(fragment.contribution)
        fragment.give_back()
