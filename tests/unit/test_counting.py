"""What counts as merged: honest learners in full, however unlike each other they are, and no leap of one that lies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from test_pace import MODEL, PAYLOAD, TICK_S, Crowd, honest
from test_pace import TOKENS as TOKENS_OF_A_STEP

from builders import make_contribution
from diloco_common.errors import Implausible
from diloco_common.settings import LeaseSettings
from diloco_common.wire.messages import Outcome, Progress
from diloco_server.core.membership import Membership
from diloco_server.core.record import Record, empty_record
from diloco_server.core.round import Round
from diloco_server.core.trust.counting import ROUNDS_UNKNOWN, Share, count
from diloco_server.core.trust.trail import STEPS_FACTOR, WAKING_S
from diloco_server.core.versions import Budget

H, TOKENS, NOW = 10, 100, 1000.0
USUAL = H * TOKENS
"""Of a learner per round. It takes a step per second."""
NEW = empty_record(0)
K = STEPS_FACTOR


def learners(**rates: float) -> Membership:
    """Learners that have trained for the last 100 s, so many tokens per second; 0: one that has just come."""
    membership = Membership(LeaseSettings(lease_s=1e6), 8)
    for learner_id, rate in rates.items():
        member = membership.join(learner_id, learner_id, NOW - 100 if rate else NOW)
        membership.heard(member, Progress(0, 0), NOW - 100 if rate else NOW)
        if rate:
            membership.heard(member, Progress(100, int(100 * rate)), NOW)
        member.contributes()
    return membership


def counts(
    pushed: Mapping[str, tuple[int, int]], shares: Mapping[str, Share], membership: Membership, record: Record = NEW
) -> dict[str, int]:
    """Learner -> what counts of its tokens. `pushed`: learner -> tokens and steps."""
    closed = Round(1, NOW - 5, {})
    for learner_id, (tokens, steps) in pushed.items():
        contribution = make_contribution(learner_id, torch.ones(2))
        closed.contributions[learner_id] = replace(contribution, tokens=tokens, steps=steps)
    counted, _ = count(closed, shares, record, membership, H, 0, NOW)
    return {i: c.counted for i, c in counted.items()}


def shared(per_step: float = TOKENS, steps: int = H, since_s: float = 10.0) -> Share:
    return Share(per_step, steps, NOW - since_s)


@pytest.mark.parametrize(
    ("rates", "shares", "pushed"),
    [
        ({"a": 100}, {}, {"a": (2**40, 10)}),  # alone
        ({"a": 100, "b": 800}, {}, {"a": (USUAL, H), "b": (8 * USUAL, H)}),  # an island of 8 GPUs
        ({"a": 100, "b": 800}, {"a": shared(), "b": shared(800, H, 80)}, {"b": (64 * USUAL, 8 * H)}),  # 8 rounds late
        ({"a": 100, "b": 0}, {}, {"a": (USUAL, H), "b": (TOKENS, 1)}),  # one has just come
        ({"a": 100, "b": 100}, {}, {"a": (USUAL, H), "b": (1, 2**30)}),  # one that says it is slow ends nothing
        ({"a": 100, "b": 10}, {}, {"a": (USUAL, H), "b": (USUAL // 10, 1)}),  # ten times as slow
        ({"a": 100, "b": 100}, {"a": shared(), "b": shared(since_s=36_000)}, {"b": (3600 * USUAL, 36_000)}),  # cut off
        ({"a": 100, "b": 100}, {}, {"a": (300 * USUAL, 300 * H), "b": (290 * USUAL, 290 * H)}),  # no shard was there
        ({"a": 100, "b": 100}, {"a": shared(steps=300 * H)}, {"a": (USUAL, H), "b": (300 * USUAL, 300 * H)}),  # or late
    ],
)  # fmt: skip
def test_honest_learners_count_in_full(rates, shares, pushed) -> None:
    assert counts(pushed, shares, learners(**rates)) == {i: tokens for i, (tokens, _) in pushed.items()}


KNOWN = {"a": shared(), "b": shared()}
LIE = 2**40


@pytest.mark.parametrize("steps", [1, H, 2**30])
@pytest.mark.parametrize(
    ("rates", "shares", "others", "most"),
    [
        ({"a": 100, "liar": 0}, {}, ["a"], K * USUAL),  # of two
        ({"a": 100, "liar": 2.0**30}, {}, ["a"], K * (USUAL + 100 * 100)),  # that has lied in its reports for 100 s
        ({"a": 100, "b": 100, "liar": 0}, KNOWN, [], K * USUAL),  # alone in its round
        ({"a": 100, "b": 100, "liar": 0}, KNOWN | {"liar": Share(1e9, 10**9, NOW - 10)}, [], K * (USUAL + 10 * 100)),
        ({"a": 100, "b": 100, "liar": 0}, KNOWN, ["a", "b"], K * USUAL),
    ],
)
def test_a_lie_counts_for_no_more_than_others_make_plausible(rates, shares, others, most, steps) -> None:
    counted = counts({"liar": (LIE, steps)} | dict.fromkeys(others, (USUAL, H)), shares, learners(**rates))
    assert counted.pop("liar") <= most
    assert counted == dict.fromkeys(others, USUAL)


def test_after_a_restart_a_round_is_measured_by_those_before() -> None:
    known = replace(NEW, version=10, tokens_merged=10 * 2 * USUAL, merged_versions={"a": 10, "b": 10})
    membership = learners(a=100, liar=0)
    assert counts({"liar": (LIE, H)}, {}, membership, known) == {"liar": K * ROUNDS_UNKNOWN * 2 * USUAL}
    assert counts({"a": (LIE, H)}, {}, membership, replace(known, merged_versions={"a": 10})) == {"a": LIE}, "alone"


def test_after_a_restart_who_was_merged_before_brings_all_that_it_trained_meanwhile() -> None:
    known = replace(NEW, version=10, tokens_merged=10 * 2 * USUAL, merged_versions={"a": 10, "b": 10})
    membership, outage = learners(a=0, b=0, c=0, d=0, stranger=0), 3 * K * USUAL
    pushed = {"b": (outage, 3 * K * H), "stranger": (outage, 3 * K * H)}

    counted = counts(pushed, {i: shared() for i in "acd"}, membership, known)

    assert counted["b"] == outage
    assert counted["stranger"] < outage, "the shard has never met it"


@pytest.mark.parametrize(
    ("stale", "pushed_before", "trained"), [(0, False, 2), (0, True, 1), (2, False, 1), (2, True, 0)]
)
def test_what_learners_trained_while_the_shard_was_frozen_counts_in_full(stale, pushed_before, trained) -> None:
    """`stale`: so many reports of each are read only on waking, right after each other."""
    crowd, frozen_s = Crowd(), 3600
    honest(crowd, 2)
    crowd.run(400)
    while crowd.shard.fragments[0].round is None:
        crowd.run(TICK_S)
    crowd.shard.slept(frozen_s, crowd.now)
    for _ in range(stale):
        for actor in crowd.actors.values():
            actor.steps, actor.tokens = actor.steps + 1, actor.tokens + TOKENS_OF_A_STEP
            crowd.says(actor)
    while pushed_before and crowd.shard.fragments[0].round is not None:
        crowd.run(TICK_S)
    for actor in list(crowd.actors.values())[:trained]:
        actor.steps, actor.tokens = actor.steps + frozen_s, actor.tokens + frozen_s * TOKENS_OF_A_STEP

    crowd.run(20)

    assert crowd.refused == []
    assert crowd.shard.tokens_merged == sum(a.merged_until for a in crowd.actors.values())
    are_merged = [a.merged_until > frozen_s * TOKENS_OF_A_STEP for a in crowd.actors.values()]
    assert are_merged == [True] * trained + [False] * (2 - trained)
    usual = crowd.shard.membership.usual_pace(crowd.now)
    assert usual.steps_per_s == pytest.approx(1.0, rel=0.01)


def test_a_freeze_is_made_up_for_within_a_minute_or_not_at_all() -> None:
    """All were frozen: later haste is no sign that anybody had trained."""
    crowd = Crowd()
    first, _ = honest(crowd, 2)
    crowd.run(400)
    crowd.shard.slept(3600, crowd.now)
    crowd.run(WAKING_S + 2)
    for _ in range(50):
        crowd.says(first)
        first.steps, first.tokens = first.steps + 1, first.tokens + TOKENS_OF_A_STEP
    assert first.member.trail.first_at == 0.0


def test_a_learner_that_was_in_no_round_for_long_is_taken_again() -> None:
    """What it has trained is all there, and nobody is asked more often for it."""
    crowd = Crowd()
    idle, *_ = honest(crowd)
    crowd.run(100)
    idle.contributes = False
    crowd.run(600)
    assert idle.member.is_idle
    idle.contributes = True
    crowd.run(100)
    assert crowd.refused == []
    assert idle.merged_until > 600 * TOKENS_OF_A_STEP
    assert not idle.member.is_idle


class Liar:
    """Joins as a new process for each round, and pushes the most that is not refused."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd, self.pushed = crowd, 0
        self.actor = crowd.come("liar", 1.0, contributes=False)

    def go_on(self) -> None:
        crowd, member = self.crowd, self.actor.member
        collecting = crowd.shard.fragments[0].round
        if collecting is None or "liar" not in collecting.missing:
            return
        trust, state = crowd.shard.trust, crowd.shard.fragments[0]
        for tokens in (2**exponent for exponent in range(40, 3, -1)):
            header = crowd.header(collecting.round, PAYLOAD, tokens=tokens, steps=1)
            with suppress(Implausible):
                trust.check_claims(member, header, state, crowd.now)
                break
        answer = crowd.push(member, header, PAYLOAD)
        assert answer.outcome is Outcome.ACCEPTED
        self.pushed += tokens
        crowd.run(0.2)
        self.actor.member = crowd.shard.join("liar", f"process {collecting.round}", MODEL, crowd.now)
        crowd.says(self.actor)


BUDGET_S = 900


def budget_run(*, with_liar: bool) -> tuple[Crowd, float, int]:
    """Three learners with 10 tokens per second to the end of the budget: how long it took, and what a liar pushed."""
    crowd = Crowd(run={"tokens": 30 * BUDGET_S})
    honest(crowd)
    crowd.run(60)
    began, liar = crowd.now, Liar(crowd) if with_liar else None
    while not crowd.shard.done and crowd.now - began < 2 * BUDGET_S:
        crowd.run(0.5)
        if liar is not None:
            liar.go_on()
    return crowd, crowd.now - began, 0 if liar is None else liar.pushed


def test_a_run_of_honest_learners_ends_with_its_budget() -> None:
    crowd, took_s, _ = budget_run(with_liar=False)
    assert crowd.shard.done
    assert crowd.shard.tokens_merged == sum(a.merged_until for a in crowd.actors.values())
    assert took_s == pytest.approx(BUDGET_S - 60, rel=0.05)


def test_one_that_claims_all_that_is_accepted_ends_a_run_not_much_earlier() -> None:
    crowd, took_s, pushed = budget_run(with_liar=True)
    assert crowd.shard.done
    assert pushed > crowd.shard.tokens_merged, "it could say so"
    assert took_s > BUDGET_S / (2 * STEPS_FACTOR), "16 learners per round, and 16 more for what they trained since"


@pytest.mark.parametrize(("budget", "said", "believed"), [(0, 2**61, 2**61), (1000, 999, 999), (1000, 2**61, 1000)])
def test_a_seed_says_no_more_than_the_run_asks_for(budget: int, said: int, believed: int) -> None:
    assert Budget(budget).believed(said) == believed
