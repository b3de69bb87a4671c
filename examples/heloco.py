"""HeLoCo: Nesterov on gradients corrected not to oppose the momentum. Put this folder on PYTHONPATH, and run:

diloco up --set outer.optimizer=heloco:HeLoCo
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_server.core.merge import MergedSlice
from diloco_server.core.outer import Nesterov

KEPT = 0.2
"""c_ok: a gradient with at least this cosine is left as it is. We chose this value and the next three: we could not
check those of the paper."""
SHRINK = 1.0
"""k_s, and beta_max as well: how much of the part against the momentum is removed."""
TURN = 1.0
"""k_d: how far a gradient of small cosine is turned toward the momentum."""
KAPPA = 1.0
"""Weight of the momentum's norm in the confidence."""


class HeLoCo(Nesterov):
    """Nesterov on gradients that are corrected where they go against the momentum (arXiv 2606.00271).

    With unit vectors u of G and v of b, c = u . v, and confidence q = |G| / (|G| + kappa |b|):
    c >= c_ok: G.   c < 0: G - min(-k_s c q, beta_max) c |G| v.   Else |G| times the direction of (1 - l) u + l v, where
    l = k_d (c_ok - c) q.   A block is a slice of a tensor, so results depend on how a fragment is cut, as with RDA.
    """

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
