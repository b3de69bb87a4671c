"""When a round closes, and why: whom it waits for, and what losing a learner does to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from builders import make_contribution
from diloco_common.wire.messages import Outcome, Progress
from diloco_server.core.arrivals import Arrivals, Expected, Reports, RoundRequest, next_boundary
from diloco_server.core.ledger import RoundClosed
from diloco_server.core.patience import adaptive_s
from diloco_server.core.round import Contribution, Quorum, Round
from rig import TOKENS, Rig

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
    ("quorum", "arrivals", "more", "now", "why"),
    [
        (2, [], {}, 9.0, None),
        (2, [("a", 0.0)], {}, 9.0, None),
        (2, [("a", 0.0), ("b", 1.0)], {}, 3.0, None),
        (2, [("a", 0.0), ("b", 1.0)], {}, 6.0, "grace"),
        (2, [("a", 0.0), ("b", 1.0), ("c", 2.0)], {}, 2.0, "all"),
        (1, [("a", 1.0)], {}, 5.9, None),
        ("all", [("a", 0.0), ("b", 1.0)], {}, 1e9, None),
        ("all", [("a", 0.0), ("b", 1.0), ("c", 2.0)], {}, 2.0, "all"),
        ("all", [("a", 0.0), ("b", 1.0), ("c", 2.0)], {"lost": "x"}, 2.0, "all"),  # nobody has asked x
        ("all", [("a", 0.0), ("b", 1.0)], {"lost": "c"}, 1.0, "lease"),
        ("all", [("a", 0.0)], {"lost": "bc"}, 1.0, "lease"),
        ("all", [("a", 0.0), ("b", 1.0)], {"refused": "c"}, 1.0, "all"),
        (3, [("a", 0.0)], {"lost": "c"}, 1e9, None),
        (2, [("a", 0.0), ("b", 1.0)], {"lost": "b"}, 9.0, None),  # fenced: below quorum again
        (1, [], {"refused": "ab"}, 9.0, None),
    ],
)
def test_a_round_closes_on_quorum_and_grace_or_when_nobody_is_missing(quorum, arrivals, more, now, why) -> None:
    made = make_round("abc", arrivals, quorum, **more)
    assert made.verdict((made.quorum_at or 0.0) + GRACE_S, now) == why


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


STEP_S = 1.0
PATIENCE_S = 2.4
"""A tenth of H = 24 steps."""


def reports(reported_at: float, step_s: float = STEP_S) -> Reports:
    made = Reports.begin(Progress(0, 0), reported_at)
    made.step_s = step_s
    return made


@pytest.mark.parametrize(
    ("reported_at", "step_s", "now", "boundary_at"),
    [
        (10.0, 1.0, 10.4, 11.0),
        (10.0, 5.0, 10.4, 15.0),  # five times slower
        (10.0, 1.0, 11.7, 11.7),  # overdue: any moment now
        (10.0, 1.0, 13.5, math.inf),  # it hangs
        (10.0, 0.0, 10.0, 10.0),  # no step yet
    ],
)
def test_a_learner_answers_at_its_next_step_boundary(reported_at, step_s, now, boundary_at) -> None:
    assert next_boundary(reports(reported_at, step_s), PATIENCE_S, now) == pytest.approx(boundary_at)


def test_an_arrival_is_the_boundary_plus_the_usual_lag_plus_the_bytes_over_the_measured_link() -> None:
    arrivals = Arrivals()
    call = RoundRequest(1, {arrivals: Expected(10.5)})
    assert arrivals.expected_at(call, 1000) == pytest.approx(10.5)  # nothing is known yet

    arrivals.header(call, 10.7, wanted=True)
    assert arrivals.expected_at(call, 1000) == pytest.approx(10.7)
    arrivals.bytes_came(call, 1000, 12.7)

    assert arrivals.expected_at(RoundRequest(5, {arrivals: Expected(21.0)}), 4000) == pytest.approx(21.0 + 0.2 + 8.0)
    assert arrivals.expected_at(RoundRequest(5, {}), 4000) == math.inf, "it was not asked"


def test_a_link_that_nothing_measures_any_more_is_believed_better_with_every_round() -> None:
    arrivals = Arrivals(s_per_element=1.0)
    for round_number in range(1, 101):
        arrivals.header(RoundRequest(round_number, {arrivals: Expected(1.0)}), 9.0, wanted=False)
    assert arrivals.s_per_element < 1e-4


class Crowd(Rig):
    """Learners that step, report and push as they are told."""

    def __init__(self, lease_s: float = 1e6, **sync: Any) -> None:
        sync = {"grace": "adaptive", "sync_every": 24, "quorum": 1} | sync
        super().__init__(sync=sync, lease={"lease_s": lease_s, "heartbeat_s": 1.0})
        self.merged_steps: dict[str, int] = {}

    def come(self, *learner_ids: str) -> None:
        self.join(*learner_ids)
        self.seed(learner_ids[0])

    def report(self, learner_id: str, **more: Any) -> None:
        super().report(learner_id, step_time_s=STEP_S, **more)

    def answers(self, learner_id: str) -> None:
        """With all that it has trained since it was merged last."""
        trained = self.steps[learner_id] - self.merged_steps.get(learner_id, 0)
        answer = self.contribute(learner_id, self.state.version + 1, tokens=TOKENS * trained, steps=trained)
        if answer.outcome is Outcome.ACCEPTED:
            self.merged_steps[learner_id] = self.steps[learner_id]

    def run(
        self, seconds: float, step_s: dict[str, float], *, silent: tuple[str, ...] = (), burst: int = 1,
        rest_s: float = 0.0,
    ) -> list[RoundClosed]:  # fmt: skip
        """Everybody steps at a pace, rests after so many, and answers at the boundary; these do not answer. Rounds that
        closed meanwhile."""
        before = len(self.closed)
        began = self.now
        due = {name: began + (i + 1) / len(step_s) * (burst * s + rest_s) for i, (name, s) in enumerate(step_s.items())}
        asked: dict[str, int] = {}
        while self.now < began + seconds:
            self.now = round(self.now + 0.05, 6)
            self.advance()
            for name in sorted(due, key=lambda n: due[n]):
                if due[name] <= self.now + 1e-9:
                    self.step(name)
                    due[name] += step_s[name] + (rest_s if self.steps[name] % burst == 0 else 0.0)
                    collecting = self.state.round
                    if collecting and name in collecting.missing and asked.get(name) != collecting.round:
                        asked[name] = collecting.round
                        if name not in silent:
                            self.answers(name)
        return self.closed[before:]

    @property
    def closed(self) -> list[RoundClosed]:
        return self.noted(RoundClosed)


def test_learners_whose_steps_come_in_bursts_wait_for_one_another() -> None:
    crowd = Crowd()
    crowd.come("a", "b", "c")
    paces = {"a": 0.1, "b": 0.1, "c": 0.1}
    crowd.run(60.0, paces, burst=12, rest_s=1.5)
    closed = crowd.run(200.0, paces, burst=12, rest_s=1.5)
    assert len(closed) > 10
    assert sum(c.absent for c in closed) < 0.1 * sum(c.asked for c in closed)


def test_a_learner_five_times_slower_is_waited_for_where_its_step_ends_in_time() -> None:
    crowd = Crowd()
    crowd.come("a", "b", "c", "slow")
    closed = crowd.run(600.0, {"a": 1.0, "b": 1.1, "c": 1.2, "slow": 5.0})
    assert all(c.participants >= 3 for c in closed)
    with_all = [c for c in closed if c.participants == 4]
    assert 0.2 < len(with_all) / len(closed) < 0.8
    assert max(c.open_s for c in closed) <= 1.1 + PATIENCE_S * 1.1 + 0.1, "usual, and the patience on top"
    assert all(c.open_s < 1.3 for c in closed[2:] if c.participants == 3), "nobody waits in vain"
    merged = crowd.members["slow"].tokens_merged
    assert merged >= 10 * crowd.steps["slow"] - 10 * 24, "its tokens count, if later"


def test_who_reports_and_never_contributes_costs_the_patience_and_after_some_rounds_nothing() -> None:
    crowd = Crowd()
    crowd.come("a", "b", "ghost")
    paces = {"a": 1.0, "b": 1.1, "ghost": 1.0}
    waiting = crowd.run(24 * 14.0, paces, silent=("ghost",))
    assert max(c.open_s for c in waiting) <= 1.1 + PATIENCE_S * 1.1 + 0.1
    later = crowd.run(24 * 12.0, paces, silent=("ghost",))
    assert max(c.open_s for c in later[-6:]) < 1.3


@pytest.mark.parametrize(
    ("every", "step_time_s", "scatter_s", "seconds"),
    [
        (24, 1.0, 0.0, 6.0),  # 2.5 times a tenth of H = 24 steps
        (4, 1.0, 0.0, 5.0),  # never less than the overlap
        (24, 1.0, 0.5, 11.0),  # steps in bursts: 2.5 times 2.4 + 4 * 0.5
        (24, 20.0, 0.0, 60.0),  # never more than a minute
        (24, 0.0, 0.0, 0.0),  # nobody has told its step time
    ],
)
def test_a_round_waits_a_share_of_its_cadence(every, step_time_s, scatter_s, seconds) -> None:
    assert adaptive_s(step_time_s, every, scatter_s) == pytest.approx(seconds)
