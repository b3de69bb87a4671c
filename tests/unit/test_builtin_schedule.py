"""The learning rate follows the global progress."""

from __future__ import annotations

import pytest

from diloco_worker.builtin.schedule import WARMUP_FLOOR, WARMUP_STEPS, learning_rate, rate_at


@pytest.mark.parametrize(
    ("fraction", "warmup", "final", "share"),
    [
        (0.0, 0.1, 0.1, WARMUP_FLOOR),  # nothing merged yet: it learns all the same
        (0.05, 0.1, 0.1, 0.5),
        (0.1, 0.1, 0.1, 1.0),
        (0.55, 0.1, 0.1, 0.55),  # half of the cosine, between 1 and 0.1
        (1.0, 0.1, 0.1, 0.1),
        (1.7, 0.1, 0.1, 0.1),  # the last round may overshoot the budget
        (0.0, 0.0, 0.1, 1.0),
        (1.0, 0.0, 0.0, 0.0),
        (0.5, 1.0, 0.1, 0.5),
        (1.0, 1.0, 0.1, 1.0),
    ],
)
def test_warm_up_then_cosine_by_global_progress(fraction, warmup, final, share):
    assert learning_rate(fraction, lr=3e-3, warmup=warmup, final=final) == pytest.approx(3e-3 * share)


@pytest.mark.parametrize(
    ("budget", "fraction", "inner_step", "rate"),
    [
        (0, 0.0, 0, 1 / WARMUP_STEPS),
        (0, 0.0, WARMUP_STEPS - 1, 1.0),
        (0, 0.0, 10**6, 1.0),  # no end, no decay
        (1000, 0.1, 0, 1 / WARMUP_STEPS),  # joined late with a new optimizer
        (1000, 0.1, 10**6, 1.0),
        (1000, 1.0, 10**6, 0.1),
    ],
)
def test_a_new_optimizer_rises_and_a_run_without_end_stays(budget, fraction, inner_step, rate):
    got = rate_at(fraction=fraction, inner_step=inner_step, budget=budget, lr=1.0, warmup=0.1, final=0.1)
    assert got == pytest.approx(rate)
