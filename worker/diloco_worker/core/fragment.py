"""One fragment of one learner: its anchor, residual, counters, and the contribution that is under way.

    anchor      decoded value of the version applied last
    snapshot    theta after the contribution was taken
    residual    what encoders lost of contributions that were merged (error feedback)
    loss        what the encoder lost of  anchor - snapshot + residual,  the contribution under way

A contribution is pending until a version tells whether it was merged. Merged: its loss becomes the residual. Not
merged: the fragment is as if it had not been pushed, and the work is in the next contribution.

On a CPU the snapshot is copied by whoever encodes, in its own thread, while the training goes on. Each of its elements
is then a value that the parameter had (aligned reads of 2 and 4 bytes are whole), some from before and some from after
an optimizer step that ran meanwhile. Any such mixture is right: what is not in the snapshot stays in  theta - snapshot
and goes into the next contribution. Only a version must not be laid under the fragment meanwhile: that would move
elements by what no training did. So versions wait until the snapshot is read (`LearnerFragment.rebasable`); the
training never does. On an accelerator the copy is queued at the step boundary: that takes no time, and it runs before
the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from diloco_common.codec import Payload, encode_payload
from diloco_common.manifest import Fragment
from diloco_worker.core.pushes import Lease, Pushes
from diloco_worker.core.replica import Replica, queued_until, wait_for_device


@dataclass
class Pending:
    """A contribution from its snapshot until its fate is known."""

    fragment_id: int
    round: int
    shard_epoch: int
    """Of the shard that asked for it: it dies with that life of the shard, unless a version holds it by then."""
    epoch: int
    """That the base version was made in."""
    base_version: int
    tokens: int
    steps: int
    anchor: Tensor
    """float32 [num_elements], of the base version."""
    residual: Tensor | None
    """float32 [num_elements], of the contributions before."""
    error_feedback: bool
    read: Callable[[Tensor], None]
    """Copies theta to a float32 [num_elements]."""
    reading: bool = True
    """Whether the snapshot is still to be taken, or being taken."""
    snapshot: Tensor | None = None
    """float32 [num_elements], once it is taken."""
    copied: Callable[[], None] | None = None
    """Waits until the snapshot is there, where a device copies it."""
    loss: Tensor | None = None
    """float32 [num_elements]: set by `encode`, where there is error feedback."""
    reference: Tensor | None = None
    """Where a version of an earlier round came in between: the snapshot, moved along with it."""
    pushes: Pushes = field(default_factory=Pushes)
    """Belongs to the thread that pushes."""

    def begin_push(self, lease: Lease) -> bool:
        """Whether to push it now under this lease. If so, tell `pushes` when that has ended.

        It is pushed only to the life of the shard that it was taken for. What the next life holds or merges, the
        learner learns when it joins there; what was neither is given back then (`LearnerCore.rejoined`), and would
        count twice if it were pushed as well.
        """
        if lease.epoch != self.shard_epoch:
            self.leave_unread()
            return False
        return self.pushes.begin(lease)

    def leave_unread(self) -> None:
        """Nobody is going to take the snapshot, so versions need not wait for it; until a round asks again."""
        self.reading = False

    def read_again(self) -> None:
        """A round asks again: versions wait, if the snapshot is still to be taken."""
        self.reading = self.snapshot is None

    def take_snapshot(self) -> Tensor:
        """Copy theta, or have the device do it, unless that is done: float32 [num_elements].

        In any thread, but one at a time.
        """
        if self.snapshot is None:
            try:
                snapshot = torch.empty_like(self.anchor)
                self.read(snapshot)
                self.copied = queued_until(snapshot)
                self.snapshot = snapshot
            finally:
                self.leave_unread()
        return self.snapshot

    @property
    def progress_since(self) -> Tensor | None:
        """What local progress since the snapshot is counted from: float32 [num_elements]. None: it is not taken."""
        return self.snapshot if self.reference is None else self.reference

    def merged_in(self, version: int, merged_version: int) -> bool:
        """Whether it is in this version, of which the shard says so."""
        return self.round <= version and self.round == merged_version

    def forgotten_in(self, version: int, forgotten_version: int) -> bool:
        """Whether it may be in this version, of which the shard says that it no longer knows."""
        return self.round <= min(version, forgotten_version) and self.snapshot is not None

    def delta(self) -> Tensor:
        """What is meant to be sent, anchor - snapshot + residual: float32 [num_elements]. Takes the snapshot."""
        delta = torch.sub(self.anchor, self._whole_snapshot())
        return delta if self.residual is None else delta.add_(self.residual)

    def encode(self, encoding: str) -> Payload:
        """The pseudo-gradient, with what error feedback adds. Leaves in `loss` what the encoding lost of it.

        Takes the snapshot. Raises NotFinite.
        """
        snapshot = self._whole_snapshot()
        if self.error_feedback and self.loss is None:
            self.loss = torch.empty_like(self.anchor)
        return encode_payload(self.anchor, encoding, minus=snapshot, plus=self.residual, loss=self.loss)

    def _whole_snapshot(self) -> Tensor:
        """For other threads and streams than the one that has taken it."""
        snapshot = self.take_snapshot()
        if self.copied is not None:
            self.copied()
        return snapshot


@dataclass(frozen=True, slots=True)
class Shift:
    """new - reference, computed ahead by whoever decoded a version: then laying it under progress is one addition."""

    reference: Tensor
    """What it was computed from; of use only while local progress is counted from this very tensor."""
    difference: Tensor
    """float32 [num_elements]."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A round that asked for the fragment."""

    round: int
    shard_epoch: int
    epoch: int
    """That the base version was made in."""


class LearnerFragment:
    """State of one fragment. All tensors are float32 [num_elements] on the model's device."""

    def __init__(self, fragment: Fragment, replica: Replica, *, error_feedback: bool) -> None:
        self.fragment = fragment
        self.anchor: Tensor | None = None
        self.version = 0
        """Version of the anchor; compares only inside `epoch`, in which it was made."""
        self.epoch = -1  # made by no shard
        self.pending: Pending | None = None
        self.wanted: Wanted | None = None
        """The round that asked for this fragment last, until it is answered."""
        self._replica = replica
        self._residual: Tensor | None = None
        self._error_feedback = error_feedback
        self._base_tokens = 0  # of the learner, when the counters of this fragment began
        self._base_steps = 0

    @property
    def adopted(self) -> bool:
        """Whether the learner has this fragment from a shard yet."""
        return self.epoch >= 0

    def values(self) -> Tensor:
        """What this learner believes the global values are: the anchor, else its own. Do not write to it."""
        if self.anchor is not None:
            return self.anchor
        out = torch.empty(self.fragment.num_elements, device=self._replica.device)
        self._replica.read(self.fragment, out)
        wait_for_device(out)
        return out

    @property
    def rebasable(self) -> bool:
        """Whether a version may be laid under the fragment now: not while its snapshot is being taken."""
        return self.pending is None or not self.pending.reading

    def take(self, tokens: int, steps: int) -> Pending:
        """A contribution for the round that is wanted. `tokens` and `steps`: the learner's totals now.

        On a CPU its snapshot is still to be taken.
        """
        assert self.anchor is not None
        assert self.wanted is not None
        assert self.pending is None
        wanted, self.wanted = self.wanted, None
        self.pending = Pending(
            self.fragment.fragment_id, wanted.round, wanted.shard_epoch, self.epoch, self.version,
            tokens - self._base_tokens, steps - self._base_steps, self.anchor, self._residual, self._error_feedback,
            partial(self._replica.read, self.fragment),
        )  # fmt: skip
        if self._replica.device.type != "cpu":
            self.pending.take_snapshot()
        return self.pending

    def shift_to(self, values: Tensor, version: int, merged_version: int) -> Shift | None:
        """What theta moves by if this version is laid under it now; None where nothing can be said. In any thread."""
        pending = self.pending
        merged = pending is not None and pending.merged_in(version, merged_version)
        reference = self._reference(pending, merged=merged)
        return None if reference is None else Shift(reference, torch.sub(values, reference))

    def give_back(self) -> None:
        """The pending contribution was not merged: as if it had not been taken. Who still reads it, does so in vain."""
        self.pending = None

    def adopt(self, values: Tensor, version: int, epoch: int, tokens: int, steps: int) -> None:
        """theta <- values: the first version that this learner gets, or one that replaces its progress."""
        self._replica.write(self.fragment, values)
        self._advance(values, version, epoch)
        self._restart_counters(tokens, steps)

    def begin_with_own(self, tokens: int, steps: int) -> None:
        """Train on with the model's own values until a version arrives: what is trained from now on is carried."""
        self.anchor = self.values()
        self._restart_counters(tokens, steps)

    def carry(self, values: Tensor, version: int, epoch: int, *, merged: bool, shift: Shift | None = None) -> None:
        """Lay a version under the local progress.

        theta <- theta + (new - snapshot) if the pending contribution is merged in it, else theta + (new - anchor).
        `shift`: what was computed ahead; it is computed here where it was from another reference.
        """
        pending = self.pending
        reference = self._reference(pending, merged=merged)
        assert reference is not None
        if shift is None or shift.reference is not reference:
            shift = Shift(reference, torch.sub(values, reference))
        self._replica.add(self.fragment, shift.difference)
        if merged:
            assert pending is not None
            self._settle(pending)
        elif pending is not None:  # of a later round: its snapshot moves along
            assert pending.progress_since is not None
            pending.reference = torch.add(pending.progress_since, shift.difference)
            wait_for_device(pending.reference)  # others compute with it
        self._advance(values, version, epoch)

    def overwrite(
        self, values: Tensor, version: int, epoch: int, *, merged: bool, keep: float, tokens: int, steps: int
    ) -> None:
        """theta <- keep * theta + (1 - keep) * new; what was trained since the anchor is not counted again."""
        if merged:
            assert self.pending is not None
            self._settle(self.pending)
        if keep:
            self._replica.blend(self.fragment, values, keep)
        else:
            self._replica.write(self.fragment, values)
        self._advance(values, version, epoch)
        self._restart_counters(tokens, steps)

    def tokens_since(self, tokens: int) -> int:
        """Tokens trained on that no version holds yet, given the learner's total."""
        return tokens - self._base_tokens

    def _reference(self, pending: Pending | None, *, merged: bool) -> Tensor | None:
        """What local progress is counted from when a version is laid under it."""
        return pending.progress_since if pending is not None and merged else self.anchor

    def _settle(self, pending: Pending) -> None:
        """The pending contribution is part of the model now."""
        self._residual = pending.loss
        self._restart_counters(self._base_tokens + pending.tokens, self._base_steps + pending.steps)
        self.pending = None

    def _advance(self, values: Tensor, version: int, epoch: int) -> None:
        self.anchor, self.version, self.epoch = values, version, epoch

    def _restart_counters(self, tokens: int, steps: int) -> None:
        self._base_tokens, self._base_steps = tokens, steps
