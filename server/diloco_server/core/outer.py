"""The outer optimizers, which turn a pseudo-gradient into a new version. Each fragment has its own, in float32.

G is the merged pseudo-gradient (anchor minus local value), so descending along G moves towards the learners. Momentum
is kept as bfloat16 between steps, unless mu is large. It forgets a share 1 - mu in each step, so rounding errors do not
accumulate. But if that share is about as small as the rounding error, momentum stops changing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from diloco_common.codec import memory
from diloco_common.codec.base import BFLOAT16_MAX
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.settings import OuterSettings
from diloco_server.core.merge import MergedSlice, shares_of
from diloco_server.core.round import Contribution

BFLOAT16_MU_MAX = 0.7
"""Largest mu with bfloat16 momentum. In the worst case, when all gradients agree, theta is then off by less than 0.3 %
of its way, and by 0.06 % at 0.5. It would be 1.5 % at 0.9, and 20 % at 0.99."""


def momentum_for(contributions: Sequence[Contribution], merge: object) -> float:
    """The mu of a round for `outer.momentum = "auto"`: mu = l / (l + 2), l = log2 M.

    It is l / (l + 1) with the agreement rule, which shortens steps in directions in which learners agree. M is the
    number of equally weighted learners whose mean would be as certain as this one: (sum w)^2 / sum w^2.
    """
    shares = shares_of(sorted(contributions, key=lambda c: c.learner_id))
    doublings = -math.log2(sum(share * share for share in shares))
    return max(0.0, min(BFLOAT16_MU_MAX, doublings / (doublings + (1 if merge == "agreement" else 2))))


class OuterOptimizer(ABC):
    """An outer optimizer; its state lives with the fragment. Users subclass this for their own rules."""

    num_buffers: int
    buffer_dtype = torch.float32
    """The dtype of the buffers: float32 or bfloat16."""

    def __init__(self, settings: OuterSettings) -> None:
        self.settings = settings
        self.momentum = BFLOAT16_MU_MAX if settings.momentum == "auto" else settings.momentum
        """The mu of the next step. If mu depends on the round, this starts at its maximum."""

    def with_momentum(self, mu: float) -> Self:
        other = copy(self)
        other.momentum = mu
        return other

    def new_buffers(self, num_elements: int) -> list[Tensor]:
        return [memory.empty(num_elements, self.buffer_dtype).zero_() for _ in range(self.num_buffers)]

    def step(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        """Take one outer step in place. Theta and gradient are float32 [num_elements], buffers of `buffer_dtype`.

        `outer_step` counts from 1. Overwrites `gradient`.
        """
        for start in range(0, theta.numel(), SLICE_ELEMENTS):
            part = slice(start, start + SLICE_ELEMENTS)
            self.update(theta[part], gradient[part], [b[part] for b in buffers], outer_step)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        """Like `step`, for a slice that is not summed yet; theta and buffers are those of the slice."""
        self.step(theta, merged.tensor(), buffers, outer_step)

    @abstractmethod
    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        """Like `step`, for part of a fragment. Keep state only in theta and buffers, which are stored; buffers start as
        zeros."""


class Sgd(OuterOptimizer):
    """b <- mu b + G; theta <- theta - eta b. Without momentum (mu = 0) no buffer is kept."""

    buffer_dtype = torch.bfloat16

    def __init__(self, settings: OuterSettings) -> None:
        super().__init__(settings)
        self.buffer_dtype = _kept_as(self.buffer_dtype, self.momentum)
        self.num_buffers = 1 if self.momentum else 0

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        for b in buffers:
            gradient = _moved(b, self.momentum, gradient)
        theta.add_(gradient, alpha=-self.settings.lr)


class Nesterov(OuterOptimizer):
    """b <- mu b + G; theta <- theta - eta (G + mu b). As torch.optim.SGD(nesterov=True)."""

    num_buffers = 1
    buffer_dtype = torch.bfloat16

    def __init__(self, settings: OuterSettings) -> None:
        super().__init__(settings)
        self.buffer_dtype = _kept_as(self.buffer_dtype, self.momentum)

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        (b,) = buffers
        moved = _moved(b, self.momentum, gradient)
        theta.add_(gradient.add_(moved, alpha=self.momentum), alpha=-self.settings.lr)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        native, (b,) = merged.native(), buffers
        if native is None or b.dtype != torch.bfloat16:
            super().step_merged(theta, merged, buffers, outer_step)
        else:  # one fused pass, which halves the time
            native.nesterov(theta, b, self.momentum, self.settings.lr)


class TakeMean(OuterOptimizer):
    """theta <- theta - G: takes the learners' mean. Used for tensors that are not parameters, whatever the settings."""

    num_buffers = 0

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        theta.sub_(gradient)


class Adam(OuterOptimizer):
    """Adam with bias correction (arXiv 1412.6980), as torch.optim.Adam, with the betas of FedOpt (arXiv 2003.00295)."""

    num_buffers = 2

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        first, second = buffers
        beta1, beta2 = 0.9, 0.99
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = torch.sqrt(second, out=gradient).div_((1 - beta2**outer_step) ** 0.5).add_(1e-8)
        theta.addcdiv_(first, corrected, value=-self.settings.lr / (1 - beta1**outer_step))


def _kept_as(dtype: torch.dtype, mu: float) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 and mu > BFLOAT16_MU_MAX else dtype


def _moved(momentum: Tensor, mu: float, gradient: Tensor) -> Tensor:
    """mu b + G in float32; also stored in b, rounded if that is bfloat16."""
    if momentum.dtype == torch.float32:
        return momentum.mul_(mu).add_(gradient).clamp_(-BFLOAT16_MAX, BFLOAT16_MAX)
    moved = momentum.float().mul_(mu).add_(gradient)
    momentum.copy_(moved.clamp(-BFLOAT16_MAX, BFLOAT16_MAX))
    return moved


Rule = Callable[[OuterSettings], OuterOptimizer]

OUR_RULES: Mapping[str, Rule] = {
    "nesterov": Nesterov,
    "sgd": Sgd,
    "adam": Adam,
}


def make_outer_optimizer(settings: OuterSettings, rule: Rule | None = None) -> OuterOptimizer:
    return (rule or OUR_RULES[settings.optimizer])(settings)
