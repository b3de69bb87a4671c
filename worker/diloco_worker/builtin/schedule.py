"""The learning rate as a function of the run's progress. Pure.

Progress is global (merged tokens over the budget), so a learner that joins late has the same rate as the others.
"""

from __future__ import annotations

import math

WARMUP_FLOOR = 0.1
"""The warm-up starts at this share of the rate, because progress stays at 0 until the first round is merged."""
WARMUP_STEPS = 20
"""An optimizer without moments rises to the rate over this many steps."""


def learning_rate(fraction: float, lr: float, warmup: float, final: float) -> float:
    """Linear up to `lr` at progress `warmup`, then a cosine down to `final` * `lr` at progress 1."""
    if fraction < warmup:
        return lr * max(WARMUP_FLOOR, fraction / warmup)
    if warmup >= 1:
        return lr
    done = min((fraction - warmup) / (1 - warmup), 1.0)
    return lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def rate_at(*, fraction: float, inner_step: int, budget: int, lr: float, warmup: float, final: float) -> float:
    """The rate of one inner step. `inner_step` counts from 0 at the optimizer's first step.

    It is the schedule (or the constant `lr` in a run without end, `budget` 0), times the rise of the first steps.
    """
    rise = min(1.0, (inner_step + 1) / WARMUP_STEPS)
    return rise * (learning_rate(fraction, lr, warmup, final) if budget else lr)
