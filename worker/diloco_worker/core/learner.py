"""The learner: what it does at a step boundary. Owned by the training thread.

The shell hands in what came from the shards (`collect`, `answered`, `arrived`, `rejoined`), and has the snapshots of
what `snapshots` returns taken, encoded and sent. Versions are laid under the local progress between two steps;
nothing here waits for anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from diloco_common.errors import WrongRound
from diloco_common.manifest import Manifest
from diloco_common.messages import Collect, FragmentStatus, LearnerPolicy, Outcome, PushAnswer
from diloco_worker.core.fragment import LearnerFragment, Pending, Shift, Wanted
from diloco_worker.core.replica import Replica


class LearnerCore:
    """All fragments of one learner, and its counters."""

    def __init__(self, replica: Replica, manifest: Manifest, policy: LearnerPolicy) -> None:
        self.manifest = manifest
        self.policy = policy
        self.inner_step = 0
        self.tokens = 0
        self.contributions: Counter[str] = Counter()
        """Contributions by fate: taken, merged, carried (not merged; the work went on), forgotten (the shard no longer
        knows; counted as merged, so that nothing counts twice), and refusals by code."""
        self.tokens_carried = 0
        """Tokens of contributions that were not merged and whose work the next ones hold, summed over fragments."""
        self._given_back: dict[int, Pending] = {}  # the last one per fragment, until it is taken
        self.fragments = {
            f.fragment_id: LearnerFragment(f, replica, error_feedback=policy.error_feedback) for f in manifest.fragments
        }

    @property
    def unmerged(self) -> int:
        """Contributions under way whose fate is not known."""
        return sum(f.pending is not None for f in self.fragments.values())

    # ------------------------------------------------------------ at a step boundary

    def stepped(self, tokens: int) -> None:
        """An inner step on `tokens` tokens has ended."""
        self.inner_step += 1
        self.tokens += tokens

    def snapshots(self) -> list[Pending]:
        """The contributions that rounds ask for, where there is something to contribute.

        On a CPU their snapshots are still to be taken (`Pending.take_snapshot`), soon and in any thread: until then
        `rebasable` says that no version can be applied to the fragment. A round that asks again for the contribution
        that is under way gets the same one.
        """
        taken = []
        for fragment in self.fragments.values():
            wanted, pending = fragment.wanted, fragment.pending
            if wanted is None or wanted.epoch != fragment.epoch:
                continue
            if pending is not None:
                if (pending.round, pending.shard_epoch) == (wanted.round, wanted.shard_epoch):
                    fragment.wanted = None
                    pending.read_again()  # nobody had read it where no shard was there to push to
                    taken.append(pending)
                continue  # of an earlier round: wait until its fate is known
            if fragment.tokens_since(self.tokens) > 0:
                taken.append(fragment.take(self.tokens, self.inner_step))
                self.contributions["taken"] += 1
        return taken

    # ------------------------------------------------------------ what came from the shards

    def collect(self, directive: Collect, epoch: int) -> None:
        """A round of a shard in that epoch asks for a fragment. Answered once the learner has a version that was made
        in the epoch that the directive names."""
        fragment = self.fragments[directive.fragment_id]
        if directive.epoch != fragment.epoch or directive.round > fragment.version:
            fragment.wanted = Wanted(directive.round, epoch, directive.epoch)

    def answered(self, fragment_id: int, round_number: int, answer: PushAnswer) -> None:
        """What holds for a contribution. LATE and REJECTED tell that it was not merged; that it was, only a version
        tells."""
        fragment = self.fragments[fragment_id]
        pending = fragment.pending
        if pending is None or pending.round != round_number:
            return
        if answer.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            return
        if answer.outcome is Outcome.REJECTED and answer.code != WrongRound.code:
            self.contributions[answer.code] += 1
        self._carried(fragment)

    def rebasable(self, fragment_id: int) -> bool:
        """Whether `arrived` may be called for this fragment: not while its snapshot is being taken. Try again later."""
        return self.fragments[fragment_id].rebasable

    def shift_to(self, fragment_id: int, values: Tensor, version: int, merged_version: int) -> Shift | None:
        """Compute ahead what `arrived` will need of a version; None where it needs nothing.

        May be called in any thread. Takes a tensor as large as the fragment.
        """
        if self.policy.on_commit != "carry":
            return None
        return self.fragments[fragment_id].shift_to(values, version, merged_version)

    def arrived(
        self, fragment_id: int, version: int, epoch: int, values: Tensor, merged_version: int,
        shift: Shift | None = None, forgotten_version: int = 0,
    ) -> bool:  # fmt: skip
        """Apply a version: float32 [num_elements] on the model's device, kept as the anchor.

        `shift`: what `shift_to` gave for it. Returns False, and changes nothing, where the learner has this version or
        a later one of the same epoch.
        """
        fragment = self.fragments[fragment_id]
        assert fragment.rebasable
        if fragment.anchor is None:
            fragment.adopt(values, version, epoch, self.tokens, self.inner_step)
            return True
        if epoch == fragment.epoch and version <= fragment.version:
            return False
        merged = self._resolve(fragment, version, merged_version, forgotten_version)
        if self.policy.on_commit == "carry":
            fragment.carry(values, version, epoch, merged=merged, shift=shift)
        else:
            keep = self.policy.blend_alpha if self.policy.on_commit == "blend" else 0.0
            fragment.overwrite(
                values, version, epoch, merged=merged, keep=keep, tokens=self.tokens, steps=self.inner_step
            )
        if fragment.wanted is not None and fragment.wanted.epoch == epoch and fragment.wanted.round <= version:
            fragment.wanted = None  # that round is over
        return True

    def begin_without(self) -> None:
        """Train on from the model's own values where no version has come: its shard is away."""
        for fragment in self.fragments.values():
            if not fragment.adopted:
                fragment.begin_with_own(self.tokens, self.inner_step)

    def rejoined(self, statuses: Sequence[FragmentStatus], epoch: int) -> None:
        """A shard in that epoch answered Join. What an earlier one had not made a version of is gone, and must be sent
        again."""
        for status in statuses:
            fragment = self.fragments[status.fragment_id]
            pending = fragment.pending
            if fragment.wanted is not None and fragment.wanted.shard_epoch != epoch:
                fragment.wanted = None
            if pending is None or pending.shard_epoch == epoch:
                continue
            merged = pending.merged_in(status.version, status.merged_version)
            if not (status.seeded and (merged or pending.forgotten_in(status.version, status.forgotten_version))):
                self._carried(fragment)

    def take_given_back(self) -> list[Pending]:
        """Contributions that turned out not to be merged. Call it after every event: one per fragment is remembered."""
        given_back, self._given_back = self._given_back, {}
        return list(given_back.values())

    # ------------------------------------------------------------ helpers

    def _resolve(self, fragment: LearnerFragment, version: int, merged_version: int, forgotten_version: int) -> bool:
        """Whether the pending contribution counts as merged in this version; gives it back if it never will be.

        One that the shard has forgotten does: work that is not in is lost, rather than counted twice.
        """
        pending = fragment.pending
        if pending is None or (version < pending.round and pending.snapshot is not None):
            return False
        if pending.merged_in(version, merged_version):
            self.contributions["merged"] += 1
            return True
        if pending.forgotten_in(version, forgotten_version):
            self.contributions["forgotten"] += 1
            return True
        self._carried(fragment)
        return False

    def _carried(self, fragment: LearnerFragment) -> None:
        assert fragment.pending is not None
        self.contributions["carried"] += 1
        self.tokens_carried += fragment.pending.tokens
        self._given_back[fragment.pending.fragment_id] = fragment.pending
        fragment.give_back()
