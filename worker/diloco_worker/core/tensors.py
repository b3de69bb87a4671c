"""The tensors of one fragment that are as large as the fragment: [num_elements] on the model's device.

    anchor      the version applied last: 2 bytes per parameter, or 4 in a run that pulls float32
    snapshot    anchor - theta, when the contribution was taken: 2 bytes, or 4 in a run that pushes float32
    residual    encoding errors of merged contributions (error feedback): 2 bytes (some plugins: 4)
    loss        encoding error of  snapshot + residual,  the contribution in flight: as large as a residual

If the contribution is merged, the loss is the next residual. If not, the residual stays.

A 16-bit model rounds a float32 version that is added to it. The anchor stays exact, because changes build on it. But
progress is counted from the rounded values, since rounding was not trained.

A bfloat16 snapshot is slightly off, but nothing is lost: the contribution counts as what its snapshot says,
and the rest stays in the local progress for the next one.

Fragments without `Traits.feeds_back` have no residual: error feedback would send the error twice.

Between contributions only anchor and residual exist. A learner may keep residuals in host memory (`Replica.stow`); a
residual is then on the device only while a contribution is encoded.

fragment.py decides which contribution is taken, and its fate. The codec thread encodes and decodes with these tensors,
and computes ahead what applying a version adds. The training thread writes to the model.

A snapshot is taken at the step boundary, since between two steps the loop may put other values into the parameters. On
a CPU this is one pass over the fragment in the training thread. On an accelerator it is queued, which takes no time,
and runs before whatever the loop queues next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diloco_common.codec import Payload, encode_payload, get_codec, memory
from diloco_common.codec.base import Reference, subtract
from diloco_worker.core.device import queued_until, wait_for_device
from diloco_worker.core.parts import LocalFragment
from diloco_worker.core.replica import Replica


@dataclass(frozen=True, slots=True)
class Difference:
    """new - reference, computed ahead, so that applying a version is one addition."""

    reference: Reference
    """The difference is valid only while local progress is counted from these very tensors."""
    values: Tensor


class ContributionTensors:
    """The tensors of one contribution, from its step boundary until its fate is known."""

    def __init__(
        self, round_number: int, anchor: Tensor, residual: Tensor | None, snapshot: Tensor, *,
        feeds_back: bool, own: slice, stow: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`feeds_back`: the next contribution adds the loss. `own`: the slice that this process pushes. `stow` copies a
        loss to where it is kept; None: it stays."""
        self.round = round_number
        """Identifies the contribution within its fragment."""
        self.anchor = anchor
        """Values of the base version."""
        self.residual = residual
        """Added to the snapshot when it is encoded."""
        self.snapshot = snapshot
        """On an accelerator, computing it may still be queued."""
        self.loss: Tensor | None = None
        """Set by `encode` if it is fed back; in host memory if the learner keeps residuals there."""
        self.payload: Payload | None = None
        self._moved: Tensor | None = None
        self._wait_until_read = queued_until(snapshot)
        self._feeds_back = feeds_back
        self._own = own
        self._stow = stow

    @property
    def is_others(self) -> bool:
        """Whether other ranks push all of it."""
        return bool(self._own.stop == self._own.start)

    @property
    def reference(self) -> Reference:
        """Progress since the snapshot is counted from here: theta at the snapshot, plus versions applied since."""
        return Reference(self.anchor, self.snapshot) if self._moved is None else Reference(self._moved)

    def encode(self, encoding: str) -> Payload:
        """Encode the pseudo-gradient plus the residual. Leaves the encoding error in `loss`.

        Encodes once: another call returns the same payload. All contributions of a fragment are
        encoded one after the other in one thread. Raises NotFinite.
        """
        if self.payload is None:
            snapshot = self._own_snapshot()
            device, dtype = snapshot.device, get_codec(encoding).residual_dtype
            residual = None if self.residual is None else self.residual.to(device, dtype)
            loss = memory.empty(snapshot.numel(), dtype, device) if self._feeds_back else None
            self.payload = encode_payload(snapshot, encoding, plus=residual, loss=loss)
            self.loss = loss if loss is None or self._stow is None else self._stow(loss)
        return self.payload

    def move(self, difference: Tensor) -> None:
        """A version of an earlier round was applied: move the reference, too."""
        values, progress = self.reference
        moved = torch.add(difference, values, out=memory.empty(values.numel(), device=values.device))
        self._moved = moved if progress is None else moved.sub_(progress)
        wait_for_device(moved.device)  # other threads compute with it

    def move_held(self, since: Tensor, values: Tensor, held: Callable[[Tensor], Tensor]) -> None:
        """Like `move`, by values - since, for a model that rounds."""
        reference, progress = self.reference
        moved = held(reference)
        if progress is not None:
            moved.sub_(progress)
        self._moved = moved.sub_(since).add_(values)
        wait_for_device(moved.device)

    def _own_snapshot(self) -> Tensor:
        """The part of the snapshot that this process pushes, ready for any thread and stream."""
        if self._wait_until_read is not None:
            self._wait_until_read()
        return self.snapshot[self._own]


class FragmentTensors:
    """The tensors of one fragment, and the ways a version gets into the model."""

    def __init__(self, fragment: LocalFragment, replica: Replica, push_encoding: str) -> None:
        self.anchor: Tensor | None = None
        self.contribution: ContributionTensors | None = None
        self._residual: Tensor | None = None
        self.fragment = fragment
        self._replica = replica
        self._push_encoding = push_encoding

    def values(self) -> Tensor:
        """The global values, as far as this learner knows: the anchor, or else its own values."""
        if self.anchor is not None:
            return self.anchor
        out = memory.empty(self.fragment.num_elements, device=self._replica.device)
        self._replica.read(self.fragment, out)
        wait_for_device(out.device)
        return out

    def reference_of(self, version: int, merged_version: int) -> Reference | None:
        """What progress would be counted from if this version were applied now; None if applying it is not one
        addition. May be called in any thread."""
        contribution, anchor = self.contribution, self.anchor
        if self.fragment.traits.is_whole or self._is_rounded(anchor):
            return None
        if contribution is not None and contribution.round == merged_version <= version:
            return contribution.reference
        return None if anchor is None else Reference(anchor)

    # ------------------------------------------------------------ at a step boundary, in the training thread

    def contribute(self, round_number: int) -> ContributionTensors:
        """Make the tensors of a new contribution, with its snapshot: read theta, or queue that on the device."""
        assert self.anchor is not None
        assert self.contribution is None
        dtype = get_codec(self.fragment.encoding(self._push_encoding)).progress_dtype
        snapshot = memory.empty(self.anchor.numel(), dtype, self.anchor.device)
        self._replica.progress(self.fragment, self.anchor, snapshot)
        self.contribution = ContributionTensors(
            round_number, self.anchor, self._residual, snapshot,
            feeds_back=self.fragment.traits.feeds_back, own=self.fragment.own, stow=self._replica.stow,
        )  # fmt: skip
        return self.contribution

    def give_back(self) -> None:
        """The contribution was not merged: forget it. A thread that still reads it does so in vain."""
        self.contribution = None

    def adopt(self, values: Tensor) -> None:
        """theta <- values: this learner's first version."""
        self._replica.write(self.fragment, values)
        self.anchor = values

    def restore(self) -> None:
        """theta <- the global values, replacing all local progress."""
        self._replica.write(self.fragment, self.values())

    def carry(
        self, values: Tensor, *, merged: bool, difference: Difference | None = None, steps: int = 0, before: int = 0
    ) -> None:
        """Add a version under the local progress.

        theta <- theta + (new - theta at the snapshot) if it holds the contribution, else theta + (new - anchor).
        `difference`: computed ahead; computed again here if its reference is no longer the right one. `steps`: inner
        steps since the reference was in the model. `before`: those of them up to the snapshot of a contribution that
        this version does not hold. Fragments contributed whole are written as during training.
        """
        if self.fragment.traits.is_whole:
            self._replica.write(self.fragment, values, trains_on=True)
            self._settle(values, merged=merged)
            return
        contribution = self.contribution
        assert self.anchor is not None
        reference = contribution.reference if contribution is not None and merged else Reference(self.anchor)
        if self._is_rounded(self.anchor) or self._is_rounded(values):
            self._carry_held(values, reference, merged=merged)
            return
        if difference is None or any(a is not b for a, b in zip(difference.reference, reference, strict=True)):
            moved = memory.empty(values.numel(), device=values.device)
            subtract(values, reference, moved)
            difference = Difference(reference, moved)
        with self._replica.laid.under(self.fragment):
            self._replica.add(self.fragment, difference.values, steps)
        if contribution is not None and not merged:  # its round is later
            contribution.move(self._replica.left(self.fragment, difference.values, before))
        self._settle(values, merged=merged)

    def _carry_held(self, values: Tensor, reference: Reference, *, merged: bool) -> None:
        """Like `carry` for a model that rounds: theta <- new + (theta - reference), each rounded as in the model. If
        nothing was trained, theta is exactly the new version, and the next contribution holds none of the rounding."""
        held = partial(self._replica.as_held, self.fragment)
        since, new = held(reference.values), held(values)
        if reference.progress is not None:
            since = held(since.sub_(reference.progress))
        with self._replica.laid.under(self.fragment):
            self._replica.add(self.fragment, -since)
            self._replica.add(self.fragment, new)
        if self.contribution is not None and not merged:
            self.contribution.move_held(since, new, held)
        self._settle(values, merged=merged)

    def _is_rounded(self, values: Tensor | None) -> bool:
        return values is not None and self._replica.rounds(self.fragment, values.dtype)

    def _settle(self, values: Tensor, *, merged: bool) -> None:
        if merged:
            assert self.contribution is not None
            self._residual = self.contribution.loss
            self.contribution = None
        self.anchor = values
