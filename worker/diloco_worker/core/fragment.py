"""One fragment of one learner: which version it has, which round asks for it, and the contribution that is under way.

A contribution is under way until a version tells whether it was merged. Merged: its tokens are in the model. Not
merged: the fragment is as if nothing had been pushed, and the work is in the next contribution.

The tensors, and the arithmetic with them, are in tensors.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from diloco_common.wire.manifest import Fragment
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.connection import Lease
from diloco_worker.core.tensors import ContributionTensors, Difference, FragmentTensors


class Fate(Enum):
    """What became of a contribution."""

    MERGED = "merged"  # it is in a version
    CARRIED = "carried"  # it is in none; the work is in the next contribution
    FORGOTTEN = "forgotten"  # the shard no longer knows; counted as merged, so that nothing counts twice


class Pushes:
    """What was sent of one contribution, and whether to send it again. Owned by whoever sends.

    A round may ask again for what is under way. What was sent under one lease may be sent again under the next. Only an
    answer under the current lease counts. LATE or REJECTED is then final, whatever became of the pushes before. A shard
    that holds the contribution, or has merged it, answers DUPLICATE instead. It takes nothing more that was sent under
    older leases.
    """

    def __init__(self) -> None:
        self.may_have_arrived = False
        """Whether values of the contribution were ever sent: a shard may have them. Never reset."""
        self.is_refused = False
        """Whether it came too late, or was refused. Nobody pushes it again. Never reset."""
        self._under_way: set[Lease] = set()

    def begin(self, lease: Lease) -> bool:
        """Whether to push now: not while a push under this lease is under way, and not what was refused."""
        if self.is_refused or lease in self._under_way:
            return False
        self._under_way.add(lease)
        return True

    def sending_values(self) -> None:
        """Values are about to leave. Word that they are not finite is no value: no version can hold it."""
        self.may_have_arrived = True

    def ended(self, lease: Lease, answer: PushAnswer | None) -> None:
        """The push under this lease has its answer; None: it will never have one, or not under the current lease."""
        self._under_way.discard(lease)
        if answer is not None and answer.outcome in (Outcome.LATE, Outcome.REJECTED):
            self.is_refused = True


@dataclass(eq=False)
class PendingContribution:
    """A contribution, from the step boundary that takes it until its fate is known."""

    fragment_id: int
    round: int
    shard_epoch: int
    """Of the shard that asked for it: it ends with that epoch, unless a version holds it by then."""
    epoch: int
    """That the base version was made in."""
    base_version: int
    since: int
    """The learner's count of tokens where the work in it begins."""
    tokens: int
    steps: int
    tensors: ContributionTensors
    pushes: Pushes = field(default_factory=Pushes)
    """Belongs to the thread that pushes."""
    asked_again: AskedRound | None = None
    """The round has asked once more while this was under way. If this turns out to be refused, it waits for another."""
    may_have_arrived: bool | None = None
    """As all ranks have agreed on, whether a shard may have all of it. None: there is one, and `pushes` knows."""

    def begin_push(self, lease: Lease) -> bool:
        """Whether to push it now under this lease. If so, tell `pushes` when that has ended.

        It is pushed only in the epoch of the shard that it was taken for. When the learner joins the next epoch, it
        hears what that holds or has merged. The rest is given back then (`LearnerCore.rejoined`), and would count twice
        if it were pushed as well.
        """
        return lease.epoch == self.shard_epoch and self.pushes.begin(lease)

    def fate_in(self, version: int, epoch: int, merged_version: int, forgotten_version: int) -> Fate:
        """What this version, made after its round, says about it. `epoch`: that the version was made in."""
        if epoch < self.shard_epoch:
            return Fate.CARRIED  # of a line that was over before the round was opened
        if self.round <= version and self.round == merged_version:
            return Fate.MERGED
        may_have_arrived = self.pushes.may_have_arrived if self.may_have_arrived is None else self.may_have_arrived
        if self.round <= min(version, forgotten_version) and may_have_arrived:
            return Fate.FORGOTTEN
        return Fate.CARRIED


@dataclass(frozen=True, slots=True)
class AskedRound:
    """A round that asked for the fragment."""

    round: int
    shard_epoch: int
    epoch: int
    """That the base version was made in."""


class LearnerFragment:
    """What one learner knows of one fragment."""

    def __init__(self, fragment: Fragment, tensors: FragmentTensors) -> None:
        self.fragment = fragment
        self.tensors = tensors
        self.version = 0
        """Version of the anchor; compares only inside `epoch`, in which it was made."""
        self.epoch = -1  # made by no shard
        self.contribution: PendingContribution | None = None
        """The one that is under way."""
        self.asked: AskedRound | None = None
        """The round that asked for this fragment last, until it is answered."""
        self._base_tokens = 0  # of the learner, when the counters of this fragment began
        self._base_steps = 0

    @property
    def is_adopted(self) -> bool:
        """Whether the learner has this fragment from a shard yet."""
        return self.epoch >= 0

    def tokens_since(self, tokens: int) -> int:
        """Tokens trained on that no version holds yet, given the learner's total."""
        return tokens - self._base_tokens

    def contribute(self, tokens: int, steps: int) -> PendingContribution:
        """A contribution to the round that asked. `tokens` and `steps`: the learner's totals now."""
        assert self.asked is not None
        asked, self.asked = self.asked, None
        self.contribution = PendingContribution(
            self.fragment.fragment_id, asked.round, asked.shard_epoch, self.epoch, self.version, self._base_tokens,
            tokens - self._base_tokens, steps - self._base_steps, self.tensors.contribute(asked.round),
        )  # fmt: skip
        return self.contribution

    def give_back(self) -> None:
        """The contribution was not merged: as if it had not been taken."""
        self.contribution = None
        self.tensors.give_back()

    def begin_with_own(self, tokens: int, steps: int) -> None:
        """Train on with the model's own values until a version arrives: what is trained from now on is carried."""
        self.tensors.anchor = self.tensors.values()
        self._restart_counters(tokens, steps)

    def adopt(self, values: Tensor, version: int, epoch: int, tokens: int, steps: int) -> None:
        """The first version: it replaces what the model holds."""
        self.tensors.adopt(values)
        self.version, self.epoch = version, epoch
        self._restart_counters(tokens, steps)

    def carry(
        self, values: Tensor, version: int, epoch: int, *, merged: bool, difference: Difference | None = None,
        steps: int = 0,
    ) -> None:  # fmt: skip
        """Put a version under the local progress; the work that is in no version goes on. `steps`: the learner's
        total."""
        since = steps - self._base_steps
        before = self.contribution.steps if self.contribution is not None else 0
        if merged:
            since -= before
        self.tensors.carry(values, merged=merged, difference=difference, steps=since, before=before)
        self._advance(version, epoch, merged=merged)

    def overwrite(self, values: Tensor, version: int, epoch: int, *, merged: bool, tokens: int, steps: int) -> None:
        """Put a version in the place of the local progress; what was trained since the anchor does not count again."""
        self.tensors.overwrite(values, merged=merged)
        self._advance(version, epoch, merged=merged)
        self._restart_counters(tokens, steps)

    def _advance(self, version: int, epoch: int, *, merged: bool) -> None:
        self.version, self.epoch = version, epoch
        if merged:
            assert self.contribution is not None
            tokens, steps = self.contribution.tokens, self.contribution.steps
            self._restart_counters(self._base_tokens + tokens, self._base_steps + steps)
            self.contribution = None

    def _restart_counters(self, tokens: int, steps: int) -> None:
        self._base_tokens, self._base_steps = tokens, steps
