"""How much one contribution may count for, whatever it claims and whatever is in it. Pure arithmetic on few numbers.

All bounds are multiples of a median over the contributions of one round. Of an even number it is the lower one: then
half of the learners cannot raise it, and of two learners neither can; a liar can only make a round shorter. A single
contribution is its own median, so nothing bounds it but the norm guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

import torch
from torch import Tensor

MOST = 2.0
"""No weight counts for more than this many times the median weight, and only with as many times the median of inner
steps. With infinity nothing is cut, and the formulas are the published ones (`benchmarks/hostile.py`)."""
CLIP_ITERATIONS = 3
"""Of centered clipping. Each may move the centre by the median distance."""


def capped(weights: Sequence[float], allowed: Sequence[float] | None = None) -> list[float]:
    """The weights, none above the median. `allowed`: how many times the median each may be, instead of once.

    Of M learners one then has at most 2 / M of all, where it is allowed once: half of the others weigh as much.
    """
    if math.isinf(MOST):
        return [*weights]
    usual = median_low(weights)
    times = allowed or [1.0] * len(weights)
    return [min(weight, most * usual) for weight, most in zip(weights, times, strict=True)]


def clipping(lengths: Sequence[float], allowed: Sequence[float] | None = None) -> list[float]:
    """What to multiply vectors of these lengths with, so that none is longer than their median.

    `allowed`: how many times the median each may have, instead of once.

    Where most lengths are 0 the median is that of the others: few learners may have met the rows of an embedding, or
    the expert, and their work is no lie. Whoever is alone there is bounded by the norm guard only.
    """
    if math.isinf(MOST):
        return [1.0] * len(lengths)
    usual = median_low(lengths) or median_low([length for length in lengths if length > 0] or [0.0])
    times = allowed or [1.0] * len(lengths)
    return [min(1.0, most * usual / one) if one > 0 else 1.0 for one, most in zip(lengths, times, strict=True)]


def allowed(steps: Sequence[int]) -> list[float]:
    """How often the median each contribution may count for: once, and up to `MOST` times in proportion to inner steps
    above their median. So where slow learners are many, the fast ones are not cut down to them.

    Of weights, and of lengths in the radius of RDA, which scales a step and cannot turn it. Not in a mean, where length
    is influence as weight is: with twice of both a liar would outvote seven learners that agree little.
    """
    usual = median_low(steps)
    return [min(MOST, max(1.0, one / usual)) for one in steps]


def centered_clip(gram: Tensor, shares: Sequence[float]) -> list[float]:
    """The weights a of the vectors x in their centered clipping v = sum a x.

        v <- v + sum s clip(x - v, tau),  clip(y, tau) = y min(1, tau / |y|)

    Karimireddy, He, Jaggi 2021, "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333), equation
    (CC), with shares instead of 1 / M. There v begins at the last aggregate, which contributions of local training do
    not resemble; here at the mean of the vectors clipped to their median norm. tau is the median of |x - v|, anew in
    each of `CLIP_ITERATIONS` iterations, so it needs no setting.

    `gram`: float64 (M, M), the dot products of the vectors. v is in their span, so |x - v| follows from it:
    |x_i - v|^2 = G_ii - 2 (G a)_i + a G a. `shares`: M, with sum 1.
    """
    own = gram.diagonal()
    s = torch.tensor(shares, dtype=torch.float64)
    norms = [math.sqrt(max(0.0, square)) for square in own.tolist()]
    a = s * torch.tensor(clipping(norms), dtype=torch.float64)
    for _ in range(CLIP_ITERATIONS):
        to = gram @ a
        distances = (own - 2 * to + a @ to).clamp(min=0.0).sqrt().tolist()
        tau = median_low(distances)
        kept = s * torch.tensor([min(1.0, tau / d) if d > 0 else 1.0 for d in distances], dtype=torch.float64)
        a = a * (1 - kept.sum()) + kept
    return [float(weight) for weight in a]
