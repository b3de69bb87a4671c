"""How much a contribution counts for: no more than its round bears out, and all of it where nobody can say more."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from builders import make_contribution, one_piece
from diloco_server.core.influence import (
    APART,
    FALLS,
    FEW,
    LITTLE,
    OPPOSED,
    RISES,
    STRETCH,
    STRETCHES,
    TOLD,
    TWICE,
    Direction,
    Influence,
    LearnerStatistics,
    directions,
)
from diloco_server.core.ledger import LearnerLeftOut, LearnerTakesPart
from diloco_server.core.merge import merge
from diloco_server.core.round import Contribution, LengthLimit
from rig import H, Rig

BEFORE = LengthLimit(4.0, 10)


def sent(*lengths: float, steps: Sequence[int] = (), tokens: Sequence[int] = ()) -> list[Contribution]:
    """Contributions of learners a, b, ... with these lengths; of 10 inner steps and 100 tokens each."""
    made = [
        make_contribution(name, torch.full((4,), length / 2)) for name, length in zip("abcdefgh", lengths, strict=False)
    ]
    return [
        replace(c, steps=steps[i] if steps else 10, tokens=tokens[i] if tokens else 100) for i, c in enumerate(made)
    ]


def kept(influence: Influence, contributions: list[Contribution], before: LengthLimit | None = None) -> list[float]:
    """What is left of each length."""
    bounded, _ = influence.bound(0, contributions, before)
    return [pytest.approx(bounded[c.learner_id].kept * c.norm, rel=1e-5) for c in contributions]


BYZFL = [
    ((1, 2, 3, 30), (1, 2, 2, 2)),
    ((5, 1, 4, 2, 3), (3, 1, 3, 2, 3)),
    ((0.5, 8, 2, 9, 1, 100), (0.5, 2, 2, 2, 1, 2)),
    ((3, 3, 3, 7), (3, 3, 3, 3)),
]
"""Lengths of a round, and what `ARC(len(round) // 2)` of byzfl 0.0.11 leaves of them: its authors' own rule."""


@pytest.mark.parametrize(("lengths", "left"), BYZFL)
def test_strangers_are_clipped_as_the_authors_of_the_rule_clip(lengths: Sequence[float], left: Sequence[float]) -> None:
    assert kept(Influence(strangers=True), sent(*lengths)) == [*left]


@pytest.mark.parametrize(
    ("trust", "contributions", "before", "lengths"),
    [
        ("members", sent(1, 2, 30), None, [1, 2, 4]),
        ("members", sent(1, 2, 3.9), None, [1, 2, 3.9]),
        ("members", sent(1, 30), None, [1, 30]),  # nobody can say which is wrong
        ("members", sent(30), None, [30]),
        ("members", sent(1, 30), BEFORE, [1, 4 * RISES]),
        ("members", sent(1, 1, 30), BEFORE, [1, 1, 4 * FALLS]),  # two that warm up do not silence the third
        ("members", sent(1, 2, 30, steps=(10, 10, 5)), None, [1, 2, 4]),
        ("members", sent(1, 2, 30, steps=(10, 10, 50)), None, [1, 2, 20]),  # five times the steps
        ("members", sent(1, 2, 30, tokens=(100, 100, 1000)), None, [1, 2, 30]),  # most of the weight: no rule can
        ("members", sent(0, 0, 30), None, [0, 0, 30]),  # alone with this part of the model
        ("members", sent(0, 0, 0), None, [0, 0, 0]),
        ("members", sent(1, 2, 3, 3.5), None, [1, 2, 3, 3.5]),
        ("strangers", sent(1, 2, 3, 30), None, [1, 2, 2, 2]),
        ("strangers", sent(1, 2, 30, tokens=(100, 100, 10**6)), None, [1, 2, 2]),  # weight is no way around it
        ("strangers", sent(1, 2, 30, steps=(10, 10, 10**6)), None, [1, 2, 2]),  # nor are steps
    ],
)
def test_the_longest_counts_twice_as_long_as_the_second_and_among_strangers_as_the_median(
    trust, contributions, before, lengths
) -> None:
    assert kept(Influence(trust == "strangers"), contributions, before) == lengths


def test_who_was_long_before_the_others_came_is_shortened_slowly() -> None:
    influence = Influence()
    assert kept(influence, sent(8)) == [8]
    for rounds in range(1, 4):
        assert kept(influence, sent(8, 0.1, 0.1)) == [8 * FALLS**rounds, 0.1, 0.1]
    influence.begin("a")
    assert kept(influence, sent(8, 0.1, 0.1)) == [0.1 * TWICE, 0.1, 0.1], "another process has no past"


def test_a_round_of_two_raises_what_a_learner_may_send_no_more_than_twice() -> None:
    influence, limit = Influence(), None
    for _ in range(3):
        _, limit = influence.bound(0, sent(1, 1, 1), limit)
    for number in range(3):
        bounded, limit = influence.bound(0, sent(1, 1000), limit)
        assert bounded["b"].kept * bounded["b"].norm == pytest.approx(RISES * TWICE**number)
    assert kept(influence, sent(1, 1000, 1), limit) == [1, FALLS * TWICE**3, 1]


@pytest.mark.parametrize("trust", ["members", "strangers"])
def test_whatever_a_round_holds_only_what_is_too_long_is_cut(trust) -> None:
    """Drawn: against the definition, one by one."""
    r = random.Random(trust)
    for _ in range(500):
        count = r.randint(3, 8)
        contributions = sent(
            *[10 ** r.uniform(-3, 3) for _ in range(count)], steps=[r.randint(1, 50) for _ in range(count)]
        )
        bounded, _ = Influence(trust == "strangers").bound(0, contributions, None)
        for c in contributions:
            reach = sorted(other.norm * max(1.0, c.steps / other.steps) for other in contributions)[-2] * TWICE
            if trust == "strangers":
                reach = sorted(other.norm for other in contributions)[(count - 1) // 2]
            if 2 * bounded[c.learner_id].weight <= sum(b.weight for b in bounded.values()):
                assert bounded[c.learner_id].kept == pytest.approx(min(1.0, reach / c.norm))
            else:
                assert bounded[c.learner_id].kept == 1.0


@pytest.mark.parametrize(("trust", "counted"), [("members", [100, 200, 10**6]), ("strangers", [100, 200, 200])])
def test_claims_of_members_are_believed_and_strangers_count_for_the_median(trust, counted) -> None:
    bounded, _ = Influence(trust == "strangers").bound(0, sent(1, 1, 1, tokens=(100, 200, 10**6)), None)
    assert [c.counted for c in bounded.values()] == counted
    assert [c.weight for c in bounded.values()] == [n * n / 10 for n in counted]
    assert Influence(trust == "strangers").claimed([100, 200, 10**6]) == sum(counted)


def test_what_is_cut_is_merged_as_if_it_were_shorter() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(64, generator=generator) for name in "abc"}
    cut = {"a": 1.0, "b": 0.25, "c": 1.0}
    for rule in ("mean", "rda", "agreement"):
        whole = [make_contribution(name, v * cut[name]) for name, v in values.items()]
        short = [replace(make_contribution(name, v), kept=cut[name]) for name, v in values.items()]
        merged = [torch.cat([s.tensor().clone() for s in merge(of, one_piece(64), rule)]) for of in (whole, short)]
        torch.testing.assert_close(*merged)


# ------------------------------------------------------------------ directions


def pointing(*values: Tensor) -> list[Direction]:
    contributions = [make_contribution(name, v) for name, v in zip("abcdefgh", values, strict=False)]
    found = directions(contributions, [], values[0].numel(), {})
    return [found[c.learner_id] for c in contributions]


def test_a_direction_is_the_mean_cosine_with_the_others_and_theirs_with_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    v = [torch.randn(50, generator=generator) for _ in range(4)]
    unit = [x / x.norm() for x in v]
    for i, found in enumerate(pointing(*unit)):
        others = [unit[j] for j in range(4) if j != i]
        assert found.cosine == pytest.approx(sum(float(unit[i] @ o) for o in others) / 3, abs=1e-5)
        pairs = [float(a @ b) for a in others for b in others if a is not b]
        assert found.others == pytest.approx(sum(pairs) / 6, abs=1e-5)


def test_two_say_nothing_of_each_other_and_a_large_fragment_is_sampled() -> None:
    x = torch.ones(8)
    assert directions([make_contribution("a", x), make_contribution("b", -x)], [], 8, {}) == {}
    many = torch.randn(4 * STRETCHES * STRETCH, generator=torch.Generator().manual_seed(2))
    for found in pointing(many, many, -many):
        assert abs(found.cosine) in (pytest.approx(0, abs=1e-4), pytest.approx(1, rel=1e-4))


def test_what_is_left_out_is_looked_at_and_weighs_nothing() -> None:
    x = torch.ones(8)
    part, beside = [make_contribution(name, x) for name in "abc"], [make_contribution("d", -x)]
    found = directions(part, beside, 8, {})
    assert found["d"] == Direction(pytest.approx(-1), pytest.approx(1))
    assert found["a"] == Direction(pytest.approx(1), pytest.approx(1))


def rounds(
    influence: Influence, count: int, seed: int = 0, **cosines: float
) -> list[tuple[tuple[str, ...], str | None]]:
    """So many rounds in which each learner has such a cosine, and the others of each 0.2, with some noise."""
    r, said = random.Random(seed), []
    for _ in range(count):
        told = {i: Direction(cosine + r.gauss(0, 0.05), 0.2 + r.gauss(0, 0.05)) for i, cosine in cosines.items()}
        said.append(influence.hear(sent(*[1.0] * len(cosines)), told))
    return [(back, out) for back, out in said if back or out]


def test_a_direction_says_how_much_of_it_was_said_before() -> None:
    generator = torch.Generator().manual_seed(4)
    said: dict[str, Tensor] = {}
    before = {name: torch.randn(4096, generator=generator) for name in "abc"}
    now = {**before, "b": torch.randn(4096, generator=generator), "c": -before["c"]}
    first, second = (
        directions([make_contribution(name, v) for name, v in of.items()], [], 4096, said) for of in (before, now)
    )
    assert [found.again for found in first.values()] == [None] * 3
    assert [second[name].again for name in "abc"] == [pytest.approx(a, abs=0.1) for a in (1.0, 0.0, -1.0)]
    directions([make_contribution(name, v) for name, v in zip("acd", now.values(), strict=True)], [], 4096, said)
    assert said.keys() == {*"acd"}, "nothing is kept of one that was not in the round"


def test_two_that_agree_among_strangers_hide_neither_where_they_point_nor_that_the_others_agree() -> None:
    """The mean of its cosines with the others is above zero for each of the two."""
    generator = torch.Generator().manual_seed(5)
    common, own = torch.randn(4096, generator=generator), torch.randn(4096, generator=generator)
    values = [0.5 * common + torch.randn(4096, generator=generator) for _ in range(6)]
    values += [own - 0.2 * common] * 2
    sent = [make_contribution(name, v) for name, v in zip("abcdefgh", values, strict=True)]
    mean, median = (directions(sent, [], 4096, {}, median=median) for median in (False, True))
    assert mean["h"].cosine > 0 > median["h"].cosine
    assert median["h"].others == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize(
    ("cosine", "again", "others_again", "is_out"),
    [
        (0.0, 1.0, 0.5, True),
        (0.05, 1.0 - LITTLE / 4, 0.5, True),  # its encoding rounds it
        (0.2, 1.0, 0.5, False),  # a large batch: all say what it says
        (0.0, 0.8, 0.5, False),  # it pulls its own way, alone
        (0.0, 0.99, 0.95, False),  # small rates: nobody changes much
        (0.0, None, 0.5, False),  # never in two rounds, one after the other
    ],
)
def test_who_says_the_same_again_and_again_is_left_out_where_nobody_else_says_it(
    cosine: float, again: float | None, others_again: float, is_out: bool
) -> None:
    influence = Influence()
    usual = Direction(0.2, 0.2, others_again)
    for _ in range(3 * TOLD):
        influence.hear(sent(1, 1, 1), {"a": usual, "b": usual, "c": Direction(cosine, 0.2, again)})
    assert influence.left_out == ({"c"} if is_out else set())
    for _ in range(2 * TOLD):
        influence.hear(sent(1, 1, 1), dict.fromkeys("abc", usual))
    assert influence.left_out == set()


@pytest.mark.parametrize(("length", "is_out"), [(1.0, True), (2 * LITTLE, True), (LITTLE / 2, False)])
def test_what_is_far_shorter_than_the_others_is_not_judged(length: float, is_out: bool) -> None:
    """A learner whose rate has come to zero before that of the others."""
    influence, usual = Influence(), Direction(0.2, 0.2, 0.5)
    for _ in range(2 * TOLD):
        influence.hear(sent(1, 1, length), {"a": usual, "b": usual, "c": Direction(0.0, 0.2, 1.0)})
    assert influence.left_out == ({"c"} if is_out else set())


def test_who_points_away_is_left_out_while_that_lasts_and_nobody_else() -> None:
    influence = Influence()
    assert rounds(influence, TOLD - 1, a=0.2, b=0.2, c=-0.2) == [], "too few to tell"
    assert rounds(influence, 1, a=0.2, b=0.2, c=-0.2) == [((), "c")]
    assert influence.left_out == {"c"}
    assert rounds(influence, 100, a=0.2, b=0.2, c=-0.2) == [], "it still does"
    assert rounds(influence, TOLD, a=0.2, b=0.2, c=0.1) == [(("c",), None)]
    assert influence.left_out == set()


@pytest.mark.parametrize(
    ("learners", "trust", "is_out"), [(FEW, "members", True), (FEW + 1, "members", False), (FEW + 1, "strangers", True)]
)
def test_among_many_members_one_may_point_away(
    learners: int, trust: Literal["members", "strangers"], is_out: bool
) -> None:
    told = {f"{i}": Direction(0.2 if i else -0.2, 0.2) for i in range(learners)}
    lengths = [1.0] * 4 + [LITTLE / 2] * (learners - 4)  # who is not judged is there, too
    influence = Influence(trust == "strangers")
    for _ in range(2 * TOLD):
        influence.hear([make_contribution(i, torch.tensor([n])) for i, n in zip(told, lengths, strict=True)], told)
    assert influence.left_out == ({"0"} if is_out else set())


@pytest.mark.parametrize("cosine", [0.2, 0.0, -0.05, 0.6 * -OPPOSED * 0.2])
def test_who_only_has_other_data_takes_part(cosine: float) -> None:
    assert rounds(Influence(), 400, a=0.2, b=0.2, c=cosine) == []


def test_a_stranger_may_not_point_away_at_all() -> None:
    assert rounds(Influence(strangers=True), TOLD, a=0.2, b=0.2, c=-0.06) == [((), "c")]
    assert rounds(Influence(strangers=True), 400, a=0.2, b=0.2, c=0.0) == []


@pytest.mark.parametrize(
    ("cosine", "times"), [(0.2, TWICE), (0.5, TWICE), (0.1, (APART + TWICE) / 2), (0.0, APART), (-0.1, APART)]
)
def test_who_points_with_the_others_may_be_longer_than_who_points_nowhere(cosine: float, times: float) -> None:
    influence = Influence()
    for _ in range(TOLD):
        influence.hear(sent(1, 1, 1), {i: Direction(0.2 if i != "c" else cosine, 0.2) for i in "abc"})
    assert kept(influence, sent(1, 1, 30)) == [1, 1, times]
    assert kept(influence, sent(1, 1, times)) == [1, 1, times]


def test_where_the_others_do_not_agree_nobody_is_left_out() -> None:
    told = LearnerStatistics(deque(maxlen=TOLD), deque([Direction(-0.3, 0.0)] * TOLD, maxlen=TOLD))
    assert not told.points_away(OPPOSED)
    assert (
        LearnerStatistics(told.kept, deque([Direction(-0.3, -0.3)] * TOLD, maxlen=TOLD)).points_away(OPPOSED) is False
    )
    assert math.isclose(told.mean_cosine or 0, -0.3)


def test_another_process_under_the_id_begins_anew() -> None:
    influence = Influence(left_out={"c"})
    influence.begin("c")
    assert influence.left_out == set()


def test_a_learner_that_is_left_out_takes_the_global_values_and_its_work_is_gone() -> None:
    rig = Rig(outer={"lr": 0.001}).started("a", "b", "c")
    for number in range(1, 2 * TOLD):
        for learner_id, value in (("a", 1.0), ("b", 1.0), ("c", -1.0 if number <= TOLD + 1 else 1.0)):
            rig.contribute(learner_id, number, value)
        rig.step("c", "a", "b", steps=H)
        rig.assert_accounts_balance()
        if number == TOLD:
            assert rig.noted(LearnerLeftOut) == [LearnerLeftOut("c", pytest.approx(-1.0))]
            before = rig.theta
        if number == TOLD + 1:
            assert rig.theta == pytest.approx([before[0] - 0.001], abs=1e-5), "as if c were not there"
            assert rig.shard.ledger.tokens_left_out == H * 10
            assert rig.state.status("c").merged_version == number, "so it carries nothing"
            assert rig.members["c"].merged == TOLD
    assert rig.noted(LearnerTakesPart) == []
    rig.contribute("a", 2 * TOLD, 1.0)
    assert rig.state.version == 2 * TOLD - 1, "it is waited for like everybody"
    for number in range(2 * TOLD, 3 * TOLD):
        for learner_id in "abc":
            rig.contribute(learner_id, number, 1.0)
        rig.step("c", "a", "b", steps=H)
    assert rig.noted(LearnerTakesPart) == [LearnerTakesPart("c")]


def test_whoever_nobody_can_judge_any_more_takes_part_again() -> None:
    rig = Rig(outer={"lr": 0.001}, sync={"quorum": 1}).started("a", "b", "c")
    rig.shard.influence.left_out.add("c")
    rig.shard.leave(rig.members["b"])
    rig.step("a", "c", steps=H)
    assert rig.shard.influence.left_out == set()
    assert rig.noted(LearnerTakesPart) == [LearnerTakesPart("c")]


def test_a_round_in_which_only_those_left_out_remain_is_given_up() -> None:
    rig = Rig(outer={"lr": 0.001})
    rig.join("a", "b", "c")
    rig.seed("a")
    rig.shard.influence.left_out.add("c")
    rig.step("c", "a", "b", steps=H)
    rig.contribute("c", 1, -1.0)
    for gone in "ab":
        rig.shard.leave(rig.members[gone])
    rig.advance()
    assert rig.state.version == 0
    assert rig.shard.ledger.tokens_fenced == H * 10
    rig.assert_accounts_balance()


@pytest.mark.parametrize("times", [100, 1000])
def test_directions_are_right_beside_one_with_nearly_all_of_the_weight(times: int) -> None:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(4096, generator=generator)
    values = [0.5 * common + torch.randn(4096, generator=generator) for _ in range(4)]
    heavy = [make_contribution(n, v, tokens=times if n == "a" else 1) for n, v in zip("abcd", values, strict=True)]
    found = directions(heavy, [], 4096, {})
    alike = [make_contribution(n, v) for n, v in zip("abcd", values, strict=True)]
    expected = directions(alike, [], 4096, {})
    assert found["a"].cosine == pytest.approx(expected["a"].cosine, abs=1e-3)
    assert found["a"].others == pytest.approx(expected["a"].others, abs=1e-3)


def test_a_limit_rises_at_once_and_falls_slowly() -> None:
    influence, limit = Influence(), None
    for lengths, expected in [((1, 1, 1), 1.0), ((5, 5, 9), 5.0), ((1, 1, 1), 5 * FALLS), ((7,), 5 * FALLS)]:
        _, limit = influence.bound(0, sent(*lengths), limit)
        assert limit is not None
        assert limit.length == pytest.approx(expected)
