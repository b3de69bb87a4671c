"""The merge rules written straight from their formulas, on whole vectors in float64, to hold the real ones against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Sent = tuple[Tensor, int, int]
"""Vector, tokens, steps."""


def lower_median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def shares(sent: Sequence[Sent]) -> list[float]:
    """Of the weights tokens^2 / steps."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    return [w / sum(weights) for w in weights]


def shortened(vectors: Sequence[Tensor]) -> Tensor:
    """(1 - c / 2) sum v, c the cosines of all pairs of v, each with the product of their lengths as weight; c >= 0."""
    pairs = list(itertools.combinations(vectors, 2))
    cosine = sum(v @ w for v, w in pairs) / sum(v.norm() * w.norm() for v, w in pairs)
    return (1 - max(0.0, float(cosine)) / 2) * torch.stack(list(vectors)).sum(0)


def published_agreement(sent: Sequence[Sent]) -> Tensor:
    """Of w v / sum w."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    return shortened([w * v.double() / sum(weights) for w, (v, _, _) in zip(weights, sent, strict=True)])


def published_rda(sent: Sequence[Sent]) -> Tensor:
    """(sum w|v| / sum w) unit(sum w unit(v) / sum w)."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    doubles = [v.double() for v, _, _ in sent]
    radius = sum(w * v.norm() for w, v in zip(weights, doubles, strict=True)) / sum(weights)
    direction = torch.stack([w * v / v.norm() for w, v in zip(weights, doubles, strict=True)]).sum(0)
    return radius * direction / direction.norm()


def published_mean(sent: Sequence[Sent]) -> Tensor:
    """sum w v / sum w."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    return torch.stack([w * v.double() for w, (v, _, _) in zip(weights, sent, strict=True)]).sum(0) / sum(weights)


def centered_clip(sent: Sequence[Sent], iterations: int = 3) -> Tensor:
    """v <- v + sum s clip(x - v, tau), tau the median of |x - v|; begins at the mean clipped to the median norm."""
    s, xs = shares(sent), [v.double() for v, _, _ in sent]
    cap = lower_median([float(x.norm()) for x in xs])
    v = torch.stack([share * x * min(1.0, cap / float(x.norm())) for share, x in zip(s, xs, strict=True)]).sum(0)
    for _ in range(iterations):
        away = [x - v for x in xs]
        tau = lower_median([float(a.norm()) for a in away])
        clipped = [a * min(1.0, tau / float(a.norm())) for a in away]
        v = v + torch.stack([share * a for share, a in zip(s, clipped, strict=True)]).sum(0)
    return v
