"""Chips that fail, and what is left of their islands."""

import random

import pytest

from diloco_planner.chips import DAY_S, ChipTimeline, Failures, Island, island_timeline

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
