"""A learner that leaves: a round is opened for what it has trained, out of turn, once, and waits for it."""

from __future__ import annotations

import pytest

from diloco_common.wire.messages import Collect, Outcome
from diloco_server.core.membership import LAST_S, LAST_TRIES
from rig import TOKENS, Rig

NOTHING, FRAGMENT_0 = frozenset[int](), frozenset([0])


def leaving(*learner_ids: str, quorum: object = "all", steps: int = 3) -> Rig:
    """Round 1 is over, some of the four steps are taken that make the next one due, and the last learner leaves."""
    rig = Rig(sync={"quorum": quorum}).started(*learner_ids)
    for learner_id in learner_ids:
        rig.contribute(learner_id, 1)
    rig.step(*learner_ids, steps=steps)
    assert rig.state.round is None
    for learner_id in learner_ids:
        rig.take_told(learner_id)
    rig.report(learner_ids[-1], last_rounds=FRAGMENT_0)
    return rig


def test_a_learner_that_leaves_gets_a_round_out_of_turn_and_those_are_asked_that_have_most_of_an_interval() -> None:
    rig = leaving("a", "b", "c", steps=2)
    assert rig.state.round.missing == ["c"]
    rig = leaving("a", "b", "c")
    assert [rig.told_of(i, Collect) for i in "abc"] == [[Collect(0, 2, 7)]] * 3
    for learner_id in "abc":
        assert rig.contribute(learner_id, 2, tokens=3 * TOKENS, steps=3).outcome is Outcome.ACCEPTED
    assert rig.state.version == 2
    rig.assert_accounts_balance()


@pytest.mark.parametrize("last_rounds", [None, NOTHING, frozenset([7])])
def test_who_stays_or_has_nothing_there_gets_none(last_rounds: frozenset[int] | None) -> None:
    rig = Rig().started("a", "b")
    rig.contribute("a", 1)
    rig.contribute("b", 1)
    rig.step("a", "b", steps=2)
    rig.report("b", last_rounds=last_rounds)
    assert rig.state.round is None


def test_it_gets_one_until_it_trains_on() -> None:
    rig = leaving("a", "b")
    for learner_id in "ab":
        rig.contribute(learner_id, 2, tokens=3 * TOKENS, steps=3)
    rig.step("a")
    for _ in range(3):
        rig.report("b", last_rounds=FRAGMENT_0)
    assert rig.state.round is None, "b has had its round"
    rig.join("b")
    rig.report("b", last_rounds=FRAGMENT_0)
    assert rig.state.round is None, "nor does it get one by joining again"


def test_the_round_waits_for_it_beyond_the_grace_window_and_not_for_ever() -> None:
    rig = leaving("a", "b", "c", quorum=2)
    for learner_id in "ab":
        rig.contribute(learner_id, 2, tokens=3 * TOKENS, steps=3)
    began = rig.now
    while rig.now < began + LAST_S - 1.0:
        rig.now += 1.0
        for learner_id in "ab":
            rig.report(learner_id)
        rig.report("c", last_rounds=FRAGMENT_0)
        assert rig.state.version == 1, "quorum and grace are there, c is not"
    rig.now += 1.0
    rig.advance()
    assert rig.state.version == 2


def test_a_learner_that_leaves_is_asked_for_nothing_that_it_does_not_have() -> None:
    """It waits for other fragments. So it counts neither for when a round of this one is due, nor in it."""
    rig = leaving("a", "b")
    for learner_id in "ab":
        rig.contribute(learner_id, 2, tokens=3 * TOKENS, steps=3)
    rig.report("b", last_rounds=NOTHING)
    rig.step("a", steps=4)
    assert rig.state.round.missing == ["a"]


def test_it_gets_another_one_where_its_work_is_refused_and_not_for_ever() -> None:
    rig = leaving("a", "b", steps=2)
    for _ in range(LAST_TRIES):
        assert rig.state.round is not None
        assert rig.contribute("b", 2, 1e30, tokens=2 * TOKENS, steps=2).outcome is Outcome.REJECTED
        rig.now += 1.0
        rig.report("b", last_rounds=FRAGMENT_0)
    assert rig.state.round is None
