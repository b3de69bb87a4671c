"""One fragment of one learner: its anchor, residual, counters, and the contribution that is under way.

    anchor      decoded value of the version applied last
    snapshot    theta when the contribution was taken
    residual    what encoders lost of contributions that were merged (error feedback)
    loss        what the encoder lost of  anchor - snapshot + residual,  the contribution under way

A contribution is pending until a version tells whether it was merged. Merged: its loss becomes the residual. Not
merged: the fragment is as if it had not been pushed, and the work is in the next contribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_common.codec import Payload, encode_payload
from diloco_common.manifest import Fragment
from diloco_worker.core.replica import Replica


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
    snapshot: Tensor
    """float32 [num_elements]."""
    residual: Tensor | None
    """float32 [num_elements], of the contributions before."""
    loss: Tensor | None
    """float32 [num_elements]: set by `encode`. None: there is no error feedback."""
    reference: Tensor | None = None
    """Where a version of an earlier round came in between: the snapshot, moved along with it."""
    pushes_open: int = 0
    """How often it was handed out for pushing and not answered yet."""
    accepted: bool = False
    """Whether a shard has taken it: then only a version can tell that it was not merged."""

    @property
    def progress_since(self) -> Tensor:
        """What local progress since the snapshot is counted from: float32 [num_elements]."""
        return self.snapshot if self.reference is None else self.reference

    def delta(self) -> Tensor:
        """What is meant to be sent, anchor - snapshot + residual: float32 [num_elements]."""
        delta = torch.sub(self.anchor, self.snapshot)
        return delta if self.residual is None else delta.add_(self.residual)

    def encode(self, encoding: str) -> Payload:
        """The pseudo-gradient, with what error feedback adds. Leaves in `loss` what the encoding lost of it.

        Raises NotFinite.
        """
        return encode_payload(self.anchor, encoding, minus=self.snapshot, plus=self.residual, loss=self.loss)


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
        self.epoch = -1
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
        return self.anchor is not None

    def values(self) -> Tensor:
        """A copy of what this learner believes the global values are: the anchor, else its own."""
        if self.anchor is not None:
            return self.anchor.clone()
        out = self._empty()
        self._replica.read(self.fragment, out)
        return out

    def take(self, tokens: int, steps: int) -> Pending:
        """Snapshot the fragment for the round that is wanted. `tokens` and `steps` are the learner's totals now."""
        assert self.anchor is not None
        assert self.wanted is not None
        assert self.pending is None
        snapshot = self._empty()
        self._replica.read(self.fragment, snapshot)
        wanted, self.wanted = self.wanted, None
        self.pending = Pending(
            self.fragment.fragment_id, wanted.round, wanted.shard_epoch, self.epoch, self.version,
            tokens - self._base_tokens, steps - self._base_steps, self.anchor, snapshot, self._residual,
            self._empty() if self._error_feedback else None,
        )  # fmt: skip
        return self.pending

    def give_back(self) -> None:
        """The pending contribution was not merged: as if it had not been taken."""
        self.pending = None

    def adopt(self, values: Tensor, version: int, epoch: int, tokens: int, steps: int) -> None:
        """theta <- values: the first version that this learner gets, or one that replaces its progress."""
        self._replica.write(self.fragment, values)
        self._advance(values, version, epoch)
        self._restart_counters(tokens, steps)

    def carry(self, values: Tensor, version: int, epoch: int, *, merged: bool) -> None:
        """Lay a version under the local progress.

        theta <- new + (theta - snapshot) if the pending contribution is merged in it, else new + (theta - anchor).
        """
        assert self.anchor is not None
        if merged:
            assert self.pending is not None
            self._replica.rebase(self.fragment, values, self.pending.progress_since)
            self._settle(self.pending)
        else:
            self._replica.rebase(self.fragment, values, self.anchor)
            if self.pending is not None:  # of a later round: its snapshot moves along
                self.pending.reference = torch.sub(self.pending.progress_since, self.anchor).add_(values)
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

    def _settle(self, pending: Pending) -> None:
        """The pending contribution is part of the model now."""
        self._residual = pending.loss
        self._restart_counters(self._base_tokens + pending.tokens, self._base_steps + pending.steps)
        self.pending = None

    def _advance(self, values: Tensor, version: int, epoch: int) -> None:
        self.anchor, self.version, self.epoch = values, version, epoch

    def _restart_counters(self, tokens: int, steps: int) -> None:
        self._base_tokens, self._base_steps = tokens, steps

    def _empty(self) -> Tensor:
        return torch.empty(self.fragment.num_elements, device=self._replica.device)
