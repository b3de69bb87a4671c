"""The tiny model of the simulation, whose values count tokens.

Training on one token adds `PATTERN` to the parameters: small whole numbers, another for each neighbour. So what was
trained can be read off the values, and float32 is exact for as many tokens as a schedule trains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diloco_common.wire.manifest import Fragment
from diloco_worker.core.momentum import Companion, Momenta
from diloco_worker.core.replica import Replica

SHAPES = {"body": (31, 2), "head": (8, 2), "limbs": (31, 2), "norm": (3,), "trunk": (31, 2)}
"""Each is too small to be watched for versions that are undone: whole numbers often look like it."""
AVERAGED = ("head",)
"""Merged by plain mean."""
COMPANION = "head"
"""Where a schedule has companions, this is one: what trains it, and what is known of its values, stays the same. So
steps forget nothing of it, and its second moment bounds nothing: the values count tokens."""
NUM_ELEMENTS = 205
PATTERN = torch.arange(NUM_ELEMENTS).remainder_(3).add_(1).float()


class Counting(nn.Module):
    """Parameters that are views into one flat tensor, so that a step is one operation."""

    def __init__(self, flat: Tensor, *, has_buffer: bool = False) -> None:
        """Every parameter begins with its part of `flat`, float32 [NUM_ELEMENTS]."""
        super().__init__()
        if has_buffer:  # the mean of several says nothing of tokens: nobody looks at its values
            self.register_buffer("seen", torch.zeros(2))
        self.flat = flat.clone()
        self.trained = torch.zeros(NUM_ELEMENTS)
        """What training has added, whatever versions were laid under it since."""
        offset = 0
        for name, shape in SHAPES.items():
            size = int(torch.Size(shape).numel())
            self.register_parameter(name, nn.Parameter(self.flat[offset : offset + size].view(shape)))
            offset += size

    def train_on(self, tokens: int) -> None:
        """What an optimizer does in one inner step."""
        self.flat.add_(PATTERN, alpha=tokens)
        self.trained.add_(PATTERN, alpha=tokens)


class TornReplica(Replica):
    """A replica whose snapshots take their time: the optimizer may step while the codec thread reads one."""

    def __init__(self, model: Counting, meanwhile: Callable[[Tensor], None], *, has_companion: bool = False) -> None:
        """`meanwhile` is called in the middle of every snapshot with the first half of it."""
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
    """Any flat tensor, seen as the fragments of the model."""

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
    """The elements of a fragment, of values for the whole model: float32 [num_elements]."""
    return _FLAT.part(flat, fragment)
