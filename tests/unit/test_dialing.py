"""How long a learner waits before it dials again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diloco_worker.core.dialing import FIRST_S, LONGEST_S, backoff_s


@pytest.mark.parametrize(
    ("attempt", "jitter", "seconds"),
    [(0, 0.0, 0.1), (0, 1.0, 0.2), (1, 1.0, 0.26), (8, 0.0, 0.82), (9, 1.0, 2.0), (9, 0.0, 1.0), (10**6, 0.5, 1.5)],
)
def test_the_wait_grows_to_a_bound_and_half_of_it_is_chance(attempt: int, jitter: float, seconds: float) -> None:
    assert backoff_s(attempt, jitter) == pytest.approx(seconds, rel=1e-2)


def test_waits_never_shrink_and_stay_within_their_bounds() -> None:
    for jitter in (0.0, 0.3, 0.999):
        waits = [backoff_s(attempt, jitter) for attempt in range(50)]
        assert all(a <= b for a, b in pairwise(waits))
        assert waits[0] >= FIRST_S / 2
        assert waits[-1] <= LONGEST_S


def test_after_ten_seconds_of_failures_there_is_at_most_one_attempt_per_second() -> None:
    spent_s, attempt = 0.0, 0
    while spent_s < 10.0:
        spent_s += backoff_s(attempt, jitter=0.0)
        attempt += 1
    assert backoff_s(attempt, jitter=0.0) >= 1.0
