"""Which process a generation belongs to: what the simulation found about learners that join twice, or return."""

from __future__ import annotations

import pytest

from builders import make_settings
from diloco_common.errors import StaleGeneration, Superseded
from diloco_common.manifest import TensorSpec
from diloco_server.core.shard import Shard

MODEL = (TensorSpec("w", (4,)),)


@pytest.fixture
def shard() -> Shard:
    return Shard(make_settings(), epoch=7)


def test_a_join_that_arrives_twice_does_not_end_its_own_process(shard: Shard) -> None:
    first = shard.join("cat", "process 1", MODEL, 0.0)
    shard.join("cat", "process 1", MODEL, 0.1)

    with pytest.raises(StaleGeneration):  # which a learner answers by joining again
        shard.check("cat", first.generation, 7)


def test_the_older_of_two_processes_is_told_so_whatever_it_says_later(shard: Shard) -> None:
    old = shard.join("cat", "process 1", MODEL, 0.0)
    shard.join("cat", "process 2", MODEL, 0.1)
    shard.join("cat", "process 2", MODEL, 0.2)

    with pytest.raises(Superseded, match="its own learner id"):
        shard.check("cat", old.generation, 7)


def test_a_process_that_was_replaced_cannot_come_back(shard: Shard) -> None:
    shard.join("cat", "process 1", MODEL, 0.0)
    new = shard.join("cat", "process 2", MODEL, 0.1)

    with pytest.raises(Superseded):
        shard.join("cat", "process 1", MODEL, 0.2)

    assert shard.check("cat", new.generation, 7) is new


@pytest.mark.parametrize(("process_id", "merged_version"), [("process 1", 3), ("process 2", 0)])
def test_what_was_merged_is_told_to_the_process_that_contributed_it(
    shard: Shard, process_id: str, merged_version: int
) -> None:
    shard.join("cat", "process 1", MODEL, 0.0)
    record = shard.fragments[0].record
    record.merged_versions["cat"], record.merged_by["cat"] = 3, "process 1"

    shard.join("cat", process_id, MODEL, 0.1)

    assert [s.merged_version for s in shard.fragment_statuses("cat")] == [merged_version]
