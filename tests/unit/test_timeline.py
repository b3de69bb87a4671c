"""What a shard tells of its rounds to those who draw them: all that is new, once, and never without end."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_server import timeline
from diloco_server.core.effects import ContributionAnswered, QuorumReached, RoundClosed, RoundOpened, VersionCommitted
from diloco_server.core.round import CloseReason
from diloco_server.timeline import Timeline

EPOCH = 7
NO_PAYLOAD: Any = None


def header(fragment_id: int, number: int) -> PushHeader:
    return PushHeader(fragment_id, number, EPOCH, number - 1, 100, 4, NO_PAYLOAD, "digest")


def answered(header: PushHeader, answer: PushAnswer) -> ContributionAnswered:
    return ContributionAnswered("ann", header, answer, staleness=0)


def whole_round(told: Timeline, fragment_id: int, number: int, at: float) -> None:
    told.note(RoundOpened(fragment_id, number, asked=3), at)
    told.note(QuorumReached(fragment_id, number, after_s=1.0), at + 1)
    closed = RoundClosed(fragment_id, number, CloseReason.GRACE, participants=2, asked=3, late=1, open_s=1.5)
    told.note(closed, at + 1.5)
    told.note(VersionCommitted(fragment_id, number, participants=2, tokens=200, round_s=2.0), at + 2)


def test_a_round_is_told_from_its_opening_to_its_version():
    told = Timeline(EPOCH)
    whole_round(told, 4, 9, at=10.0)

    (traced,) = told.since(EPOCH, 0, now=15.0)["rounds"]
    assert traced == {
        "fragment": 4, "round": 9, "ago_s": 5.0, "asked": 3, "quorum_s": 1.0, "closed_s": 1.5, "why": "grace",
        "participants": 2, "announced_s": 2.0, "tokens": 200, "late": 1, "refused": {},
    }  # fmt: skip


def test_an_open_round_has_no_end_yet():
    told = Timeline(EPOCH)
    told.note(RoundOpened(0, 1, asked=2), 3.0)

    (traced,) = told.since(EPOCH, 0, now=4.0)["rounds"]
    assert (traced["quorum_s"], traced["closed_s"], traced["announced_s"]) == (None, None, None)


def test_what_was_told_is_told_again_only_when_it_has_changed():
    told = Timeline(EPOCH)
    whole_round(told, 0, 1, at=0.0)
    told.note(RoundOpened(1, 1, asked=2), 3.0)
    first = told.since(EPOCH, 0, now=4.0)
    assert told.since(EPOCH, first["seq"], now=4.0)["rounds"] == []

    told.note(answered(header(0, 1), PushAnswer(Outcome.REJECTED, "NOT_FINITE")), 4.5)
    again = told.since(EPOCH, first["seq"], now=5.0)
    assert [(r["fragment"], r["refused"]) for r in again["rounds"]] == [(0, {"NOT_FINITE": 1})]


def test_whoever_knew_another_epoch_hears_everything():
    told = Timeline(EPOCH)
    whole_round(told, 0, 1, at=0.0)
    told.event({"event": "joined", "learner": "ann"}, 1.0)
    assert len(told.since(EPOCH - 1, 1_000_000, now=4.0)["rounds"]) == 1
    assert told.since(EPOCH - 1, 1_000_000, now=4.0)["events"] == [{"ago_s": 3.0, "event": "joined", "learner": "ann"}]


@pytest.mark.parametrize(
    ("outcome", "code", "refused"),
    [
        (Outcome.REJECTED, "NOT_FINITE", {"NOT_FINITE": 1}),
        (Outcome.LATE, "", {}),  # its round had missed it when it closed
        (Outcome.ACCEPTED, "", {}),
        (Outcome.DUPLICATE, "", {}),
    ],
)
def test_contributions_that_are_refused_are_told_of_their_round(outcome, code, refused):
    told = Timeline(EPOCH)
    told.note(RoundOpened(0, 1, asked=2), 0.0)
    told.note(answered(header(0, 1), PushAnswer(outcome, code)), 0.5)
    told.note(answered(header(0, 99), PushAnswer(outcome, code)), 0.5)  # of a round that nobody remembers

    (traced,) = told.since(EPOCH, 0, now=1.0)["rounds"]
    assert (traced["late"], traced["refused"]) == (0, refused)


def test_the_oldest_rounds_and_events_are_forgotten():
    told = Timeline(EPOCH)
    for number in range(1, timeline.ROUNDS_MAX + 10):
        told.note(RoundOpened(0, number, asked=1), float(number))
        told.event({"event": "joined"}, float(number))

    rounds, seq = [], 0
    while more := (answer := told.since(EPOCH, seq, now=1e6))["rounds"]:
        assert len(more) <= timeline.ANSWER_MAX
        rounds, seq = rounds + more, answer["seq"]
    assert [r["round"] for r in rounds] == list(range(10, timeline.ROUNDS_MAX + 10))
    assert len(told._events) == timeline.EVENTS_MAX


def test_an_answer_that_is_cut_off_goes_on_where_it_ended():
    """No event is told twice, and none is skipped, though rounds and events share their numbers."""
    told = Timeline(EPOCH)
    for number in range(1, timeline.ANSWER_MAX + 100):
        told.note(RoundOpened(0, number, asked=1), float(number))
        if number % 100 == 0:
            told.event({"event": "evicted", "learner": str(number)}, float(number))

    heard, seq = [], 0
    for _ in range(3):
        answer = told.since(EPOCH, seq, now=1e6)
        heard, seq = heard + [event["learner"] for event in answer["events"]], answer["seq"]
    assert heard == ["100", "200", "300", "400", "500", "600"]
