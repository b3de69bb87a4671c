"""A shard that was frozen does not take its own absence for the silence of its learners."""

from __future__ import annotations

import pytest

from diloco_server.shell.host import AwakeClock


@pytest.mark.parametrize(
    ("asked_at", "shown"),
    [
        ([100.0, 100.02, 100.04], [100.0, 100.02, 100.04]),
        ([100.0, 101.0, 102.0], [100.0, 101.0, 102.0]),
        ([100.0, 110.0, 110.5], [100.0, 101.0, 101.5]),
        ([100.0, 110.0, 120.0], [100.0, 101.0, 102.0]),
    ],
    ids=["awake", "slow", "frozen once", "frozen twice"],
)
def test_time_stands_still_while_nobody_looks(asked_at, shown) -> None:
    times = iter([100.0, *asked_at])
    clock = AwakeClock(1.0, lambda: next(times))
    assert [clock() for _ in asked_at] == pytest.approx(shown)
