"""The figures of benchmarks/versus_page.py, from step times that are written here by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from versus_page import Steps, Window, merged_at, read_steps, stalls_of

STEP_S = 1.0


def steps(*at: float, merged: tuple[float, ...] = ()) -> Steps:
    return Steps(list(at), [8.0] * len(at), list(merged) or [0.0] * len(at))


def window(began: float, ended: float) -> Window:
    return Window(began, ended, 0)


@pytest.mark.parametrize(("processes", "ended", "stalls"), [
    pytest.param([steps(9, 10, 11, 12)], 12, [0, 0], id="a step takes what computing takes"),
    pytest.param([steps(9, 10, 13)], 13, [2], id="a step takes longer"),
    pytest.param([steps(9, 10), steps(14, 15)], 15, [3, 0], id="the time between two processes of a worker counts"),
    pytest.param([steps(9, 10, 11)], 15, [0, 3], id="who hangs until the end stalls until then"),
    pytest.param([], 15, [4], id="who never steps stalls all the time"),
])  # fmt: skip
def test_a_stall_is_the_time_between_two_steps_beyond_computing(
    processes: list[Steps], ended: float, stalls: list[float]
) -> None:
    assert stalls_of(processes, STEP_S, window(10.0, ended)) == stalls


def test_merged_tokens_lie_on_a_line_between_two_merges() -> None:
    lumps = steps(0, 5, 10, 15, 20, merged=(0, 0, 100, 100, 200))
    assert merged_at({0: [lumps]}, 15.0, own=False) == 150
    assert merged_at({0: [lumps]}, 30.0, own=False) == 200


def test_where_each_counts_its_own_the_sum_counts_also_that_of_a_dead_process() -> None:
    dead, back = steps(0, 10, merged=(0, 100)), steps(20, 30, merged=(0, 50))
    assert merged_at({0: [dead, back], 1: [steps(0, 30, merged=(0, 300))]}, 30.0, own=True) == 450


def test_a_line_that_a_killed_worker_wrote_by_half_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps-3-2.5.txt").write_text("20.0 128 7.0\n20.3 12")
    (tmp_path / "steps-3-1.5.txt").write_text("10.0 128 5.0\n")
    assert [s.at for s in read_steps(tmp_path, 3)] == [[10.0], [20.0]]
