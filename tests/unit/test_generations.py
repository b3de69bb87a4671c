"""Which process a generation belongs to: what the simulation found about learners that join twice, or return."""

from __future__ import annotations

import pytest

from builders import make_settings
from diloco_common.errors import Superseded
from diloco_common.wire.manifest import TensorSpec
from diloco_server.core.shard import Shard

MODEL = (TensorSpec("w", (4,)),)


@pytest.fixture
def shard() -> Shard:
    return Shard(make_settings(), epoch=7)


def test_the_older_of_two_processes_is_told_so_whatever_it_says_later(shard: Shard) -> None:
    old = shard.join("cat", "process 1", MODEL, 0.0)
    shard.join("cat", "process 2", MODEL, 0.1)
    shard.join("cat", "process 2", MODEL, 0.2)

    with pytest.raises(Superseded, match="its own learner id"):
        shard.check("cat", old.generation, 7)


@pytest.mark.parametrize(
    ("first_age_s", "second_age_s", "later_s", "has_it"),
    [
        (0.0, 0.0, 1.0, True),  # neither says
        (50.0, 3.0, 1.0, True),
        (3.0, 50.0, 1.0, False),  # it was frozen, or cut off, when the other one took over at the other shards
        (3.0, 6.5, 3.0, False),
        (3.0, 6.0, 3.0, True),  # they began as one: who comes later has it, as ever
        (3.0, 50.0, 1000.0, True),  # whose lease is over by then
    ],
)
def test_of_two_processes_with_one_id_the_one_that_began_later_has_it(
    shard: Shard, first_age_s: float, second_age_s: float, later_s: float, has_it: bool
) -> None:
    shard.join("cat", "process 1", MODEL, 0.0, age_s=first_age_s)
    shard.tick(later_s)
    if has_it:
        shard.join("cat", "process 2", MODEL, later_s, age_s=second_age_s)
    else:
        with pytest.raises(Superseded):
            shard.join("cat", "process 2", MODEL, later_s, age_s=second_age_s)


def test_a_process_that_looked_younger_than_it_is_gives_way_once_it_says_its_age_again(shard: Shard) -> None:
    shard.join("cat", "young", MODEL, 5.0, age_s=0.0)
    shard.join("cat", "old", MODEL, 8.0, age_s=0.0)  # this Join was on its way for seven seconds
    with pytest.raises(Superseded):
        shard.join("cat", "young", MODEL, 9.0, age_s=4.0)

    shard.join("cat", "old", MODEL, 10.0, age_s=9.0)

    shard.join("cat", "young", MODEL, 11.0, age_s=6.0)
    with pytest.raises(Superseded):
        shard.join("cat", "old", MODEL, 12.0, age_s=11.0)
