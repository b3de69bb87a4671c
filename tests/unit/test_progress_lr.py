"""Rates that follow the run: their shapes, and the scheduler that a loop steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LinearLR, LRScheduler, SequentialLR

from diloco_worker.progress_lr import WARMUP_STEPS, Followed, ProgressLR, Shape, share


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ("cosine", {0.0: 0.1, 0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2}),
        ("linear", {0.0: 0.1, 0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2}),
        ("wsd", {0.0: 0.1, 0.05: 0.5, 0.1: 1.0, 0.8: 1.0, 0.9: 0.6, 1.0: 0.2}),
        ("constant", {0.0: 0.1, 0.05: 0.5, 0.1: 1.0, 1.0: 1.0}),
    ],
)
def test_a_shape_by_the_progress_of_the_run(shape: Shape, at: dict[float, float]) -> None:
    assert {f: share(shape, f, warmup=0.1, final=0.2) for f in at} == pytest.approx(at)


@dataclass
class Run:
    fraction: float = 0.0
    tokens_budget: int = 100


def scheduler(run: Run, **options: object) -> tuple[torch.optim.Optimizer, ProgressLR]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.weight, "lr": 1.0}, {"params": model.bias, "lr": 10.0}])
    return optimizer, ProgressLR(optimizer, run, **options)  # type: ignore[arg-type]


def rates(optimizer: torch.optim.Optimizer, schedule: ProgressLR, steps: int) -> list[float]:
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return [group["lr"] for group in optimizer.param_groups]


def test_each_group_keeps_its_own_rate() -> None:
    run = Run(fraction=0.5)
    optimizer, schedule = scheduler(run, shape="linear", warmup=0.0, final=0.0)
    assert rates(optimizer, schedule, WARMUP_STEPS) == pytest.approx([0.5, 5.0])
    run.fraction = 0.9
    assert rates(optimizer, schedule, 1) == pytest.approx([0.1, 1.0])


def test_it_goes_on_from_its_state_in_another_process() -> None:
    optimizer, schedule = scheduler(Run(fraction=0.5), shape="constant", warmup=0.0)
    rates(optimizer, schedule, WARMUP_STEPS)
    saved = schedule.state_dict()
    again, resumed = scheduler(Run(fraction=0.5), shape="constant", warmup=0.0)
    resumed.load_state_dict(saved)
    assert rates(again, resumed, 0) == pytest.approx([1.0, 10.0]), "also in the first step"
    assert rates(again, resumed, 1) == pytest.approx([1.0, 10.0])


def by_hand(optimizer: torch.optim.Optimizer, run: Run) -> list[LRScheduler]:
    warm = LinearLR(optimizer, 0.5, 1.0, total_iters=10)
    return [warm, ProgressLR(optimizer, run, "constant", warmup=0.0)]


def by_hand_the_other_way(optimizer: torch.optim.Optimizer, run: Run) -> list[LRScheduler]:
    schedule = ProgressLR(optimizer, run, "constant", warmup=0.0)
    return [LinearLR(optimizer, 0.5, 1.0, total_iters=10), schedule]


def chained(optimizer: torch.optim.Optimizer, run: Run) -> list[LRScheduler]:
    return [ChainedScheduler(by_hand(optimizer, run), optimizer)]


def in_sequence(optimizer: torch.optim.Optimizer, run: Run) -> list[LRScheduler]:
    return [SequentialLR(optimizer, by_hand(optimizer, run), milestones=[10])]


@pytest.mark.parametrize("make", [by_hand, by_hand_the_other_way, chained, in_sequence])
def test_a_warm_up_of_another_scheduler_ends_at_the_rate(make: Callable[..., list[LRScheduler]]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedules = make(optimizer, Run())
    seen = []
    for _ in range(10 + 2 * WARMUP_STEPS):
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert max(seen) == pytest.approx(1.0)
    assert seen[-1] == pytest.approx(1.0)


def test_a_rate_that_the_loop_halves_stays_halved_also_after_a_restart() -> None:
    run = Run(fraction=0.5)
    optimizer, schedule = scheduler(run, shape="linear", warmup=0.0, final=0.0)
    rates(optimizer, schedule, WARMUP_STEPS)
    optimizer.param_groups[0]["lr"] /= 2
    assert rates(optimizer, schedule, 1) == pytest.approx([0.25, 5.0])
    run.fraction = 0.75
    assert rates(optimizer, schedule, 1) == pytest.approx([0.125, 2.5])
    again, resumed = scheduler(run, shape="linear", warmup=0.0, final=0.0)
    resumed.load_state_dict(schedule.state_dict())
    assert rates(again, resumed, 1) == pytest.approx([0.125, 2.5])


@pytest.mark.parametrize(
    ("fraction", "step", "rate"),
    [(0.0, 0, 0.25), (0.0, 1, 0.5), (0.0, 50, 0.97), (0.02, 0, 0.75), (0.5, 3, 0.5), (0.5, 99, 0.5), (1.0, 0, 0.0)],
)
def test_a_schedule_of_the_users_own_is_as_far_as_the_run_and_rises_by_itself(fraction, step, rate):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    own = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 100))
    followed = Followed(own, SimpleNamespace(fraction=fraction), 100)
    followed.set(step)
    assert optimizer.param_groups[0]["lr"] == own.get_last_lr()[0] == pytest.approx(rate, abs=0.02)
