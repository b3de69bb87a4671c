"""The tiny model of the simulation, whose values count tokens.

Training on one token adds `PATTERN` to the parameters: small whole numbers, another for each neighbour. So theta minus
an anchor says how many tokens lie between them, and float32 is exact for as many as a schedule trains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco_common.manifest import Fragment
from diloco_worker.core.replica import Replica

SHAPES = {"body": (6, 2), "head": (4, 2), "norm": (3,)}
AVERAGED = ("head",)
"""Merged by plain mean."""
NUM_ELEMENTS = 23


class Counting(nn.Module):
    """Parameters that are views into one flat tensor, so that a step is one operation."""

    def __init__(self, start: float) -> None:
        """Every parameter begins at `start` patterns."""
        super().__init__()
        self.flat = PATTERN * start
        offset = 0
        for name, shape in SHAPES.items():
            size = int(torch.Size(shape).numel())
            self.register_parameter(name, nn.Parameter(self.flat[offset : offset + size].view(shape)))
            offset += size

    def train_on(self, tokens: int) -> None:
        """One inner step."""
        self.flat.add_(PATTERN, alpha=tokens)


PATTERN = torch.arange(NUM_ELEMENTS).remainder_(3).add_(1).float()
_PATTERN_REPLICA = Replica(Counting(1.0), AVERAGED)


def replica(model: Counting) -> Replica:
    return Replica(model, AVERAGED)


def pattern_of(fragment: Fragment) -> Tensor:
    """What one token adds to a fragment: float32 [num_elements]."""
    out = torch.empty(fragment.num_elements)
    _PATTERN_REPLICA.read(fragment, out)
    return out
