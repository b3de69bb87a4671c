"""Centered clipping: a merge that withstands liars without a guard. Put this folder on PYTHONPATH, and run:

diloco up --set sync.merge=centered_clip:centered_clip
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

import torch
from torch import Tensor

ITERATIONS = 3
"""Each may move the center by the median distance."""


def centered_clip(norms: Sequence[float], shares: Sequence[float], products: Callable[[], Tensor]) -> Sequence[float]:
    """The weights a of the vectors x in their centered clipping v = sum a x.

        v <- v + sum s clip(x - v, tau),  clip(y, tau) = y min(1, tau / |y|)

    Karimireddy, He, Jaggi 2021, "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333), equation
    (CC), with shares instead of 1 / M. There v begins at the last aggregate, which contributions of local training do
    not resemble; here it begins at the mean of the vectors clipped to their median norm. tau is the median of |x - v|,
    anew in each iteration, so it needs no setting. v is in the span of the vectors, so |x - v| follows from their dot
    products G: |x_i - v|^2 = G_ii - 2 (G a)_i + a G a.
    """
    gram = products()
    own, s = gram.diagonal(), torch.tensor(shares, dtype=torch.float64)
    a = s * _kept(norms, median_low(norms) or median_low([norm for norm in norms if norm > 0] or [0.0]))
    for _ in range(ITERATIONS):
        to = gram @ a
        distances = (own - 2 * to + a @ to).clamp(min=0.0).sqrt().tolist()
        kept = s * _kept(distances, median_low(distances))
        a = a * (1 - kept.sum()) + kept
    return [float(weight) for weight in a]


def _kept(lengths: Sequence[float], most: float) -> Tensor:
    """Factors, float64 (M,), that shorten vectors of these lengths to `most` where they are longer."""
    return torch.tensor([min(1.0, most / one) if one > 0 else 1.0 for one in lengths], dtype=torch.float64)
