"""Delayed Nesterov: momentum for rounds with few, late contributions. Put this folder on PYTHONPATH, and run:

diloco up --set outer.optimizer=delayed_nesterov:DelayedNesterov

Plain Nesterov takes a momentum step per version. Where M learners contribute one after another instead of together, it
does so M times as often as in a synchronous run, with gradients that are M times as noisy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diloco_server.core.outer import OuterOptimizer

EVERY = 4
"""N: versions between two momentum steps, about the number of learners."""


class DelayedNesterov(OuterOptimizer):
    """Applies gradients at once and the momentum at every N-th version (Async Local-SGD, arXiv 2401.09135, with c = 0):

    D <- D + G;   every N-th: b <- mu b + D / N, D <- 0, theta <- theta - eta (mu b + G / N);   else theta <- theta -
    eta G / N.   N = 1 is Nesterov.
    """

    num_buffers = 2
    every = EVERY

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        b, gathered = buffers
        gathered.add_(gradient)
        gradient.div_(self.every)
        if outer_step % self.every == 0:
            b.mul_(self.momentum).add_(gathered, alpha=1 / self.every)
            gathered.zero_()
            gradient.add_(b, alpha=self.momentum)
        theta.add_(gradient, alpha=-self.settings.lr)
