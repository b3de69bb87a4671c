"""What a sick member sends is refused or left out, and named; what a healthy one sends never is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from diloco_common.wire.manifest import Fragment, Piece, TensorSpec
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_server.core.ledger import LearnerQuarantined
from diloco_server.core.trust.conduct import OUTLIERS
from diloco_server.core.trust.lengths import AGAIN, CROWD, FAR, SETTLED, START_OF_SEED, STRAIGHT, Lengths, Way
from rig import TOKENS, Rig

SIZE, H, USUAL = 64, 24, 0.1
"""Elements; inner steps between rounds; the norm of an honest contribution."""


@dataclass
class Sick:
    """What comes of a learner, instead of a contribution of the usual norm."""

    name: str
    norm: float
    direction: float = 1.0


class Crowd(Rig):
    """Learners in lockstep. Every step takes a second; a round comes every H of them."""

    def __init__(
        self, learners: str, sync: dict[str, Any] | None = None, lease_s: float = 1e6, **settings: Any
    ) -> None:  # fmt: skip
        sync = {"sync_every": H, "fragments": 1} | (sync or {})
        lease = {"lease_s": lease_s, "stalled_s": 1e6}
        super().__init__([TensorSpec("w", (SIZE,))], sync=sync, lease=lease, **settings)
        self.since = dict.fromkeys(learners, 0)
        self.join(*learners)
        self.push_values(learners[0], 0, torch.ones(SIZE))

    def push_values(self, learner: str, number: int, values: torch.Tensor, **claims: int) -> PushAnswer:
        steps = claims.get("steps", self.steps[learner] - self.since[learner])
        answer = self.bring(learner, number, values, steps=steps, tokens=claims.get("tokens", TOKENS * steps))
        if answer.outcome is Outcome.ACCEPTED:
            self.since[learner] = self.steps[learner]
        return answer

    def train(self, seconds: int, **speeds: int) -> int:
        """Everybody steps, by 1 per second or its speed. Returns the round that is open then."""
        for _ in range(seconds):
            self.now += 1.0
            for learner in self.members:
                self.steps[learner] += speeds.get(learner, 1)
                self.report(learner, step_time_s=1 / max(1, speeds.get(learner, 1)))
        return self.state.round.round

    def round(self, *sick: Sick, **norms: float) -> dict[str, PushAnswer]:
        """One round: everybody sends `USUAL`, or what is said. Returns the answers."""
        number = self.train(H)
        sent = {one.name: one for one in sick}
        answers = {}
        for i, learner in enumerate(self.members):
            direction = torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * number + i))
            one = sent.get(learner, Sick(learner, norms.get(learner, USUAL)))
            answers[learner] = self.push_values(
                learner, number, direction * (one.direction * one.norm / direction.norm())
            )
        return answers

    @property
    def refused(self) -> int:
        return sum(self.shard.ledger.rejected.values()) + self.shard.ledger.tokens_fenced

    @property
    def named(self) -> set[str]:
        return {e.learner_id for e in self.noted(LearnerQuarantined)}

    @property
    def length(self) -> float:
        """Of the values."""
        return float(self.state.values.theta.norm())


@pytest.mark.parametrize("learners", ["ab", "abcdefgh"])
@pytest.mark.parametrize("times", [30.0, 1e30])
def test_values_grown_by_any_factor_move_nothing_and_their_learner_is_named(learners: str, times: float) -> None:
    crowd = Crowd(learners)
    for _ in range(3):
        crowd.round()
    for _ in range(10):
        answers = crowd.round(Sick("b", times * USUAL, -1.0))
        assert answers["b"].code in ("NORM_TOO_LARGE", "NOT_FINITE", "QUARANTINED")
        assert answers["a"].outcome is Outcome.ACCEPTED
    assert crowd.named == {"b"}
    assert crowd.length < 10.0


@pytest.mark.parametrize("learners", ["abc", "abcdefgh"])
def test_in_the_first_round_of_all_the_one_that_is_far_off_is_left_out(learners: str) -> None:
    """It may come first, when there is nothing to compare it with."""
    crowd = Crowd(learners)
    answers = crowd.round(Sick("a", 20.0))
    assert answers["a"].outcome is Outcome.ACCEPTED
    assert crowd.state.version == 1
    assert crowd.state.status("a").merged_version == 0, "it hears that, and carries the work"
    assert crowd.state.status("b").merged_version == 1
    assert crowd.length == pytest.approx(8.0, abs=0.5)
    assert crowd.shard.ledger.tokens_in_flight == 0


def test_a_learner_that_diverges_is_refused_soon_beside_one_other() -> None:
    """Twice the length with each contribution."""
    crowd, taken = Crowd("ab"), []
    for i in range(20):
        answer = crowd.round(Sick("b", USUAL * 2.0 ** max(0, i - 3)))["b"]
        taken += [USUAL * 2.0 ** max(0, i - 3)] if answer.outcome is Outcome.ACCEPTED else []
    assert max(taken) <= 2 * FAR * USUAL
    assert crowd.named == {"b"}


@pytest.mark.parametrize("learners", ["ab", "abc"])
@pytest.mark.parametrize("quiet", [0.0, 1e-9])
def test_one_that_sends_nothing_keeps_nobody_out(learners: str, quiet: float) -> None:
    crowd = Crowd(learners)
    for _ in range(6):
        crowd.round(b=quiet)
    assert crowd.refused == 0


@pytest.mark.parametrize("learners", ["ab", "abc"])
def test_where_all_go_further_at_once_everybody_is_merged_again_within_a_round(learners: str) -> None:
    """A schedule that begins anew: a hundred times the rate."""
    crowd = Crowd(learners)
    for _ in range(5):
        crowd.round(**dict.fromkeys(learners, 0.001))
    crowd.round()
    answers = crowd.round()
    assert {answer.outcome for answer in answers.values()} == {Outcome.ACCEPTED}
    assert crowd.named == set()


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("times", [2, 8])
def test_learners_of_unequal_speed_are_never_too_long(times: int, power: float) -> None:
    """Ways may be straight, or grow with the root of the steps."""
    crowd = Crowd("ab")
    for _ in range(10):
        number = crowd.train(H, a=times)
        for learner in "ab":
            steps = crowd.steps[learner] - crowd.since[learner]
            values = torch.full((SIZE,), USUAL * (steps / H) ** power / SIZE**0.5)
            assert crowd.push_values(learner, number, values).outcome is Outcome.ACCEPTED
    assert crowd.refused == 0


def test_who_is_back_after_an_hour_brings_all_of_it() -> None:
    crowd = Crowd("abc")
    for _ in range(5):
        crowd.round()
    for _ in range(10):
        number = crowd.train(360)
        for learner in "bc":
            crowd.push_values(learner, number, torch.full((SIZE,), 15 * USUAL / SIZE**0.5))
    number = crowd.train(H)
    steps = crowd.steps["a"] - crowd.since["a"]
    assert (
        crowd.push_values("a", number, torch.full((SIZE,), USUAL * steps / H / SIZE**0.5)).outcome is Outcome.ACCEPTED
    )


def test_claims_of_more_steps_than_were_reported_lengthen_nothing() -> None:
    crowd = Crowd("abc")
    for _ in range(5):
        crowd.round()
    number = crowd.train(H)
    lie = torch.full((SIZE,), 1.2 * FAR * USUAL / SIZE**0.5)
    assert Way(USUAL, H).reach(60) > 1.2 * FAR * USUAL
    assert crowd.push_values("a", number, lie, steps=60, tokens=240).code == "NORM_TOO_LARGE"


def fragment(fragment_id: int, size: int = SIZE) -> Fragment:
    return Fragment(fragment_id, 0, (Piece(f"w{fragment_id}", 0, size, 0),))


def longest(
    lengths: Lengths, name: str, way: Way, live: Mapping[str, int], seed_norm: float = 1e-9, usual_ever: float = 0.0
) -> float | None:  # fmt: skip
    return lengths.most(fragment(0), name, way, live, H, seed_norm, usual_ever)


def test_rare_rows_may_be_as_long_as_what_is_dense() -> None:
    """An embedding that hardly moves, until one learner meets its rows: thousands of times the usual norm."""
    lengths = Lengths()
    for learner in SETTLED * "abc":
        lengths.saw(fragment(0), learner, Way(1e-5, H))
        lengths.saw(fragment(1), learner, Way(USUAL, H))
    assert longest(lengths, "a", Way(USUAL, H), dict.fromkeys("abc", 100), 1.0) == 0.0
    most = longest(lengths, "a", Way(100 * USUAL, H), dict.fromkeys("abc", 100), 1.0)
    assert most == pytest.approx(2 * USUAL)


@pytest.mark.parametrize(
    ("steps", "most"), [(H, FAR), (4 * H, 2 * FAR), (64 * H, 64 * STRAIGHT), (1, FAR / math.sqrt(H))]
)
def test_the_longest_way_grows_with_the_steps(steps: int, most: float) -> None:
    assert Way(USUAL, H).reach(steps) == pytest.approx(most * USUAL)


@pytest.mark.parametrize("learners", [2, 3])
def test_zeros_sent_often_keep_no_newcomer_out(learners: int) -> None:
    """One says that it is fast, and sends zeros round after round. The others come second with many more steps than at
    first, and further than that: their rates have risen since."""
    lengths, names = Lengths(), "abc"[:learners]
    for name in names:
        lengths.saw(fragment(0), name, Way(0.01, 3))
        lengths.took(0, name)
    for _ in range(2 * SETTLED):
        lengths.saw(fragment(0), "zeros", Way(0.0, 2))
        lengths.took(0, "zeros")
    for name in names:
        way = Way(0.5, 18)
        assert longest(lengths, name, way, dict.fromkeys([*names, "zeros"], 100), 2.0) == 0.0
        lengths.saw(fragment(0), name, way)
    assert longest(lengths, "a", Way(10.0, 20), dict.fromkeys([*names, "zeros"], 100), 2.0)


@pytest.mark.parametrize("learners", ["ab", "abcd"])
def test_beside_first_steps_of_a_warm_up_the_next_ones_go_far(learners: str) -> None:
    """A head that begins small: the second contribution is 220 times as long as the first. Once only."""
    lengths = Lengths()
    for learner in learners:
        lengths.saw(fragment(0), learner, Way(0.0122, 3, until=3))
        lengths.took(0, learner)
    live = dict.fromkeys(learners, 26)
    for learner in learners:
        assert longest(lengths, learner, Way(2.68, 23), live, 0.8) == 0.0
    assert longest(lengths, "a", Way(10.0, 23), live, 0.8)
    for learner in learners:
        lengths.saw(fragment(0), learner, Way(2.68, 23, until=26))
        lengths.took(0, learner)
    assert longest(lengths, "a", Way(220 * 2.68, 24), dict.fromkeys(learners, 50), 0.8)


def test_those_that_have_left_do_not_say_what_is_usual_for_those_that_are_here() -> None:
    lengths, here = Lengths(), dict.fromkeys("abc", 100)
    for i in range(2 * CROWD):
        lengths.saw(fragment(0), f"gone-{i}", Way(USUAL, H))
    for name in here:
        lengths.saw(fragment(0), name, Way(20 * USUAL, H))
    assert longest(lengths, "a", Way(22 * USUAL, H), here) == 0.0
    assert longest(lengths, "a", Way(22 * USUAL, H), {}), "with nobody there they do"


@pytest.mark.parametrize(("times", "most"), [(1, FAR), (8, 8 * FAR), (100, 8 * FAR)])
def test_who_has_taken_more_steps_may_go_further_if_it_went_as_far_before(times: int, most: float) -> None:
    """Each raises its rate by its own steps: the fast one, or the one that was there first, is at a higher one."""
    lengths = Lengths()
    for _ in range(2 * SETTLED):
        for name, norm in (("fast", 8 * USUAL), ("b", USUAL), ("c", USUAL)):
            lengths.saw(fragment(0), name, Way(norm, H))
            lengths.took(0, name)
    live = {"fast": times * 50, "b": 50, "c": 50}
    assert longest(lengths, "fast", Way(0.99 * most * USUAL, H), live) == 0.0
    assert longest(lengths, "fast", Way(1.01 * most * USUAL, H), live)


def test_who_goes_on_at_its_rate_while_those_of_others_fall_goes_no_further_than_it_went() -> None:
    """Each lowers its rate by its own steps: the slow one is still at its highest."""
    lengths, live = Lengths(), {"slow": 100, "b": 300, "c": 300}
    for i in range(30):
        for name in live:
            way = Way(USUAL if name == "slow" else USUAL * 0.8**i, H)
            assert longest(lengths, name, way, live, usual_ever=USUAL) in (0.0, None), (i, name)
            lengths.saw(fragment(0), name, way)
            lengths.took(0, name)
    assert longest(lengths, "slow", Way(1.01 * AGAIN * USUAL, H), live, usual_ever=USUAL)


@pytest.mark.parametrize("learners", ["ab", "abcd"])
def test_as_far_as_was_ever_usual_anybody_may_go_at_any_time(learners: str) -> None:
    """A model that has converged, and one learner meets a hard example: found in a stranger's own script."""
    crowd, once = Crowd(learners), 10 * USUAL
    for _ in range(5):
        crowd.round(**dict.fromkeys(learners, once))
    for i in range(60):
        crowd.round(**dict.fromkeys(learners, once * max(1e-5, 0.7**i)))
    assert crowd.state.record.highest_usual_norm == pytest.approx(once)
    assert crowd.round(b=0.95 * AGAIN * once)["b"].outcome is Outcome.ACCEPTED
    assert crowd.refused == 0
    for _ in range(SETTLED):
        crowd.round(**dict.fromkeys(learners, 1e-5 * once))
    assert crowd.round(b=1.05 * AGAIN * once)["b"].code == "NORM_TOO_LARGE"


def test_after_a_restart_the_first_one_may_go_as_far_as_was_ever_usual() -> None:
    """A model that began small: three times its version 0 is less than what is usual."""
    live, usual, size = dict.fromkeys("ab", 100), 10 * USUAL, 2 * USUAL
    assert longest(Lengths(), "a", Way(usual, H), live, size, usual) == 0.0
    assert longest(Lengths(), "a", Way(usual, H), live, size) == pytest.approx(START_OF_SEED * size)


def test_in_a_crowd_those_in_quarantine_do_not_say_what_is_usual() -> None:
    sick = {f"sick-{i}" for i in range(CROWD)}
    lengths, live = Lengths(sick.__contains__), dict.fromkeys([*sick, *(f"well-{i}" for i in range(CROWD))], 100)
    for name in live:
        lengths.saw(fragment(0), name, Way((1000 if name in sick else 1) * USUAL, H))
    assert longest(lengths, "well-1", Way(2 * FAR * USUAL, H), live) == pytest.approx(FAR * USUAL)


def test_the_first_of_all_cannot_be_longer_than_the_model_while_others_are_here() -> None:
    lengths, seed_norm = Lengths(), 8.0
    most = START_OF_SEED * seed_norm
    assert longest(lengths, "a", Way(0.99 * most, H), {"a": 24, "b": 0}, seed_norm) == 0.0
    assert longest(lengths, "a", Way(1.01 * most, H), {"a": 24, "b": 0}, seed_norm)
    assert longest(lengths, "a", Way(1.01 * most, H), {"a": 24}, seed_norm) is None, "it is alone"


@pytest.mark.parametrize("sent", [None, 1e-3, 1e6])
def test_beside_one_that_is_left_out_a_learner_is_as_if_alone(sent: float | None) -> None:
    """Found by `short:2995`: what it sent was refused for ever, as the other one could say nothing against that.
    `sent`: the norm of what that one has sent before."""
    crowd = Crowd("ab")
    if sent is not None:
        crowd.push_values("b", crowd.train(H), torch.full((SIZE,), sent / math.sqrt(SIZE)))
    for _ in range(OUTLIERS):
        crowd.shard.trust.quarantine.vote("b", "NOT_FINITE", crowd.now, crowd.members)
    size = math.sqrt(SIZE)
    assert crowd.round(a=2000.0 * size)["a"].code == "NORM_TOO_LARGE", "guard.norm_factor holds"
    assert crowd.round(a=1.2 * START_OF_SEED * size)["a"].outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("learners", ["ab", "abc"])
def test_who_sends_a_little_more_each_time_is_named_before_it_moves_the_model_far(learners: str) -> None:
    crowd = Crowd(learners)
    for i in range(60):
        crowd.round(Sick("b", USUAL * 1.19**i))
    assert crowd.named == {"b"}
    assert crowd.length < 2 * math.sqrt(SIZE)


def test_the_steps_of_a_newcomer_are_those_that_it_has_reported() -> None:
    crowd = Crowd("abc")
    for _ in range(4):
        crowd.round()
    crowd.join("z")
    crowd.since["z"] = 0
    number = crowd.train(H)
    before = crowd.shard.tokens_merged
    for claims in ({"steps": 500, "tokens": 5000}, {"steps": 100_000, "tokens": 10**6}):
        answer = crowd.push_values("z", number, torch.ones(SIZE) * 300 * USUAL, **claims)
        assert answer.code in ("NORM_TOO_LARGE", "IMPLAUSIBLE")
    assert crowd.shard.tokens_merged == before


@pytest.mark.parametrize(("learners", "silent"), [("ab", "b"), ("abcd", "cd")])
def test_strangers_that_report_and_push_nothing_do_not_stop_the_others(learners: str, silent: str) -> None:
    crowd = Crowd(learners, guard={"trust": "strangers"}, sync={"quorum": 1}, lease_s=10.0)
    crowd.round()
    for _ in range(200):
        crowd.now += 6.0
        for learner in learners:
            crowd.steps[learner] += 6
            crowd.report(learner, step_time_s=1.0)
        for learner in learners:
            if learner not in silent and crowd.state.round is not None:
                crowd.push_values(learner, crowd.state.round.round, torch.ones(SIZE) * 0.01)
    assert crowd.state.version > 5


# ------------------------------------------------------------------ suspects, strangers


def test_who_was_left_out_counts_as_a_stranger_until_it_is_cleared() -> None:
    crowd = Crowd("abc", guard={"quarantine_s": 30.0})
    for _ in range(3):
        crowd.round()
    while "b" not in crowd.named:
        crowd.round(Sick("b", 1000.0))
    while crowd.shard.trust.quarantine.holds("b"):
        crowd.round()
    before = crowd.length
    crowd.round(Sick("b", 6 * USUAL))
    assert crowd.shard.trust.is_strange("b")
    assert abs(crowd.length - before) < USUAL, "it is cut to the others"
    for _ in range(20):
        crowd.round()
    assert not crowd.shard.trust.is_strange("b")


def test_a_stranger_is_never_alone_in_a_round_and_counts_for_no_more_than_others() -> None:
    crowd = Crowd("abc", guard={"trust": "strangers"}, sync={"grace": 0.0, "quorum": 1})
    for _ in range(3):
        crowd.round()
    before = crowd.shard.tokens_merged
    number = crowd.train(H, a=16)
    crowd.push_values("a", number, torch.ones(SIZE))
    assert crowd.state.round is not None, "half of the others have to be in it"
    crowd.push_values("b", number, torch.ones(SIZE))
    assert crowd.state.version == number
    assert crowd.shard.tokens_merged - before == 2 * 10 * H
