from collections.abc import Sequence

from torch import Tensor

from diloco_server.core.merge import MergedSlice
from diloco_server.core.outer import Nesterov, OuterOptimizer, _moved


class Corrected(Nesterov):
    """theta <- theta - eta (G + mu b / (1 - mu^t)).   The momentum is as long from the first step on as it will be."""

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        mu, (b,) = self.settings.momentum, buffers
        moved = _moved(b, mu, gradient)
        theta.add_(gradient.add_(moved, alpha=mu / (1 - mu**outer_step)), alpha=-self.settings.lr)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        OuterOptimizer.step_merged(self, theta, merged, buffers, outer_step)
