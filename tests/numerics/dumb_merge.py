"""The merge rules written straight from their formulas, on whole vectors in float64, to hold the real ones against.

`published_*` are those of members; the others have the cuts of strangers.
"""

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


def times(sent: Sequence[Sent]) -> list[float]:
    """How often the median each may count for: its steps over their median, but 1 to 2."""
    usual = lower_median([steps for _, _, steps in sent])
    return [min(2.0, max(1.0, steps / usual)) for _, _, steps in sent]


def shares(sent: Sequence[Sent], most: Sequence[float]) -> list[float]:
    """Of the weights tokens^2 / steps, none above `most` times their median."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    usual = lower_median(weights)
    weights = [min(w, m * usual) for w, m in zip(weights, most, strict=True)]
    return [w / sum(weights) for w in weights]


def cut(vectors: Sequence[Tensor], most: Sequence[float]) -> list[Tensor]:
    """In float64, none longer than so many times the median length."""
    doubles = [v.double() for v in vectors]
    usual = lower_median([float(v.norm()) for v in doubles])
    return [v * min(1.0, m * usual / float(v.norm())) for v, m in zip(doubles, most, strict=True)]


def mean(sent: Sequence[Sent]) -> Tensor:
    """sum s v, none of the v longer than the median."""
    vectors = cut([v for v, _, _ in sent], [1.0] * len(sent))
    return torch.stack([s * v for s, v in zip(shares(sent, times(sent)), vectors, strict=True)]).sum(0)


def rda(sent: Sequence[Sent]) -> Tensor:
    """(sum s|v|) unit(sum s unit(v)), none of the v longer than the median, times its steps over theirs (1 to 2)."""
    vectors = cut([v for v, _, _ in sent], times(sent))
    pairs = list(zip(shares(sent, times(sent)), vectors, strict=True))
    direction = torch.stack([s * v / v.norm() for s, v in pairs]).sum(0)
    return torch.stack([s * v.norm() for s, v in pairs]).sum() * direction / direction.norm()


def shortened(vectors: Sequence[Tensor]) -> Tensor:
    """(1 - c / 2) sum v, c the cosines of all pairs of v, each with the product of their lengths as weight; c >= 0."""
    pairs = list(itertools.combinations(vectors, 2))
    cosine = sum(v @ w for v, w in pairs) / sum(v.norm() * w.norm() for v, w in pairs)
    return (1 - max(0.0, float(cosine)) / 2) * torch.stack(list(vectors)).sum(0)


def agreement(sent: Sequence[Sent]) -> Tensor:
    """Of s v, none of the v longer than the median."""
    vectors = cut([v for v, _, _ in sent], [1.0] * len(sent))
    return shortened([s * v for s, v in zip(shares(sent, times(sent)), vectors, strict=True)])


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
    s, xs = shares(sent, [float("inf")] * len(sent)), [v.double() for v, _, _ in sent]
    cap = lower_median([float(x.norm()) for x in xs])
    v = torch.stack([share * x * min(1.0, cap / float(x.norm())) for share, x in zip(s, xs, strict=True)]).sum(0)
    for _ in range(iterations):
        away = [x - v for x in xs]
        tau = lower_median([float(a.norm()) for a in away])
        clipped = [a * min(1.0, tau / float(a.norm())) for a in away]
        v = v + torch.stack([share * a for share, a in zip(s, clipped, strict=True)]).sum(0)
    return v
