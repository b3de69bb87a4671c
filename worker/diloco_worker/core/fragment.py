"""One fragment of one learner: its version, the round that asks for it, and the contribution in flight.

A contribution is in flight until a version tells whether it was merged. If it was, its tokens are in the model. If not,
the fragment continues as if nothing had been pushed, and the next contribution holds the work.

The tensors, and the arithmetic with them, are in tensors.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from diloco_common.wire.manifest import Fragment
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.tensors import ContributionTensors, Difference, FragmentTensors


class Lease(NamedTuple):
    epoch: int
    generation: int
    """Starts again in each epoch; 0: no lease."""


NO_LEASE = Lease(0, 0)


class Fate(Enum):
    MERGED = "merged"  # a version holds it
    CARRIED = "carried"  # no version holds it; the next contribution holds the work
    FORGOTTEN = "forgotten"  # the shard no longer knows; counted as merged, so that nothing counts twice


class Pushes:
    """What was sent of one contribution, and whether to send it again. Owned by the sending thread.

    A round may ask again for a contribution in flight, and a contribution sent under one lease may be sent again under
    the next. Only an answer under the current lease counts. LATE or REJECTED is then final, whatever happened to
    earlier pushes: a shard that holds the contribution or has merged it answers DUPLICATE instead, and takes nothing
    more that was sent under older leases.
    """

    def __init__(self) -> None:
        self.may_have_arrived = False
        """Whether values were ever sent, so that a shard may have them. Never reset."""
        self.is_refused = False
        """Whether it was late or refused, and must not be pushed again. Never reset."""
        self._under_way: set[Lease] = set()

    def begin(self, lease: Lease) -> bool:
        """Whether to push now: not during a push under the same lease, and not after a refusal."""
        if self.is_refused or lease in self._under_way:
            return False
        self._under_way.add(lease)
        return True

    def sending_values(self) -> None:
        """Values are about to be sent. A message that they are not finite sends none, so no version can hold them."""
        self.may_have_arrived = True

    def ended(self, lease: Lease, answer: PushAnswer | None) -> None:
        """The push under this lease ended. `answer` is None if there was none, or none under the current lease."""
        self._under_way.discard(lease)
        if answer is not None and answer.outcome in (Outcome.LATE, Outcome.REJECTED):
            self.is_refused = True


@dataclass(eq=False)
class PendingContribution:
    """A contribution, from its step boundary until its fate is known."""

    fragment_id: int
    round: int
    shard_epoch: int
    """Epoch of the shard that asked. The contribution ends with that epoch, unless a version holds it by then."""
    epoch: int
    """Epoch in which the base version was made."""
    base_version: int
    since: int
    """The learner's token count at which the work in it begins."""
    tokens: int
    steps: int
    tensors: ContributionTensors
    pushes: Pushes = field(default_factory=Pushes)
    """Owned by the pushing thread."""
    asked_again: AskedRound | None = None
    """The round asked again while this was in flight. If this one is refused, the round waits for another."""
    may_have_arrived: bool | None = None
    """Whether a shard may have all of it, as agreed by all ranks. None: there is one rank, and `pushes` knows."""

    def begin_push(self, lease: Lease) -> bool:
        """Whether to push it now under this lease. If so, tell `pushes` when the push has ended.

        It is pushed only in the shard epoch that it was taken for. On joining the next epoch, the learner hears what
        that epoch holds or has merged. It gives back the rest (`LearnerCore.rejoined`), which a push would count twice.
        """
        return lease.epoch == self.shard_epoch and self.pushes.begin(lease)

    def fate_in(self, version: int, epoch: int, merged_version: int, forgotten_version: int) -> Fate:
        """The fate by a version made after its round. `epoch`: in which the version was made."""
        if epoch < self.shard_epoch:
            return Fate.CARRIED  # from an epoch that was over before the round was opened
        if self.round <= version and self.round == merged_version:
            return Fate.MERGED
        may_have_arrived = self.pushes.may_have_arrived if self.may_have_arrived is None else self.may_have_arrived
        if self.round <= min(version, forgotten_version) and may_have_arrived:
            return Fate.FORGOTTEN
        return Fate.CARRIED


@dataclass(frozen=True, slots=True)
class AskedRound:
    round: int
    shard_epoch: int
    epoch: int
    """Epoch in which the base version was made."""


class LearnerFragment:
    def __init__(self, fragment: Fragment, tensors: FragmentTensors) -> None:
        self.fragment = fragment
        self.tensors = tensors
        self.version = 0
        """Version of the anchor; comparable only within `epoch`, in which it was made."""
        self.epoch = -1  # -1: not made by a shard
        self.contribution: PendingContribution | None = None
        self.asked: AskedRound | None = None
        """The latest round that asked for this fragment and was not answered yet."""
        self._base_tokens = 0  # the learner's count when this fragment's counters began
        self._base_steps = 0

    @property
    def is_adopted(self) -> bool:
        """Whether the learner has this fragment from a shard."""
        return self.epoch >= 0

    def tokens_since(self, tokens: int) -> int:
        """Tokens trained that no version holds, given the learner's total."""
        return tokens - self._base_tokens

    def contribute(self, tokens: int, steps: int) -> PendingContribution:
        """Make the contribution to the round that asked. `tokens` and `steps`: the learner's totals now."""
        assert self.asked is not None
        asked, self.asked = self.asked, None
        self.contribution = PendingContribution(
            self.fragment.fragment_id, asked.round, asked.shard_epoch, self.epoch, self.version, self._base_tokens,
            tokens - self._base_tokens, steps - self._base_steps, self.tensors.contribute(asked.round),
        )  # fmt: skip
        return self.contribution

    def give_back(self) -> None:
        """The contribution was not merged: continue as if it had not been taken."""
        self.contribution = None
        self.tensors.give_back()

    def begin_with_own(self, tokens: int, steps: int) -> None:
        """Train with the model's own values until a version arrives; work from now on is carried."""
        self.tensors.anchor = self.tensors.values()
        self._restart_counters(tokens, steps)

    def adopt(self, values: Tensor, version: int, epoch: int, tokens: int, steps: int) -> None:
        self.tensors.adopt(values)
        self.version, self.epoch = version, epoch
        self._restart_counters(tokens, steps)

    def carry(
        self, values: Tensor, version: int, epoch: int, *, merged: bool, difference: Difference | None = None,
        steps: int = 0,
    ) -> None:  # fmt: skip
        """Add a version under the local progress, and keep the work that no version holds. `steps`: in total."""
        since = steps - self._base_steps
        before = self.contribution.steps if self.contribution is not None else 0
        if merged:
            since -= before
        self.tensors.carry(values, merged=merged, difference=difference, steps=since, before=before)
        self.version, self.epoch = version, epoch
        if merged:
            assert self.contribution is not None
            tokens, steps = self.contribution.tokens, self.contribution.steps
            self._restart_counters(self._base_tokens + tokens, self._base_steps + steps)
            self.contribution = None

    def _restart_counters(self, tokens: int, steps: int) -> None:
        self._base_tokens, self._base_steps = tokens, steps
