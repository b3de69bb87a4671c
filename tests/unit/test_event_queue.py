"""The order in which a learner's training reads what came."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import DilocoError, NotFinite
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.events import Answered, Arrived, Event, EventQueue, Failed, Stopped

FAILED = Failed(DilocoError("no way on"))
REFUSED = Answered(0, 2, PushAnswer(Outcome.REJECTED, NotFinite.code), tokens=18)


def arrived(version: int) -> Arrived:
    return Arrived(0, version, 7, torch.zeros(1), 0)


def read_all(queue: EventQueue) -> list[Event]:
    found = []
    while (event := queue.pop()) is not None:
        found.append(event)
    return found


def test_events_are_read_in_their_order_and_failed_goes_first() -> None:
    queue, one = EventQueue(), arrived(1)
    for event in (Stopped(0), one, FAILED):
        queue.put(event)
    assert read_all(queue) == [FAILED, Stopped(0), one]


def test_what_is_put_back_is_read_next() -> None:
    queue, one = EventQueue(), arrived(1)
    queue.put(one)
    queue.put(Stopped(0))
    assert queue.pop() is one
    queue.put_back(one)
    assert read_all(queue) == [one, Stopped(0)]


def test_what_is_put_back_does_not_overtake_failed() -> None:
    queue, one = EventQueue(), arrived(1)
    queue.put(one)
    queue.put(Stopped(0))
    assert queue.pop() is one
    queue.put(FAILED)
    queue.put_back(one)
    assert read_all(queue) == [FAILED, one, Stopped(0)]


def test_what_is_put_back_gives_way_to_a_newer_one_of_its_kind() -> None:
    queue, one, two = EventQueue(), arrived(1), arrived(2)
    queue.put(one)
    assert queue.pop() is one
    queue.put(two)
    queue.put_back(one)
    assert read_all(queue) == [two]


@pytest.mark.parametrize(
    "late",
    [
        Answered(0, 1, PushAnswer(Outcome.ACCEPTED), tokens=16),
        Answered(0, 1, PushAnswer(Outcome.LATE), tokens=16),
        Answered(0, 2, PushAnswer(Outcome.REJECTED, NotFinite.code), tokens=13),  # the round had opened before
    ],
)
def test_a_late_answer_to_an_earlier_contribution_does_not_hide_a_refusal(late: Answered) -> None:
    """Nobody pushes again what was refused: a learner that has not read that waits for its fate for ever."""
    queue = EventQueue()
    queue.put(REFUSED)
    queue.put(late)
    assert read_all(queue) == [REFUSED, late]


def test_of_one_contribution_the_newest_answer_is_read() -> None:
    queue = EventQueue()
    queue.put(Answered(REFUSED.fragment_id, REFUSED.round, PushAnswer(Outcome.ACCEPTED), REFUSED.tokens))
    queue.put(REFUSED)
    assert read_all(queue) == [REFUSED]
