"""The learning rate follows the global progress."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_common.settings import TrainSettings
from diloco_demo.training import scheduled, share_at
from diloco_worker.progress_lr import WARMUP_FLOOR, WARMUP_STEPS


@pytest.mark.parametrize(
    ("fraction", "train", "share"),
    [
        (0.0, {}, WARMUP_FLOOR),  # nothing merged yet: it learns all the same
        (0.05, {}, 0.5),
        (0.1, {}, 1.0),
        (0.55, {}, 0.55),  # half of the way, between 1 and 0.1
        (0.325, {}, 0.1 + 0.9 * 0.75),
        (1.0, {}, 0.1),
        (1.7, {}, 0.1),  # the last round may overshoot the budget
        (0.325, {"schedule": "cosine"}, 0.1 + 0.9 * 0.853553),
        (0.55, {"schedule": "cosine"}, 0.55),
        (1.0, {"schedule": "cosine"}, 0.1),
        (0.6, {"schedule": "wsd", "decay": 0.4}, 1.0),  # still stable
        (0.8, {"schedule": "wsd", "decay": 0.4, "lr_final": 0.0}, 0.5),
        (1.0, {"schedule": "wsd", "decay": 0.4, "lr_final": 0.0}, 0.0),
        (0.1, {"schedule": "wsd", "decay": 1.0}, 1.0),  # the warm-up comes first
        (0.0, {"warmup": 0.0}, 1.0),
        (1.0, {"warmup": 0.0, "lr_final": 0.0}, 0.0),
        (0.5, {"warmup": 1.0}, 0.5),
        (1.0, {"warmup": 1.0}, 1.0),
    ],
)
def test_warm_up_then_down_by_global_progress(fraction: float, train: dict[str, Any], share: float) -> None:
    settings = TrainSettings.model_validate({"schedule": "linear", "warmup": 0.1, "lr_final": 0.1} | train)
    assert scheduled(fraction, settings) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize(
    ("budget", "fraction", "inner_step", "share"),
    [
        (0, 0.0, 0, 1 / WARMUP_STEPS),
        (0, 0.0, WARMUP_STEPS - 1, 1.0),
        (0, 0.0, 10**6, 1.0),  # no end, no decay
        (1000, 0.1, 0, 1 / WARMUP_STEPS),  # joined late with a new optimizer
        (1000, 0.1, 10**6, 1.0),
        (1000, 1.0, 10**6, 0.1),
    ],
)
def test_a_new_optimizer_rises_and_a_run_without_end_stays(
    budget: int, fraction: float, inner_step: int, share: float
) -> None:
    train = TrainSettings(warmup=0.1, lr_final=0.1)
    got = share_at(fraction=fraction, inner_step=inner_step, budget=budget, train=train)
    assert got == pytest.approx(share)
