"""All of one fragment that is as large as the fragment: [num_elements] on the model's device.

    anchor      the version applied last: 2 bytes per parameter, or 4 in a run that pulls float32
    snapshot    theta after the contribution was taken: 4 bytes
    residual    what encoders lost of contributions that were merged (error feedback): 2 bytes, or 4 with topk64_2bit
    loss        what the encoder lost of  anchor - snapshot + residual,  the contribution under way: as the residual

Companions have no residual: an inner step forgets a part of the momentum, so the next contribution holds what was lost
already, and error feedback would send it twice.

Between contributions only anchor and residual are there. A learner may keep its residuals in host memory
(`Replica.stow`): a residual is then on the device only while a contribution is encoded.

Which contribution is taken, and what becomes of it, is decided in fragment.py. The codec thread encodes and decodes
with these tensors, and computes ahead what applying a version adds. The training thread puts values into the model.

On a CPU the codec thread copies the snapshot while the training goes on. Each element is then a value that the
parameter had (aligned reads of 2 and 4 bytes are whole). Some are from before an optimizer step, some from after it.
Any such mixture is right: what is not in the snapshot stays in  theta - snapshot  and goes into the next contribution.
A version must not be applied to the fragment meanwhile, though: that would move elements by what no training did.
So versions wait while the fragment is read (`is_being_read`). The training never waits. On an accelerator the copy is
queued at the step boundary. That takes no time, and the copy runs before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diloco_common.codec import Payload, encode_payload, get_codec, memory
from diloco_common.codec.base import subtract
from diloco_common.manifest import Fragment
from diloco_common.messages import LearnerPolicy
from diloco_worker.core.island_parts import LocalFragment
from diloco_worker.core.replica import Replica, queued_until, wait_for_device


@dataclass(frozen=True, slots=True)
class Difference:
    """new - reference, computed before the version is applied: applying it is one addition then."""

    reference: Tensor
    """Local progress must still be counted from this very object, or the difference is of no use."""
    values: Tensor
    """float32 [num_elements]."""


class ContributionTensors:
    """The tensors of one contribution, from the step boundary that takes it until its fate is known."""

    def __init__(
        self, round_number: int, anchor: Tensor, residual: Tensor | None, read: Callable[[Tensor], None], *,
        error_feedback: bool, own: slice | None = None, stow: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`read` copies theta to a tensor. `own`: what of it this process pushes, if that is not all. `stow` gives what
        is kept of a loss; None: itself."""
        self.round = round_number
        """Names the contribution, within its fragment."""
        self.anchor = anchor
        """Of the base version."""
        self.residual = residual
        self.snapshot: Tensor | None = None
        """None until it is taken."""
        self.loss: Tensor | None = None
        """Set by `encode`, where there is error feedback; in host memory, if the learner keeps its residuals there."""
        self.is_being_read = True
        """Whether the snapshot is still to be taken, or being taken."""
        self.read = read
        self._moved: Tensor | None = None
        self._wait_until_copied: Callable[[], None] | None = None
        self._error_feedback = error_feedback
        self._own = own
        self._stow = stow

    @property
    def is_others(self) -> bool:
        """Whether other ranks of the island push all of it."""
        return self._own is not None and self._own.stop == self._own.start

    @property
    def reference(self) -> Tensor | None:
        """What local progress since the snapshot is counted from: the snapshot, moved along with the versions that were
        applied since. None: it is not taken."""
        return self.snapshot if self._moved is None else self._moved

    def take_snapshot(self) -> Tensor:
        """Copy theta, or have the device do it, unless that is done. In any thread, but one at a time."""
        if self.snapshot is None:
            try:
                snapshot = self._empty()
                self.read(snapshot)
                self._wait_until_copied = queued_until(snapshot)
                self.snapshot = snapshot
            finally:
                self.is_being_read = False
        return self.snapshot

    def encode(self, encoding: str) -> Payload:
        """The pseudo-gradient, with what error feedback adds. Leaves in `loss` what the encoding lost of it.

        Takes the snapshot. Raises NotFinite.
        """
        anchor, snapshot = self.anchor, self._whole_snapshot()
        if self._own is not None:
            anchor, snapshot = anchor[self._own], snapshot[self._own]
        device, dtype = snapshot.device, get_codec(encoding).residual_dtype
        residual = None if self.residual is None else self.residual.to(device, dtype)
        loss = memory.empty(snapshot.numel(), dtype, device) if self._error_feedback else None
        payload = encode_payload(anchor, encoding, minus=snapshot, plus=residual, loss=loss)
        self.loss = loss if loss is None or self._stow is None else self._stow(loss)
        return payload

    def delta(self) -> Tensor:
        """What is meant to be sent: anchor - snapshot + residual. Takes the snapshot."""
        delta = torch.sub(self.anchor.float(), self._whole_snapshot())
        return delta if self.residual is None else delta.add_(self.residual.to(delta.device))

    def move(self, difference: Tensor) -> None:
        """A version of an earlier round was applied: the reference moves along."""
        assert self.reference is not None
        self._moved = torch.add(self.reference, difference, out=self._empty())
        wait_for_device(self._moved.device)  # others compute with it

    def _empty(self) -> Tensor:
        return memory.empty(self.anchor.numel(), device=self.anchor.device)

    def _whole_snapshot(self) -> Tensor:
        """The snapshot, ready for any thread and stream."""
        snapshot = self.take_snapshot()
        if self._wait_until_copied is not None:
            self._wait_until_copied()
        return snapshot


class FragmentTensors:
    """The tensors of one fragment, and how a version gets into the model."""

    def __init__(self, fragment: Fragment, replica: Replica, policy: LearnerPolicy) -> None:
        self.anchor: Tensor | None = None
        self.contribution: ContributionTensors | None = None
        self._residual: Tensor | None = None
        self.fragment = fragment
        """As this process holds it."""
        self._replica = replica
        self._policy = policy

    @property
    def is_being_read(self) -> bool:
        """Whether a snapshot is being taken: no version may be applied meanwhile."""
        return self.contribution is not None and self.contribution.is_being_read

    def values(self) -> Tensor:
        """What this learner believes the global values are: the anchor, else its own."""
        if self.anchor is not None:
            return self.anchor
        out = memory.empty(self.fragment.num_elements, device=self._replica.device)
        self._replica.read(self.fragment, out)
        wait_for_device(out.device)
        return out

    def reference_of(self, version: int, merged_version: int) -> Tensor | None:
        """What theta moves away from if this version is applied now; None if that is no addition. In any thread."""
        if self._policy.on_commit != "carry":
            return None
        contribution = self.contribution
        merged = contribution is not None and contribution.round == merged_version <= version
        return contribution.reference if contribution is not None and merged else self.anchor

    # ------------------------------------------------------------ at a step boundary, in the training thread

    def contribute(self, round_number: int) -> ContributionTensors:
        """Those of a new contribution. On a CPU its snapshot is still to be taken, soon, by whoever encodes."""
        assert self.anchor is not None
        assert self.contribution is None
        self.contribution = ContributionTensors(
            round_number, self.anchor, self._residual, partial(self._replica.read, self.fragment),
            error_feedback=self._policy.error_feedback and not self.fragment.companion,
            own=self.fragment.own if isinstance(self.fragment, LocalFragment) else None, stow=self._replica.stow,
        )  # fmt: skip
        if self._replica.device.type != "cpu":
            self.contribution.take_snapshot()
        return self.contribution

    def give_back(self) -> None:
        """The contribution was not merged: forget that it was taken. Whoever still reads it reads in vain."""
        self.contribution = None

    def begin_with_own(self) -> None:
        """The anchor is what the model holds: no version is there yet."""
        self.anchor = self.values()

    def adopt(self, values: Tensor) -> None:
        """theta <- values: the first version that this learner gets."""
        self._replica.write(self.fragment, values)
        self.anchor = values

    def restore(self) -> None:
        """theta <- the global values, in place of all local progress."""
        self._replica.write(self.fragment, self.values())

    def carry(
        self, values: Tensor, *, merged: bool, difference: Difference | None = None, steps: int = 0, before: int = 0
    ) -> None:
        """Put a version under the local progress.

        theta <- theta + (new - snapshot) if the contribution is merged in it, else theta + (new - anchor).
        `difference`: what was computed ahead. It is computed here where it was from another reference. `steps`: inner
        steps since the reference was what the model held. `before`: so many of them led to the snapshot of a
        contribution that is not merged in it.
        """
        contribution = self.contribution
        reference = contribution.reference if contribution is not None and merged else self.anchor
        assert reference is not None
        if difference is None or difference.reference is not reference:
            difference = Difference(reference, _minus(values, reference))
        self._replica.add(self.fragment, difference.values, steps)
        if contribution is not None and not merged:  # of a later round
            contribution.move(self._replica.left(self.fragment, difference.values, before))
        self._settle(values, merged=merged)

    def overwrite(self, values: Tensor, *, merged: bool) -> None:
        """theta <- new, or a blend of both:  alpha * theta + (1 - alpha) * new."""
        if self._policy.on_commit == "blend" and self._policy.blend_alpha:
            self._replica.blend(self.fragment, values, self._policy.blend_alpha)
        else:
            self._replica.write(self.fragment, values)
        self._settle(values, merged=merged)

    def _settle(self, values: Tensor, *, merged: bool) -> None:
        """The new anchor; and what was lost of a contribution that is in it."""
        if merged:
            assert self.contribution is not None
            self._residual = self.contribution.loss
            self.contribution = None
        self.anchor = values


def _minus(values: Tensor, reference: Tensor) -> Tensor:
    """values - reference, float32."""
    out = memory.empty(values.numel(), device=values.device)
    subtract(values, reference, out)
    return out
