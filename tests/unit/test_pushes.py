"""When a contribution is pushed, and what an answer to one of several pushes says about it."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import BadChecksum, NormTooLarge
from diloco_common.messages import Outcome, PushAnswer
from diloco_worker.core.fragment import Pending
from diloco_worker.core.pushes import Lease, Pushes

TAKEN = [PushAnswer(Outcome.ACCEPTED), PushAnswer(Outcome.DUPLICATE)]
REFUSED = [PushAnswer(Outcome.LATE)] + [PushAnswer(Outcome.REJECTED, e.code) for e in (BadChecksum, NormTooLarge)]
FIRST, SECOND = Lease(1, 1), Lease(1, 2)


def contribution(shard_epoch: int) -> Pending:
    anchor = torch.zeros(2)
    return Pending(0, 4, shard_epoch, 1, 3, 10, 1, anchor, None, False, read=lambda out: None)


@pytest.mark.parametrize("answer", [*TAKEN, None])
def test_a_round_that_asks_again_starts_a_second_push_only_once_the_first_has_ended(answer: PushAnswer | None) -> None:
    pushes = Pushes()
    assert pushes.begin(FIRST)
    assert not pushes.begin(FIRST)
    assert pushes.begin(SECOND), "the shard has fenced off what comes under the lease before"
    pushes.ended(FIRST, answer)
    assert pushes.begin(FIRST)


@pytest.mark.parametrize("answer", REFUSED)
@pytest.mark.parametrize("earlier", [*TAKEN, None])
def test_what_was_refused_is_never_pushed_again_whatever_became_of_earlier_pushes(
    answer: PushAnswer, earlier: PushAnswer | None
) -> None:
    """Its learner gives it back. A lone learner would else push the same bytes for ever, and be refused for ever."""
    pushes = Pushes()
    pushes.begin(FIRST)
    pushes.ended(FIRST, earlier)
    pushes.begin(SECOND)
    pushes.ended(SECOND, answer)
    assert not pushes.begin(SECOND)


def test_a_contribution_is_pushed_only_to_the_life_of_the_shard_that_it_was_taken_for() -> None:
    """It is given back when the learner hears of the next life, and would count twice if that had it, too."""
    pending = contribution(shard_epoch=7)
    assert not pending.begin_push(Lease(8, 1))
    assert not pending.reading, "and no version waits for a snapshot that nobody takes"
    assert pending.begin_push(Lease(7, 3))


def test_versions_wait_for_the_snapshot_again_once_a_round_asks_again() -> None:
    pending = contribution(shard_epoch=7)
    pending.leave_unread()
    pending.read_again()
    assert pending.reading
    pending.take_snapshot()
    pending.read_again()
    assert not pending.reading, "it is taken"
