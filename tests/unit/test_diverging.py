"""When refusals of values that are not finite end a learner."""

from __future__ import annotations

from diloco_common.errors import NotFinite
from diloco_common.messages import Outcome, PushAnswer
from diloco_worker.core.diverging import REFUSALS_MAX, Diverging

REFUSED = PushAnswer(Outcome.REJECTED, NotFinite.code)
ACCEPTED = PushAnswer(Outcome.ACCEPTED)
ENOUGH = range(1, REFUSALS_MAX + 1)


def ends(diverging: Diverging, rounds: range, fragment_id: int = 0) -> list[bool]:
    return [diverging.answered(fragment_id, number, REFUSED) is not None for number in rounds]


def test_the_last_of_so_many_rounds_in_a_row_ends_the_learner():
    assert ends(Diverging(), ENOUGH) == [False] * (REFUSALS_MAX - 1) + [True]


def test_a_round_that_refuses_every_rank_of_an_island_is_one_round():
    diverging = Diverging()
    for number in ENOUGH[:-1]:
        assert not any(diverging.answered(0, number, REFUSED) for _rank in range(REFUSALS_MAX))
    assert diverging.answered(0, REFUSALS_MAX, REFUSED) is not None


def test_fragments_do_not_add_up():
    diverging = Diverging()
    assert not any(any(ends(diverging, ENOUGH[:-1], fragment_id)) for fragment_id in range(REFUSALS_MAX))


def test_a_contribution_that_is_accepted_or_merged_begins_the_count_again():
    diverging = Diverging()
    assert not any(ends(diverging, ENOUGH[:-1]))
    diverging.answered(0, REFUSALS_MAX, ACCEPTED)
    assert not any(ends(diverging, range(10, 9 + REFUSALS_MAX)))
    diverging.merged(0)
    assert not any(ends(diverging, range(20, 19 + REFUSALS_MAX)))
