"""Paired differences with a t-interval: runs of equal seed share data and initial values, so most noise cancels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantile of Student's t, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Gap:
    """How far an arm is above another, in percent of the other."""

    mean: float
    half_width: float
    """Of the 95 % interval; inf from one pair."""
    pairs: int

    def __str__(self) -> str:
        sure = "one pair" if self.pairs == 1 else f"[{self.low:+.2f}, {self.high:+.2f}], {self.pairs} pairs"
        return f"{self.mean:+.2f} % ({sure})"

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def paired_gap(arm: Sequence[float], base: Sequence[float]) -> Gap:
    """Of losses, seed by seed. At least one pair."""
    gaps = [100 * (a / b - 1) for a, b in zip(arm, base, strict=True)]
    n = len(gaps)
    if n == 1:
        return Gap(gaps[0], math.inf, 1)
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96
    return Gap(fmean(gaps), quantile * stdev(gaps) / math.sqrt(n), n)
