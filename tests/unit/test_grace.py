"""How long a round stays open: by patience where learners carry, else by Eq. 3, within [0, one step]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from builders import make_settings
from diloco_server.core.cadence import GraceWindow, MovingAverage

EQ_3 = {"grace": "adaptive", "grace_gamma": 0.5, "overlap_steps": 2, "on_commit": "overwrite"}


def make_window(to_quorum: Sequence[float] = (), to_publish: Sequence[float] = (), **sync: Any) -> GraceWindow:
    window = GraceWindow(make_settings(sync=EQ_3 | sync).sync)
    for seconds in to_quorum:
        window.to_quorum.add(seconds)
    for seconds in to_publish:
        window.to_publish.add(seconds)
    return window


@pytest.mark.parametrize(
    ("to_quorum", "to_publish", "step_time_s", "seconds"),
    [
        ([], [], 1.0, 1.0),  # 0.5 * 2
        ([1.0], [0.5], 1.0, 0.25),  # 0.5 * (2 - 1.5)
        ([1.0], [], 1.0, 0.5),
        ([], [1.0], 1.0, 0.5),
        ([3.0], [1.0], 1.0, 0.0),  # no slack left
        ([], [], 0.0, 0.0),  # nobody has told its step time
        ([1.0, 2.0], [0.5], 1.0, 0.2),  # average 1.0 + 0.1 * (2.0 - 1.0)
    ],
)
def test_the_window_is_a_share_of_the_slack_that_the_overlap_leaves(
    to_quorum: list[float], to_publish: list[float], step_time_s: float, seconds: float
) -> None:
    assert make_window(to_quorum, to_publish).seconds(step_time_s) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("sync", "seconds"),
    [
        ({"overlap_steps": 10, "grace_gamma": 1.0}, 2.0),  # never more than one step
        ({"overlap_steps": 0}, 0.0),
        ({"overlap_steps": 1, "grace_gamma": 0.5}, 1.0),
    ],
)
def test_the_window_is_clamped_to_one_step(sync: dict[str, Any], seconds: float) -> None:
    assert make_window(**sync).seconds(2.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("sync", "step_time_s", "seconds"),
    [
        ({}, 1.0, 6.0),  # 2.5 times a tenth of H = 24 steps, whatever quorum and merge take
        ({"patience": 0.2}, 2.0, 24.0),
        ({"sync_every": 4}, 1.0, 5.0),  # never less than the overlap
        ({"patience": 1.0}, 10.0, 60.0),  # never more than a minute
        ({}, 0.0, 0.0),  # nobody has told its step time
    ],
)
def test_where_learners_carry_a_round_waits_a_share_of_its_cadence(sync, step_time_s, seconds) -> None:
    window = make_window([3.0], [3.0], on_commit="carry", **sync)
    assert window.seconds(step_time_s) == pytest.approx(seconds)


@pytest.mark.parametrize("grace", [0.0, 1.5])
def test_a_fixed_window_adapts_to_nothing(grace: float) -> None:
    assert make_window([9.0], [9.0], grace=grace).seconds(0.1) == grace


def test_a_moving_average_takes_the_first_value_as_it_is_and_then_follows() -> None:
    average = MovingAverage(alpha=0.5)
    assert average.value is None
    seen = []
    for seconds in (4.0, 8.0, 8.0):
        average.add(seconds)
        seen.append(average.value)
    assert seen == [4.0, 6.0, 7.0]
