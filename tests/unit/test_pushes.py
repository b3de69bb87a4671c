"""What the answers to several pushes of one contribution say about it."""

from __future__ import annotations

import pytest

from diloco_common.errors import BadChecksum, NormTooLarge, WrongRound
from diloco_common.messages import Outcome, PushAnswer
from diloco_worker.core.pushes import Pushes

ACCEPTED, DUPLICATE, LATE = (PushAnswer(o) for o in (Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.LATE))
FIRST, SECOND = (1, 1), (1, 2)


def rejected(code: str) -> PushAnswer:
    return PushAnswer(Outcome.REJECTED, code, "words")


def test_a_round_that_asks_again_under_the_same_lease_starts_no_second_push() -> None:
    pushes = Pushes()
    assert pushes.begin(FIRST)
    assert not pushes.begin(FIRST)
    refused = rejected(NormTooLarge.code)
    assert pushes.ended(FIRST, refused) is refused, "the one push is all there is: the work goes into the next one"
    assert pushes.begin(FIRST), "and may be tried again"


@pytest.mark.parametrize("taken", [ACCEPTED, DUPLICATE, None], ids=["accepted", "duplicate", "never answered"])
@pytest.mark.parametrize("refused", [LATE, rejected(BadChecksum.code), rejected(WrongRound.code)])
@pytest.mark.parametrize("refused_first", [True, False])
def test_a_refused_push_tells_nothing_where_another_may_have_been_accepted(
    taken: PushAnswer | None, refused: PushAnswer, refused_first: bool
) -> None:
    pushes = Pushes()
    assert pushes.begin(FIRST)
    assert pushes.begin(SECOND)
    if refused_first:
        assert pushes.ended(FIRST, refused) is None
        assert pushes.ended(SECOND, taken) is taken
    else:
        assert pushes.ended(FIRST, taken) is taken
        assert pushes.ended(SECOND, refused) is None


def test_two_refused_pushes_tell_it_once() -> None:
    pushes = Pushes()
    pushes.begin(FIRST)
    pushes.begin(SECOND)
    assert pushes.ended(FIRST, rejected(NormTooLarge.code)) is None
    assert pushes.ended(SECOND, LATE) is LATE
