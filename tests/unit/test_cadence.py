"""When a fragment is due, and how long its round stays open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_common.wire.messages import Progress
from diloco_server.core.arrivals import Reports
from diloco_server.core.cadence import adaptive_s, first_interval, is_due
from diloco_server.core.membership import Member


def member(learner_id: str, step: int, first: int | None = 0) -> Member:
    made = Member(learner_id, "p", 1, last_heard=0.0, last_step_at=0.0)
    made.reports, made.first_step = Reports.begin(Progress(step, 0), 0.0), first
    return made


@given(num_fragments=st.integers(1, 300), sync_every=st.integers(1, 300))
def test_fragments_spread_evenly_over_h(num_fragments: int, sync_every: int) -> None:
    intervals = sorted(first_interval(p, num_fragments, sync_every) for p in range(num_fragments))
    assert intervals[0] >= 1
    assert intervals[-1] == sync_every
    per_step = [intervals.count(step) for step in range(1, sync_every + 1)]
    assert max(per_step) - min(per_step) <= 1


# H = 4; `steps` are those reported now, `base` those when the last round opened.
@pytest.mark.parametrize(
    ("steps", "base", "quorum", "due"),
    [
        ({}, {}, 1, False),
        ({"a": 4}, {}, 1, True),
        ({"a": 3}, {}, 1, False),
        ({"a": 8}, {"a": 4}, 1, True),
        ({"a": 8, "b": 1}, {"a": 4}, 2, False),
        ({"a": 8, "b": 4}, {"a": 4}, 2, True),
        ({"a": 8, "b": 4, "c": 3}, {"a": 4}, "all", False),
        ({"a": 8, "b": 4, "c": 4}, {"a": 4}, "all", True),
        ({"a": 8}, {"a": 4}, 3, True),  # who is not there is not waited for
        ({"b": 4}, {"a": 1000}, "all", True),  # the fastest has died; the cadence goes on
    ],
)
def test_a_fragment_is_due_when_enough_learners_took_h_steps_of_their_own(steps, base, quorum, due) -> None:
    assert is_due([member(i, s) for i, s in steps.items()], base, 4, quorum) is due


def test_who_has_not_reported_neither_makes_due_nor_is_waited_for() -> None:
    silent = member("s", 0, first=None)
    assert not is_due([silent], {}, 4, "all")
    assert is_due([silent, member("a", 4)], {}, 4, "all")


@pytest.mark.parametrize(
    ("every", "step_time_s", "scatter_s", "seconds"),
    [
        (24, 1.0, 0.0, 6.0),  # 2.5 times a tenth of H = 24 steps
        (4, 1.0, 0.0, 5.0),  # never less than the overlap
        (24, 1.0, 0.5, 11.0),  # steps in bursts: 2.5 times 2.4 + 4 * 0.5
        (24, 20.0, 0.0, 60.0),  # never more than a minute
        (24, 0.0, 0.0, 0.0),  # nobody has told its step time
    ],
)
def test_a_round_waits_a_share_of_its_cadence(every, step_time_s, scatter_s, seconds) -> None:
    assert adaptive_s(step_time_s, every, scatter_s) == pytest.approx(seconds)
