"""Companions: optimizer state that belongs to parameters and is averaged among learners as they are.

An inner step forgets part of the momentum, so a version that arrives late is scaled by what would be left of it. And
momentum from others is limited to what this learner's optimizer can bear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import Fragment, Momentum, Piece, TensorSpec, companion_of, momentum_of
from diloco_worker.core import layout
from diloco_worker.core.parameters import Parameters

MOST_OF_OWN = 3.0
"""Largest growth of the norm by one version, for momentum that no second moment divides. The mean of such momenta is no
longer than the longest, and 24 inner steps keep 0.29 of it at mu = 0.95, so lies in successive versions do not grow."""


class MomentumUse(NamedTuple):
    keeps: float = 1.0
    """Share of the values that an inner step keeps: beta1 of AdamW, mu of Muon."""
    most: float = math.inf
    """Bound on the values, as a multiple of the root of the second moment, if they came from own gradients alone."""


class Companion(NamedTuple):
    """Optimizer state of one parameter that changes in place. Tensors are float32, of the parameter's shape."""

    kind: Momentum
    values: Tensor
    second: Tensor | None = None
    """The second moment by whose root the optimizer divides; it stays local. None: it divides by none."""
    pace: Callable[[], MomentumUse] = MomentumUse
    """Called when a version is applied, since schedules change betas."""


class Momenta(Parameters):
    """The companions of one model, by the names that learners declare."""

    def __init__(self, companions: Mapping[str, Companion]) -> None:
        super().__init__({name: companion.values for name, companion in companions.items()})
        self._companions = dict(companions)

    def left(self, fragment: Fragment, difference: Tensor, steps: int) -> Tensor:
        left = torch.empty_like(difference)
        for piece in fragment.pieces:
            torch.mul(difference[piece.bounds], self._kept(piece, steps), out=left[piece.bounds])
        return left

    def _kept(self, piece: Piece, steps: int) -> float:
        return self._companions[piece.tensor].pace().keeps ** steps

    @contextmanager
    def _bounded(self, fragment: Fragment) -> Iterator[None]:
        """Inside, others change the values; afterwards they are limited.

        Where this learner has seen no gradient yet (a row of an embedding) the second moment is zero, and the optimizer
        would divide the momentum of others by its eps. Without a second moment, a single liar could make the momentum
        so long that it is forgotten only after hundreds of steps, so it is scaled. Momentum of zero takes any value.
        """
        found = [(self._companions[piece.tensor], piece, values) for piece, values in self.views(fragment)]
        own = [torch.linalg.vector_norm(values) if c.second is None else None for c, _, values in found]
        yield
        for (companion, piece, values), norm in zip(found, own, strict=True):
            if companion.second is not None:
                start = piece.tensor_offset
                ((_, second),) = layout.parts(companion.second, start, start + piece.num_elements)
                most = second.sqrt().mul_(companion.pace().most)
                torch.clamp(values, -most, most, out=values)
            elif norm is not None:
                share = (MOST_OF_OWN * norm / torch.linalg.vector_norm(values)).clamp_(max=1.0)
                values.mul_(torch.where(norm > 0, share, 1.0)).nan_to_num_(0.0, 0.0, 0.0)


def declared(
    companions: Mapping[str, Companion], parameters: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]
) -> tuple[Momenta, list[TensorSpec]]:
    """The companions of some parameters and their declarations, in parameter order. Raises UnsupportedModel."""
    for name, companion in companions.items():
        _check(name, companion, parameters)
    held = Momenta({momentum_of(name, of.kind): of for name, of in companions.items()})
    return held, [companion_of(spec, companions[name].kind) for name, spec in specs.items() if name in companions]


def _check(name: str, companion: Companion, parameters: Mapping[str, Tensor]) -> None:
    what, values = momentum_of(name, companion.kind), companion.values
    if what in parameters:
        raise UnsupportedModel(f"the model has a parameter that is called {what!r}, as its averaged momentum would be")
    if values.dtype != torch.float32:
        raise UnsupportedModel(
            f"the {what} is {values.dtype}; only float32 is averaged: keep the parameter in float32, or leave the "
            "momentum local (without companions=)"
        )
    second = values if companion.second is None else companion.second
    if values.shape != parameters[name].shape or layout.overlaps_itself(values) or second.stride() != values.stride():
        raise UnsupportedModel(f"the {what} is laid out in another way than {name}, so it cannot be averaged")
