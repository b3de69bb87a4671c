"""Which of the shards that a learner has joined are there, and which have stopped."""

from __future__ import annotations

from dataclasses import replace

from diloco_common.wire.messages import LearnerPolicy, Pulse
from diloco_worker.core.agreement import Shards
from diloco_worker.core.events import Joined

POLICY = LearnerPolicy(4, "int8", "bfloat16", "carry", 0.5, True)
FIRST = Joined(1, 1, 1.0, 0, 2, 6, "digest", POLICY, (), Pulse(0, 0), address="ps-0:50051")
SECOND = replace(FIRST, address="ps-1:50051", shard_index=1)


def test_a_run_is_complete_once_every_address_is_another_shard_of_it() -> None:
    shards = Shards(2)

    assert (shards.join(FIRST), shards.are_complete) == (True, False)
    assert (shards.join(SECOND), shards.are_complete) == (True, True)
    assert not shards.join(replace(FIRST, epoch=2)), "it is not new, it came back"
    assert [s.epoch for s in shards.joined] == [2, 1]


def test_a_shard_that_came_back_has_not_stopped() -> None:
    shards = Shards(2)
    for shard in (FIRST, SECOND):
        shards.join(shard)
        shards.stop(shard.shard_index)
    assert shards.have_stopped

    shards.join(FIRST)
    assert not shards.have_stopped
