"""Outer optimizers for rounds of few contributions, which come late: K = 1 without grace, learners of unequal speed.

Plain Nesterov takes a momentum step per version. Where M learners contribute one after another instead of together, it
does so M times as often as in a synchronous run, with gradients that are M times as noisy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_common.settings import OuterSettings
from diloco_server.core.merge import MergedSlice
from diloco_server.core.outer import Nesterov, OuterOptimizer

KEPT = 0.2
"""c_ok: from this cosine on, a gradient is left as it is. This and the next three are ours: we could not check what the
paper takes."""
SHRINK = 1.0
"""k_s, and beta_max as well: what is taken away of the part against the momentum."""
TURN = 1.0
"""k_d: how far a gradient of small cosine is turned to the momentum."""
KAPPA = 1.0
"""Weight of the momentum's norm in the confidence."""


class DelayedNesterov(OuterOptimizer):
    """Applies gradients at once and the momentum at every N-th version (Async Local-SGD, arXiv 2401.09135, with c = 0):

    D <- D + G;   every N-th: b <- mu b + D / N, D <- 0, theta <- theta - eta (mu b + G / N);   else theta <- theta -
    eta G / N.   N = 1 is Nesterov.
    """

    num_buffers = 2

    def __init__(self, settings: OuterSettings) -> None:
        super().__init__(settings)
        self._every = settings.momentum_every

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        b, gathered = buffers
        gathered.add_(gradient)
        gradient.div_(self._every)
        if outer_step % self._every == 0:
            b.mul_(self.settings.momentum).add_(gathered, alpha=1 / self._every)
            gathered.zero_()
            gradient.add_(b, alpha=self.settings.momentum)
        theta.add_(gradient, alpha=-self.settings.lr)


class HeLoCo(Nesterov):
    """Nesterov on gradients that are corrected where they go against the momentum (arXiv 2606.00271).

    With unit vectors u of G and v of b, c = u . v, and confidence q = |G| / (|G| + kappa |b|):
    c >= c_ok: G.   c < 0: G - min(-k_s c q, beta_max) c |G| v.   Else |G| times the direction of (1 - l) u + l v, where
    l = k_d (c_ok - c) q.   A block is a slice of a tensor, so how a fragment is cut does show, as it does in RDA.
    """

    is_by_element = False

    def update(self, theta: Tensor, gradient: Tensor, buffers: Sequence[Tensor], outer_step: int) -> None:
        super().update(theta, corrected(gradient, buffers[0]), buffers, outer_step)

    def step_merged(self, theta: Tensor, merged: MergedSlice, buffers: Sequence[Tensor], outer_step: int) -> None:
        self.step(theta, merged.tensor(), buffers, outer_step)


def corrected(gradient: Tensor, momentum: Tensor) -> Tensor:
    """HeLoCo's correction of one block, in place: gradient float32, momentum bfloat16, both [num_elements]. Norms and
    cosine in float64."""
    size, length = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (gradient, momentum))
    if size == 0 or length == 0:
        return gradient
    cosine = float(torch.dot(gradient.double(), momentum.double())) / (size * length)
    confidence = size / (size + KAPPA * length)
    if cosine >= KEPT:
        return gradient
    if cosine < 0:
        part = min(-SHRINK * cosine * confidence, SHRINK)
        return gradient.add_(momentum, alpha=-part * cosine * size / length)
    turn = TURN * (KEPT - cosine) * confidence
    gradient.mul_(1 - turn).add_(momentum, alpha=turn * size / length)
    return gradient.mul_(size / max(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)), 1e-30))
