"""Who is left out for outliers, for how long, and how it comes back; and that no round waits for it meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from builders import make_contribution
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Collect, Outcome, PushAnswer
from diloco_server.core.ledger import LearnerQuarantined, LearnerReleased
from diloco_server.core.trust.conduct import LONGEST, OUTLIERS, VOTES, Quarantine, far_off
from rig import TOKENS, Rig

FIRST_S = 60.0
LIVE = ("a", "b", "c", "d")

# ------------------------------------------------------------------ the decision


def vote(quarantine: Quarantine, learner_id: str, votes: str, now: float = 0.0) -> list[float]:
    """x: an outlier, any other letter: ordinary. Returns for how long it was left out, each time that began."""
    begun = [quarantine.vote(learner_id, "NOT_FINITE" if one == "x" else "", now, LIVE) for one in votes]
    return [for_s for for_s in begun if for_s is not None]


@pytest.mark.parametrize(
    ("votes", "left_out"),
    [
        ("x" * 8, True),
        ("x" * 7, False),  # it diverged once
        ("xo" * 8, True),
        ("xoo" * 20, False),  # a third of its fragments is new to it
        ("x" * 7 + "o" * 9 + "x", False),  # the oldest is forgotten by then
        ("o" * 100, False),
    ],
)
def test_eight_outliers_among_sixteen_are_too_many(votes: str, left_out: bool) -> None:
    quarantine = Quarantine(FIRST_S)
    assert vote(quarantine, "a", votes) == ([FIRST_S] if left_out else [])
    assert quarantine.holds("a") is left_out
    assert not quarantine.holds("b")


def test_time_lets_a_learner_back_on_probation_and_ordinary_contributions_clear_it() -> None:
    quarantine = Quarantine(FIRST_S)
    vote(quarantine, "a", "x" * OUTLIERS, now=100.0)
    assert quarantine.release(159.9) == []
    assert quarantine.release(160.0) == ["a"]
    assert not quarantine.holds("a")
    assert vote(quarantine, "a", "x" + "o" * VOTES) == [], "one outlier is none"
    assert quarantine.conduct("a").times == 0
    assert vote(quarantine, "a", "x" * (OUTLIERS - 1)) == [], "nothing is held against it any more"


def test_on_probation_two_outliers_suffice_and_each_time_lasts_twice_as_long() -> None:
    quarantine, now, lasted = Quarantine(FIRST_S), 0.0, []
    lasted += vote(quarantine, "a", "x" * OUTLIERS)
    for _ in range(5):
        now += lasted[-1]
        quarantine.release(now)
        lasted += vote(quarantine, "a", "xox", now)
    assert lasted == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert max(lasted) == LONGEST * FIRST_S


def test_at_most_half_of_the_learners_are_left_out() -> None:
    quarantine = Quarantine(FIRST_S)
    assert [vote(quarantine, one, "x" * 40) for one in LIVE] == [[60.0], [60.0], [], []]
    alone = Quarantine(FIRST_S)
    assert alone.vote("a", "NOT_FINITE", 0.0, ("a",)) is None
    assert [alone.vote("a", "NOT_FINITE", 0.0, ("a",)) for _ in range(40)] == [None] * 40


def test_it_can_be_switched_off() -> None:
    assert vote(Quarantine(0.0), "a", "x" * 100) == []


@pytest.mark.parametrize(
    ("norms", "steps", "typical", "outliers"),
    [
        ([1.0, 1.0, 1.1, 9.0], [4, 4, 4, 4], 0.5, "d"),
        ([1.0, 1.0, 1.1, 60.0], [4, 4, 4, 40], 0.5, ""),  # it was cut off, and brings ten times the steps
        ([1.0, 1.0, 1.1, 90.0], [4, 4, 4, 40], 0.5, "d"),
        ([1e-5, 1e-5, 1e-5, 0.03], [4, 4, 4, 4], 0.01, ""),  # the first to meet these rows of an embedding
        ([1.0, 500.0], [4, 4], 0.5, ""),  # of two nobody can say who is the outlier
    ],
)
def test_far_off_is_eight_times_the_usual_norm(norms, steps, typical, outliers) -> None:
    contributions = {
        name: make_contribution(name, torch.tensor([norm]), steps=count)
        for name, norm, count in zip("abcd", norms, steps, strict=False)
    }
    evidence = far_off(contributions, typical)
    assert "".join(name for name in sorted(evidence) if evidence[name]) == outliers


# ------------------------------------------------------------------ in a shard


class Run(Rig):
    """Four learners and fragments of four elements; each round one of them sends what the test says."""

    def __init__(self, fragments: int = 1, **settings: dict[str, Any]) -> None:
        super().__init__(
            [TensorSpec(f"w{i}", (4,)) for i in range(fragments)], sync={"sync_every": 1, "fragments": fragments},
            lease={"lease_s": 1e6, "stalled_s": 1e6}, **settings,
        )  # fmt: skip
        self.join(*LIVE)
        for fragment_id in range(fragments):
            self.push_values("a", 0, 1.0, fragment_id)

    def push_values(self, learner_id: str, round_number: int, value: float, fragment_id: int = 0) -> PushAnswer:
        is_finite = math.isfinite(value)
        return self.bring(
            learner_id, round_number, torch.full((4,), value if is_finite else 0.0), fragment_id=fragment_id,
            not_finite=not is_finite, tokens=TOKENS, steps=1,
        )  # fmt: skip

    def next_round(self) -> int:
        """Everybody takes a step and reports. Returns the round that is open then."""
        self.step(*LIVE)
        return self.state.round.round

    def round(self, bad: float) -> PushAnswer:
        """a, b and c send 0.01, d something else. Returns the answer to d."""
        number = self.next_round()
        answer = self.push_values("d", number, bad)
        for learner_id in "abc":
            self.push_values(learner_id, number, 0.01)
        return answer


@pytest.mark.parametrize("bad", [math.nan, 1e6, -5.0], ids=["NOT_FINITE", "NORM_TOO_LARGE", "500 times as long"])
def test_rounds_go_on_without_a_learner_that_is_an_outlier_again_and_again(bad: float) -> None:
    run = Run()
    for _ in range(3):
        run.round(0.01)
    for _ in range(OUTLIERS):
        run.round(bad)
    (fact,) = run.noted(LearnerQuarantined)
    assert (fact.learner_id, fact.outliers, fact.for_s) == ("d", OUTLIERS, FIRST_S)
    run.take_told("d")
    version = run.state.version

    number = run.next_round()
    assert run.told_of("d", Collect) == [], "it is not asked"
    answer = run.push_values("d", number, 0.01)
    assert (answer.outcome, answer.code) == (Outcome.REJECTED, "QUARANTINED")
    assert "8 of its last" in answer.message
    assert "another 60 s" in answer.message
    for learner_id in "abc":
        run.push_values(learner_id, number, 0.01)
    assert run.state.version == version + 1, "nobody waits for it"


def test_joining_again_under_the_same_id_changes_nothing() -> None:
    run = Run()
    for _ in range(OUTLIERS):
        run.round(math.nan)
    for process_id in ("process", "another process"):
        run.join("d", process_id=process_id)
        assert run.push_values("d", run.next_round(), 0.01).code == "QUARANTINED"
    run.shard.leave(run.members["d"])
    run.join("d", process_id="a third process")
    assert run.push_values("d", run.next_round(), 0.01).code == "QUARANTINED"


def test_it_is_asked_again_when_the_time_is_over() -> None:
    run = Run()
    for _ in range(OUTLIERS):
        run.round(math.nan)
    number = run.next_round()
    for learner_id in "abc":
        run.push_values(learner_id, number, 0.01)
    run.advance(FIRST_S)
    assert [e.learner_id for e in run.noted(LearnerReleased)] == ["d"]
    for _ in range(VOTES):
        assert run.round(0.01).outcome is Outcome.ACCEPTED
    assert run.shard.trust.quarantine.conduct("d").times == 0


def test_of_other_open_rounds_none_waits_for_it_either() -> None:
    run = Run(fragments=2)
    for _ in range(OUTLIERS):
        number = run.next_round()
        for learner_id in "abc":
            for fragment_id in (0, 1):
                run.push_values(learner_id, number, 0.01, fragment_id)
        assert run.shard.fragments[1].round is not None, "it waits for d"
        run.push_values("d", number, math.nan)
        if not run.shard.trust.quarantine.holds("d"):
            run.push_values("d", number, 0.01, 1)
    assert run.shard.trust.quarantine.holds("d")
    assert run.shard.fragments[1].version == number


def test_a_repeated_push_is_one_vote() -> None:
    run = Run()
    number = run.next_round()
    for _ in range(3 * OUTLIERS):
        run.push_values("d", number, math.nan)
    assert run.shard.trust.quarantine.conduct("d").outliers == 1
    assert not run.shard.trust.quarantine.holds("d")


def test_what_was_taken_before_is_answered_as_before() -> None:
    """A copy of what is in a version is a duplicate, also from quarantine: its learner must not repeat that work."""
    run = Run()
    run.round(0.01)
    for _ in range(OUTLIERS):
        run.round(math.nan)
    assert run.shard.trust.quarantine.holds("d")
    assert run.push_values("d", 1, 0.01).outcome is Outcome.DUPLICATE
