"""When a round closes, and why; what losing a learner does to it."""

from __future__ import annotations

import pytest
import torch

from builders import make_contribution
from diloco_server.core.round import Contribution, Quorum, Round

GRACE_S = 5.0


def contribution(learner_id: str) -> Contribution:
    return make_contribution(learner_id, torch.ones(2), tokens=10)


def make_round(
    asked: str, arrivals: list[tuple[str, float]], quorum: Quorum, lost: str = "", refused: str = ""
) -> Round:
    """Everybody asked has generation 1. Arrivals first, then losses and refusals."""
    made = Round(1, 0.0, dict.fromkeys(asked, 1))
    for learner_id, at in arrivals:
        made.accept(contribution(learner_id), quorum, at)
    for learner_id in lost:
        made.lose(learner_id, quorum)
    for learner_id in refused:
        made.refuse(learner_id, 1)
    return made


@pytest.mark.parametrize(
    ("quorum", "arrivals", "more", "now", "closes", "why"),
    [
        (2, [], {}, 9.0, False, "0/3 contributions"),
        (2, [("a", 0.0)], {}, 9.0, False, "1/2 contributions"),
        (2, [("a", 0.0), ("b", 1.0)], {}, 3.0, False, "3.000 s of grace left"),
        (2, [("a", 0.0), ("b", 1.0)], {}, 6.0, True, "grace"),
        (2, [("a", 0.0), ("b", 1.0), ("c", 2.0)], {}, 2.0, True, "all"),
        (1, [("a", 1.0)], {}, 5.9, False, "0.100 s of grace left"),
        ("all", [("a", 0.0), ("b", 1.0)], {}, 1e9, False, "2/3 contributions"),
        ("all", [("a", 0.0), ("b", 1.0), ("c", 2.0)], {}, 2.0, True, "all"),
        ("all", [("a", 0.0), ("b", 1.0), ("c", 2.0)], {"lost": "x"}, 2.0, True, "all"),  # nobody has asked x
        ("all", [("a", 0.0), ("b", 1.0)], {"lost": "c"}, 1.0, True, "lease"),
        ("all", [("a", 0.0)], {"lost": "bc"}, 1.0, True, "lease"),
        ("all", [("a", 0.0), ("b", 1.0)], {"refused": "c"}, 1.0, True, "all"),
        (3, [("a", 0.0)], {"lost": "c"}, 1e9, False, "1/3 contributions"),
        (2, [("a", 0.0), ("b", 1.0)], {"lost": "b"}, 9.0, False, "1/2 contributions"),  # fenced: below quorum again
        (1, [], {"refused": "ab"}, 9.0, False, "0/3 contributions"),
    ],
)
def test_a_round_closes_on_quorum_and_grace_or_when_nobody_is_missing(quorum, arrivals, more, now, closes, why) -> None:
    made = make_round("abc", arrivals, quorum, **more)
    reason, words = made.verdict(quorum, (made.quorum_at or 0.0) + GRACE_S, now)
    assert (reason is not None, words) == (closes, why)
    assert reason in (None, words)


@pytest.mark.parametrize(
    ("arrivals", "more", "void"),
    [
        ([], {}, False),
        ([], {"lost": "ab"}, True),
        ([], {"refused": "ab"}, True),
        ([("a", 0.0)], {"lost": "ab"}, True),  # its contribution is fenced off
        ([("a", 0.0)], {"lost": "b"}, False),
        ([], {"lost": "a"}, False),
    ],
)
def test_a_round_is_void_when_nobody_contributed_and_nobody_will(arrivals, more, void) -> None:
    assert make_round("ab", arrivals, 1, **more).is_void is void


@pytest.mark.parametrize(
    ("learner", "is_asked"),
    [
        ("contributed", False),
        ("silent", False),  # it may be about to contribute, and must not be asked for the same twice
        ("lost", True),
        ("refused", True),
        ("came later", True),
    ],
)
def test_who_cannot_contribute_any_more_can_be_asked_again(learner: str, is_asked: bool) -> None:
    asked = Round(3, 0.0, {"contributed": 1, "silent": 2, "lost": 3, "refused": 4}, lost={"lost"}, refused={"refused"})
    asked.accept(contribution("contributed"), 2, 0.0)

    assert asked.ask_again(learner, 9) is is_asked
    assert (learner in asked.missing) is (is_asked or learner == "silent")
    assert (asked.asked[learner] == 9) is is_asked


@pytest.mark.parametrize(("quorum_at", "now", "lacks"), [(None, 5.0, False), (None, 7.0, True), (1.0, 7.0, False)])
def test_a_round_that_lacks_its_quorum_asks_again_after_a_lease(quorum_at, now, lacks) -> None:
    asked = Round(3, 0.0, {"a": 1}, quorum_at=quorum_at)
    assert asked.lacks_quorum_since(now - 6.0) is lacks


@pytest.mark.parametrize(
    ("learner_id", "generation", "waited"), [("b", 1, True), ("b", 2, False), ("a", 1, False), ("stranger", 1, False)]
)
def test_only_who_is_waited_for_can_be_refused(learner_id: str, generation: int, waited: bool) -> None:
    made = make_round("ab", [("a", 0.0)], 2)
    assert made.refuse(learner_id, generation) is waited
    assert made.missing == ([] if waited else ["b"])
    assert "a" in made.contributions
