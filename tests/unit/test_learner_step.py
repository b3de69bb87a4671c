"""What `learner.step` does with what has arrived: in what order, one version at least, within its budget."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import DilocoError, NotFinite
from diloco_common.wire.calls import HURRY_S, SETTLE_S
from diloco_common.wire.messages import LearnerPolicy, Outcome, Pulse, PushAnswer
from diloco_worker.core.events import Answered, Arrived, Event, EventQueue, Failed, Joined, Stopped
from diloco_worker.shell import crossing as shell
from parts import Rig


@pytest.fixture
def rig() -> Rig:
    """Of three fragments."""
    rig = Rig(num_fragments=3)
    rig.parts.posted.acts.clear()
    yield rig
    rig.learner.close()


@pytest.fixture
def no_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes longer than a step may spend."""
    rig.parts.clock.tick = 1e-6
    monkeypatch.setattr(shell, "APPLY_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_one_version_per_step_is_applied_whatever_the_budget_and_a_newer_one_replaces_one_that_waits(rig: Rig) -> None:
    for i in range(3):
        rig.arrives(i, 1, 20.0)
    found = []
    for number in range(3):
        rig.learner.step(1)
        found.append(rig.versions)
        if number == 0:
            rig.arrives(1, 2, 30.0)
    assert found == [[1, 0, 0], [1, 2, 0], [1, 2, 1]], "in the place of the older one"


@pytest.mark.parametrize(("error", "settle_s"), [(KeyboardInterrupt, HURRY_S), (ValueError, SETTLE_S)])
def test_pushes_under_way_get_less_time_after_ctrl_c(rig: Rig, error: type[BaseException], settle_s: float) -> None:
    with pytest.raises(error), rig.learner:
        raise error
    assert rig.parts.posted.settle_s == settle_s


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
