"""`sync.sync_every = "auto"`: H is the smallest that link, shard and steps carry with room, and nothing comes late."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_common.settings import EVERY_LEAST, EVERY_MOST, SyncSettings
from diloco_server.core.due import ASKED, QUIET, Every, Measured, carried, following
from rig import Rig

AUTO = SyncSettings(sync_every="auto")


@pytest.mark.parametrize(
    ("measured", "every"),
    [
        (Measured(1.0), 1),  # nothing is known, so nothing is in the way
        (Measured(1.0, push_s=6.0, pull_s=1.0), 12),  # half of the time is enough to push
        (Measured(1.0, pull_s=9.0), 12),  # three quarters are enough to pull
        (Measured(1.0, shard_s=5.0, push_s=4.0), 10),
        (Measured(0.011, round_s=0.5), 91),
    ],
)
def test_the_smallest_h_leaves_room(measured: Measured, every: int) -> None:
    assert carried(measured) == every


@pytest.mark.parametrize(
    ("every", "carries", "late", "may_fall", "then"),
    [
        (24, 24, 0.0, True, 24),
        (24, 36, 0.0, False, 36),
        (24, 200, 0.0, False, 48),  # at most twice
        (24, 2, 0.03, True, 48),  # late, whatever the reason
        (24, 2, 0.02, True, 18),  # a quarter less, at most
        (24, 2, 0.0, False, 24),
        (7, 1, 0.0, True, 6),  # the least
        (400, 900, 0.5, False, 500),
    ],
)
def test_h_follows_slowly_and_within_bounds(every: int, carries: int, late: float, may_fall: bool, then: int) -> None:
    assert following(every, carries, late, EVERY_LEAST, EVERY_MOST, may_fall=may_fall) == then


def look(every: Every, carries_s: float, late: int = 0, fragments: int = 4) -> str:
    """One pass over all fragments, and enough contributions."""
    while not every.is_time(fragments):
        every.closed(ASKED // fragments - late, late)
    return every.look(Measured(1.0, push_s=carries_s))


def test_h_rises_at_once_and_falls_after_a_while() -> None:
    every = Every(AUTO)
    assert look(every, 12.0) == "24 would do"
    assert [look(every, 3.0) for _ in range(QUIET)] == ["", "6 would do"]
    assert every.steps == 18


def test_h_that_fell_too_far_falls_later_the_next_time() -> None:
    every, waits = Every(AUTO), []
    every.steps = 24
    for _ in range(3):
        waits.append(next(i for i in range(1, 100) if look(every, 3.0)))
        assert (every.steps, look(every, 3.0, late=1)) == (18, "6.2% late")
        every.steps = 24
    assert waits == [QUIET, 2 * QUIET, 4 * QUIET]


class Pair(Rig):
    def __init__(self, **sync: Any) -> None:
        sync = {"sync_every": "auto", "quorum": 1, "grace": "adaptive"} | sync
        super().__init__(sync=sync, lease={"lease_s": 1e6, "heartbeat_s": 1.0})
        self.join("a", "b")
        self.seed("a")

    def report(self, learner_id: str, **more: Any) -> None:
        super().report(learner_id, step_time_s=1.0, **more)

    def rounds(self, count: int, *, b_is_late: bool = False) -> None:
        for _ in range(count):
            while self.state.round is None:
                self.advance(1.0)
                self.step("a", "b")
            asked = self.state.round.round
            self.contribute("a", asked)
            if b_is_late:
                self.advance(30.0)
            self.contribute("b", asked)
            self.advance()


def test_h_rises_where_contributions_come_late_and_falls_where_none_does() -> None:
    pair = Pair()
    policy = pair.shard.join_answer().policy
    pair.rounds(7 * ASKED)
    assert pair.shard.rounds.patience.every.steps == EVERY_LEAST
    began = pair.steps["a"]
    pair.rounds(20)
    assert pair.steps["a"] - began <= 20 * EVERY_LEAST, "rounds are due by the new H"
    assert pair.shard.join_answer().policy == policy, "all shards tell learners the same, and each finds its own H"
    pair.rounds(2 * ASKED, b_is_late=True)
    assert pair.shard.rounds.patience.every.steps > 10 * EVERY_LEAST
