"""The learning rate as a function of the run's progress. Pure.

Progress is global (merged tokens over the budget), so a learner that joins late has the same rate as the others. What
is computed here is a share, 0 to 1: of the highest rate of each group of parameters.
"""

from __future__ import annotations

from diloco_common.settings import TrainSettings
from diloco_worker.progress_lr import WARMUP_STEPS, share


def scheduled(fraction: float, train: TrainSettings) -> float:
    """The share at this progress, as the settings say."""
    return share(train.schedule, fraction, train.warmup, train.lr_final, train.decay)


def share_at(*, fraction: float, inner_step: int, budget: int, train: TrainSettings) -> float:
    """The share of one inner step. `inner_step` counts from 0 at the optimizer's first step.

    It is the schedule (or 1 in a run without end, `budget` 0), times the rise of the first steps.
    """
    rise = min(1.0, (inner_step + 1) / WARMUP_STEPS)
    return rise * (scheduled(fraction, train) if budget else 1.0)
