"""The formulas of merge rules on whole vectors in float64, to hold the real ones against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_simulator.verify.published import FORMULAS

Sent = tuple[Tensor, int, int]
"""Vector, tokens, steps."""


def lower_median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def shares(sent: Sequence[Sent]) -> list[float]:
    """Of the weights tokens^2 / steps."""
    weights = [tokens**2 / steps for _, tokens, steps in sent]
    return [w / sum(weights) for w in weights]


def published(rule: str, sent: Sequence[Sent]) -> Tensor:
    return FORMULAS[rule]([v.double() for v, _, _ in sent], shares(sent))


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
