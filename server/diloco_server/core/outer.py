"""Pseudo-gradient -> new version: the outer optimizers, per fragment, in float32.

G is the merged pseudo-gradient (anchor minus local value), so descending along G moves towards the learners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_common.settings import OuterSettings
from diloco_server.core.merge import MergedSlice

SLICE = 1 << 17
"""Elements that one pass works on: small enough to stay in cache between the operations of a step."""


class OuterOptimizer(ABC):
    """One rule; the state of each fragment lives with the fragment. Rules of others are subclasses of this."""

    num_buffers: int
    """float32 buffers per fragment, each as large as the fragment."""
    is_by_element = True
    """Every element is stepped as if it were alone: how a fragment is cut into parts does not show."""

    def __init__(self, settings: OuterSettings) -> None:
        self.settings = settings

    def step(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        """Take one outer step in place. All float32 [num_elements]; `outer_step` counts from 1; spoils `gradient`."""
        for start in range(0, theta.numel(), SLICE):
            part = slice(start, start + SLICE)
            self.update(theta[part], gradient[part], [b[part] for b in buffers], outer_step)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        """As `step`, along a slice that is not added up yet; theta and buffers are that slice's."""
        self.step(theta, merged.tensor(), buffers, outer_step)

    @abstractmethod
    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        """As `step`, for part of a fragment. Nothing is remembered but in theta and buffers, which begin as zeros: they
        are what is kept and restored."""


class Sgd(OuterOptimizer):
    """b <- mu b + G;  theta <- theta - eta b.   Without momentum (mu = 0) no buffer is kept."""

    def __init__(self, settings: OuterSettings) -> None:
        super().__init__(settings)
        self.num_buffers = 1 if settings.momentum else 0

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        for b in buffers:
            gradient = b.mul_(self.settings.momentum).add_(gradient)
        theta.add_(gradient, alpha=-self.settings.lr)


class Nesterov(OuterOptimizer):
    """b <- mu b + G;  theta <- theta - eta (G + mu b).   As torch.optim.SGD(nesterov=True)."""

    num_buffers = 1

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        (b,) = buffers
        b.mul_(self.settings.momentum).add_(gradient)
        theta.add_(gradient.add_(b, alpha=self.settings.momentum), alpha=-self.settings.lr)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        native = merged.native()
        if native is None:
            super().step_merged(theta, merged, buffers, outer_step)
        else:  # in the pass that adds up, which halves the time of both
            (b,) = buffers
            native.nesterov(theta, b, self.settings.momentum, self.settings.lr)


class TakeMean(OuterOptimizer):
    """theta <- theta - G: the mean of what learners have. Of companion fragments, whatever the settings say."""

    num_buffers = 0

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        theta.sub_(gradient)


class Adam(OuterOptimizer):
    """Adam with bias correction (arXiv 1412.6980), as torch.optim.Adam."""

    num_buffers = 2

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        first, second = buffers
        s = self.settings
        first.lerp_(gradient, 1 - s.beta1)
        second.mul_(s.beta2).addcmul_(gradient, gradient, value=1 - s.beta2)
        corrected = torch.sqrt(second, out=gradient).div_((1 - s.beta2**outer_step) ** 0.5).add_(s.eps)
        theta.addcdiv_(first, corrected, value=-s.lr / (1 - s.beta1**outer_step))
