"""An outer optimizer and a merge rule of your own, without a fork. Put this folder on PYTHONPATH, and run:

diloco up --set outer.optimizer=own_outer_rule:Averaged --set sync.merge=own_outer_rule:by_length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from diloco_server.core.outer import OuterOptimizer


class Averaged(OuterOptimizer):
    """Adam's first moment alone: b <- mu b + (1 - mu) G;   theta <- theta - eta b / (1 - mu^step)."""

    num_buffers = 1

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        (b,) = buffers
        b.lerp_(gradient, 1 - self.momentum)
        theta.add_(b, alpha=-self.settings.lr / (1 - self.momentum**outer_step))


def by_length(norms: Sequence[float], shares: Sequence[float], products: Callable[[], Tensor]) -> Sequence[float]:
    """Every learner has the same say: contributions are scaled to the shortest one."""
    shortest = min((norm for norm in norms if norm > 0), default=0.0)
    return [shortest / norm / len(norms) if norm > 0 else 0.0 for norm in norms]
