"""Chips that fail, and what is left of their islands."""

import random

import pytest

from diloco_planner.chips import DAY_S, Away, ChipTimeline, Failures, Island, island_timeline, uptime

NEVER = Failures(mtbi_s=1e15)
DAYS = 20 * DAY_S


def drawn(island: Island, failures: Failures, seed: int = 0) -> ChipTimeline:
    return island_timeline(island, failures, DAYS, random.Random(seed))


@pytest.mark.parametrize(
    ("island", "failures", "low", "high"),
    [
        (Island(1e5), NEVER, 1.0, 1.0),
        (Island(1e5, elastic=True), Failures(), 0.90, 0.93),
        (Island(1e5, elastic=True, spares=1000), Failures(), 0.96, 0.98),  # a spare joins without a second pause
        (Island(1e5, elastic=False, spares=1), Failures(), 0.30, 0.45),  # it waits for one of two repairs
        (Island(1e5, elastic=False), Failures(), 0.15, 0.25),  # for each one
        (Island(1e5, elastic=False, spares=10**9), Failures(checkpoint_s=600), 0.20, 0.30),
        (Island(256), Failures(mtbi_s=1e15, slow_every_s=256 * 3600, slow_for_s=600, slow_pace=0.5), 0.91, 0.94),
        (Island(256), Failures(mtbi_s=1e15, preempt_every_s=7200, preempt_for_s=1800), 0.70, 0.88),
    ],
)  # fmt: skip
def test_goodput_of_an_island(island: Island, failures: Failures, low: float, high: float) -> None:
    assert low <= drawn(island, failures).goodput <= high


def test_a_timeline_turns_work_into_time_and_back() -> None:
    line = drawn(Island(1e5), Failures())
    for work in (0.0, 1.0, 12_345.6, line.worked[-1] - 1):
        at = line.at_work(work)
        assert line.work_at(at) == pytest.approx(work)
    assert line.at_work(line.worked[-1] + 1) == float("inf")
    assert line.trained_at(line.worked[-1]) == pytest.approx(line.trained[-1])


def test_somebody_computes_nearly_always() -> None:
    lines = [(0.0, drawn(Island(1e5), Failures(), seed)) for seed in range(8)]
    assert uptime(lines[:1], DAYS) == pytest.approx(lines[0][1].computing_s / DAYS)
    assert uptime(lines, DAYS) > 0.9999
    later = [(DAYS / 4, drawn(Island(1e5), NEVER))]
    assert uptime(later, DAYS) == pytest.approx(0.75)


HALF, QUARTER = Away(0.0, DAYS / 2, 0.5), Away(DAYS / 2, DAYS * 3 / 4, 1.0)


@pytest.mark.parametrize(
    ("away", "elastic", "goodput"),
    [
        ([HALF], True, 0.75),
        ([HALF], False, 0.75),  # those that are there train
        ([QUARTER], True, 0.75),
        ([HALF, QUARTER], True, 0.5),
        ([HALF, HALF], True, 0.5),
        ([Away(i * DAYS / 40, (i + 0.5) * DAYS / 40, 0.5) for i in range(40)], True, 0.5 + 0.25),
    ],
    ids=["half is late", "a rigid half is late", "all go", "half late, all go", "two halves", "half comes and goes"],
)
def test_chips_that_are_away(away: list[Away], elastic: bool, goodput: float) -> None:
    failures = Failures(mtbi_s=1e15, loss_s=60.0, join_s=60.0, restart_s=60.0)
    line = island_timeline(Island(256 * 8, elastic=elastic), failures, DAYS, random.Random(0), away)
    pauses = 60.0 * 2 * len(away) / DAYS
    assert goodput - pauses <= line.goodput <= goodput
