"""When refusals of values that are not finite end a learner."""

from __future__ import annotations

from diloco_common.errors import NotFinite
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.agreement import REFUSALS_MAX, Diverging

REFUSED = PushAnswer(Outcome.REJECTED, NotFinite.code)
ACCEPTED = PushAnswer(Outcome.ACCEPTED)
ENOUGH = range(1, REFUSALS_MAX + 1)


def ends(diverging: Diverging, rounds: range, fragment_id: int = 0, shard_index: int = 0) -> list[bool]:
    return [diverging.answered(fragment_id, shard_index, number, REFUSED) is not None for number in rounds]


def test_the_last_of_so_many_rounds_in_a_row_ends_the_learner():
    assert ends(Diverging(1), ENOUGH) == [False] * (REFUSALS_MAX - 1) + [True]


def test_a_round_that_refuses_every_rank_of_an_island_is_one_round():
    diverging = Diverging(1)
    for number in ENOUGH[:-1]:
        assert not any(diverging.answered(0, 0, number, REFUSED) for _rank in range(REFUSALS_MAX))
    assert diverging.answered(0, 0, REFUSALS_MAX, REFUSED) is not None


def test_fragments_do_not_add_up():
    diverging = Diverging(1)
    assert not any(any(ends(diverging, ENOUGH[:-1], fragment_id)) for fragment_id in range(REFUSALS_MAX))


def test_a_contribution_that_is_accepted_or_merged_begins_the_count_again():
    diverging = Diverging(1)
    assert not any(ends(diverging, ENOUGH[:-1]))
    diverging.answered(0, 0, REFUSALS_MAX, ACCEPTED)
    assert not any(ends(diverging, range(10, 9 + REFUSALS_MAX)))
    diverging.merged(0)
    assert not any(ends(diverging, range(20, 19 + REFUSALS_MAX)))


def test_one_shard_of_two_cannot_say_so_alone():
    diverging = Diverging(2)
    assert not any(ends(diverging, range(1, 100)))
    assert not any(ends(diverging, ENOUGH, fragment_id=2))
    assert ends(diverging, ENOUGH, fragment_id=1, shard_index=1)[-1]


def test_a_shard_that_takes_the_fragment_again_says_so_no_longer():
    diverging = Diverging(2)
    ends(diverging, ENOUGH)
    diverging.merged(0)
    assert not any(ends(diverging, ENOUGH, fragment_id=1, shard_index=1))
