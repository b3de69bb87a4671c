"""The order in which a learner's training reads what came."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import DilocoError, NotFinite
from diloco_common.wire.messages import LearnerPolicy, Outcome, Pulse, PushAnswer
from diloco_worker.core.events import Answered, Arrived, Event, EventQueue, Failed, Joined, Stopped

FAILED = Failed(DilocoError("no way on"))
REFUSED = Answered(0, 2, PushAnswer(Outcome.REJECTED, NotFinite.code), tokens=18)


def arrived(version: int) -> Arrived:
    return Arrived(0, version, 7, torch.zeros(1), 0)


def read_all(queue: EventQueue) -> list[Event]:
    found = []
    while (event := queue.pop()) is not None:
        found.append(event)
    return found


ONE, TWO, STOPPED = arrived(1), arrived(2), Stopped(0)
OF_ANOTHER = Answered(1, 2, PushAnswer(Outcome.LATE), tokens=18)
POLICY = LearnerPolicy(4, "int8", "bfloat16")
JOINED = Joined(1, 1, 1.0, 0, 1, 1, "digest", POLICY, (), Pulse(0, 0), address="ps-0:50051")
OF_NEXT_EPOCH = Arrived(0, 2, 8, torch.zeros(1), 0)
BEFORE = Answered(REFUSED.fragment_id, REFUSED.round, PushAnswer(Outcome.ACCEPTED), REFUSED.tokens)


@pytest.mark.parametrize(
    ("put", "read"),
    [
        ([STOPPED, ONE, FAILED], [FAILED, STOPPED, ONE]),
        ([BEFORE, REFUSED], [REFUSED]),  # of one contribution the newest answer
        ([ONE, STOPPED, TWO], [TWO, STOPPED]),  # however quick rounds are, a slow reader comes to it
        ([JOINED, OF_ANOTHER, ONE, STOPPED, TWO], [JOINED, OF_ANOTHER, TWO, STOPPED]),
        ([ONE, REFUSED, TWO], [REFUSED, TWO]),  # it might claim to hold what was refused
        ([ONE, OF_ANOTHER, TWO], [TWO, OF_ANOTHER]),
        ([ONE, JOINED, TWO], [JOINED, TWO]),
        ([ONE, STOPPED, OF_NEXT_EPOCH], [STOPPED, OF_NEXT_EPOCH]),
    ],
    ids=[
        "in their order, failed first", "newest of its kind", "in its place", "behind all that was there before it",
        "not before an answer", "but of another fragment", "not before a lease", "not of another epoch",
    ],
)  # fmt: skip
def test_events_are_read_in_their_order(put: list[Event], read: list[Event]) -> None:
    queue = EventQueue()
    for event in put:
        queue.put(event)
    assert read_all(queue) == read


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
