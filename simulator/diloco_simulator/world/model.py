"""The tiny model of the simulation, whose values count tokens.

Training on one token adds `PATTERN` to the parameters: small whole numbers that differ between neighbors. So the
training can be read off the values, and float32 is exact for all tokens of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diloco_common.wire.manifest import Fragment
from diloco_worker.core.momentum import Companion, Momenta
from diloco_worker.core.replica import Replica

SHAPES = {"body": (31, 2), "head": (8, 2), "limbs": (31, 2), "norm": (3,), "trunk": (31, 2)}
"""Each is too small to be watched for undone versions: whole numbers often look like it."""
AVERAGED = ("head",)
"""Merged by plain mean."""
COMPANION = "head"
"""The companion, in schedules that have one. It is trained like the others, and its values stay predictable: steps
forget nothing of it, and its second moment limits nothing."""
NUM_ELEMENTS = 205
PATTERN = torch.arange(NUM_ELEMENTS).remainder_(3).add_(1).float()


class Counting(nn.Module):
    """Parameters that are views into one flat tensor, so that a step is one operation."""

    def __init__(self, flat: Tensor, *, has_buffer: bool = False) -> None:
        """Every parameter begins with its part of `flat`, float32 [NUM_ELEMENTS]."""
        super().__init__()
        if has_buffer:  # a mean of several tells nothing about tokens, so its values are not checked
            self.register_buffer("seen", torch.zeros(2))
        self.flat = flat.clone()
        self.trained = torch.zeros(NUM_ELEMENTS)
        """Added by training so far, regardless of versions applied since."""
        offset = 0
        for name, shape in SHAPES.items():
            size = int(torch.Size(shape).numel())
            self.register_parameter(name, nn.Parameter(self.flat[offset : offset + size].view(shape)))
            offset += size

    def train_on(self, tokens: int) -> None:
        self.flat.add_(PATTERN, alpha=tokens)
        self.trained.add_(PATTERN, alpha=tokens)


class TornReplica(Replica):
    """A replica with slow snapshots: the optimizer may step while the codec thread reads one."""

    def __init__(self, model: Counting, meanwhile: Callable[[Tensor], None], *, has_companion: bool = False) -> None:
        """`meanwhile` is called in the middle of every snapshot with its first half."""
        super().__init__(model, AVERAGED)
        if has_companion:
            self.specs = [spec._replace(kind="momentum") if spec.name == COMPANION else spec for spec in self.specs]
            values = self.parameters.tensors[COMPANION]
            self.of_kind["momentum"] = Momenta(
                {COMPANION: Companion("Adam", values, torch.full_like(values, torch.inf))}
            )
        self._meanwhile = meanwhile

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        half = fragment.num_elements // 2
        super().progress(fragment, anchor, out)
        first = out[:half].clone()
        self._meanwhile(first)
        super().progress(fragment, anchor, out)
        out[:half] = first


class _Flat:
    """Views any flat tensor as the model's fragments."""

    def __init__(self) -> None:
        self._model = Counting(torch.zeros(NUM_ELEMENTS))
        self._replica = Replica(self._model, AVERAGED)

    def part(self, flat: Tensor, fragment: Fragment) -> Tensor:
        self._model.flat.copy_(flat)
        out = torch.empty(fragment.num_elements)
        self._replica.parameters.read(fragment, out)  # whatever their kind
        return out


_FLAT = _Flat()


def part_of(flat: Tensor, fragment: Fragment) -> Tensor:
    """The elements of a fragment, from values of the whole model: float32 [num_elements]."""
    return _FLAT.part(flat, fragment)
