"""Rounds go by what learners report, whatever their speed; ghosts that are in no round drive none.

Most tests run a shard of one fragment and its learners in virtual time. H is 4 steps; every step has 10 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from builders import asking
from diloco_common.codec import encode_payload
from diloco_common.settings import OVERLAP_STEPS
from diloco_common.wire.messages import Collect, Outcome, Progress, PushAnswer
from diloco_server.core.ledger import RoundOpened
from diloco_server.core.membership import Member
from diloco_server.core.patience import LONGEST
from rig import MODEL, SIZE, TOKENS, Rig

TICK_S = 0.05
PAYLOAD = encode_payload(torch.ones(SIZE), "float32")


@dataclass
class Actor:
    """A learner in virtual time. `per_step`: the steps and tokens that it reports for each step."""

    learner_id: str
    member: Member
    step_s: float
    per_step: tuple[int, int] = (1, TOKENS)
    contributes: bool = True
    step_time_s: float | None = None
    steps: int = 0
    tokens: int = 0
    merged_until: int = 0
    next_at: float = 0.0
    silent_until: float = 0.0
    asked: int | None = None


class Crowd(Rig):
    """A shard, and whoever reports to it."""

    def __init__(self, sync: dict[str, Any] | None = None, **sections: Any) -> None:
        lease = {"lease_s": 1000.0}
        super().__init__(sync={"quorum": 1} | (sync or {}), lease=lease, **sections)
        self.actors: dict[str, Actor] = {}
        self.answers: list[tuple[str, PushAnswer]] = []

    def come(self, learner_id: str, step_s: float, **lies: Any) -> Actor:
        member = self.shard.join(learner_id, asking(MODEL, f"process of {learner_id}"), self.now)
        actor = self.actors[learner_id] = Actor(learner_id, member, step_s, **lies)
        actor.next_at = self.now + step_s
        self.says(actor)
        if not self.shard.versions.all_seeded:
            self.push(member, self.header(0, PAYLOAD), PAYLOAD)
        return actor

    def says(self, actor: Actor) -> None:
        step_time_s = actor.step_s if actor.step_time_s is None else actor.step_time_s
        self.shard.progress(actor.member, Progress(actor.steps, actor.tokens, None, step_time_s), self.now)
        self.advance()

    def brings(self, actor: Actor, round_number: int, *, tokens: int | None = None) -> PushAnswer:
        tokens = actor.tokens - actor.merged_until if tokens is None else tokens
        header = self.header(round_number, PAYLOAD, tokens=tokens, steps=max(1, tokens // TOKENS))
        answer = self.push(actor.member, header, PAYLOAD)
        self.answers.append((actor.learner_id, answer))
        if answer.outcome is Outcome.ACCEPTED:
            actor.merged_until += tokens
        return answer

    def run(self, seconds: float) -> int:
        """Everybody trains for so long. Returns the rounds that were opened meanwhile."""
        before, end = self.rounds, self.now + seconds
        while self.now < end:
            self.advance(TICK_S)
            for actor in self.actors.values():
                if self.now >= actor.next_at:
                    actor.next_at += actor.step_s
                    self._step(actor)
        return self.rounds - before

    def _step(self, actor: Actor) -> None:
        actor.steps += actor.per_step[0]
        actor.tokens += actor.per_step[1]
        for directive in self.take_told(actor.learner_id):
            if isinstance(directive, Collect):
                actor.asked = directive.round
        if actor.contributes and actor.asked is not None and actor.tokens > actor.merged_until:
            asked, actor.asked = actor.asked, None
            self.brings(actor, asked)  # it overtakes the report
        if self.now >= actor.silent_until:
            self.says(actor)

    @property
    def rounds(self) -> int:
        return len(self.noted(RoundOpened))

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(learner_id, answer.code) for learner_id, answer in self.answers if answer.code]


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def honest(crowd: Crowd, count: int = 3, step_s: float = 1.0) -> list[Actor]:
    return [crowd.come(f"honest-{i}", step_s) for i in range(count)]


def test_a_ghost_that_reports_a_thousand_steps_at_a_time_opens_no_more_rounds() -> None:
    """A learner reported a thousand steps at a time, and everybody was asked four times per step."""
    alone, with_ghost = Crowd(), Crowd()
    for crowd in (alone, with_ghost):
        honest(crowd)
    without = alone.run(200)
    with_ghost.run(40)
    with_ghost.come("ghost", 0.1, per_step=(1000, 10**6), contributes=False)
    with_ghost.run(40)  # until it is known for one: it is in no round
    assert with_ghost.run(200) <= without + 2
    assert with_ghost.refused == []


@pytest.mark.parametrize("times", [1, 10, 30])
def test_a_fast_learner_counts_in_full(crowd: Crowd, times: int) -> None:
    slow = honest(crowd, 3, step_s=2.0)
    fast = crowd.come("fast", 2.0 / times)
    rounds = crowd.run(200)
    assert fast.steps - fast.member.reported.inner_step <= 1
    for actor in (fast, *slow):
        assert actor.tokens - actor.member.reported.tokens <= TOKENS
    assert rounds >= 0.9 * 100 * times / 4  # every H steps of the fastest
    assert crowd.refused == []


def test_learners_whose_others_hang_go_on_at_their_own_pace(crowd: Crowd) -> None:
    worker, *others = honest(crowd)
    crowd.run(100)
    for other in others:
        other.next_at = math.inf
    crowd.run(1000)
    assert worker.steps - worker.member.reported.inner_step <= 1
    assert crowd.refused == []


def test_the_end_of_a_budget_is_not_called_by_one_stranger() -> None:
    """Otherwise every report of a ghost would open a round of every fragment."""
    alone, with_ghost = (Crowd(run={"tokens": 30_000}, guard={"trust": "strangers"}) for _ in range(2))
    for crowd in (alone, with_ghost):
        honest(crowd)
        crowd.run(100)
    with_ghost.come("ghost", 0.1, per_step=(1, 2**40), contributes=False)
    with_ghost.run(40)
    assert with_ghost.run(200) <= alone.run(200) + 2


def test_ghosts_that_report_long_steps_widen_no_window() -> None:
    """Five ghosts reported steps of a million seconds, and no round closed for a minute."""
    crowd = Crowd(sync={"grace": "adaptive"})
    honest(crowd, 1)
    crowd.run(40)
    before = crowd.shard.rounds.patience.grace_s()
    for i in range(5):
        crowd.come(f"ghost-{i}", 1.0, contributes=False, step_time_s=1e6)
    for _ in range(50):
        crowd.run(1.0)
        assert crowd.shard.rounds.patience.grace_s() <= max(before, 1.0)


def test_step_times_are_held_against_what_passes_between_reports() -> None:
    crowd = Crowd(sync={"grace": "adaptive", "sync_every": 4})
    for i in range(3):
        crowd.come(f"liar-{i}", 1.0, step_time_s=1e6)  # these do contribute, and are the majority
    crowd.run(60)
    assert 0 < crowd.shard.rounds.patience.grace_s() <= LONGEST * OVERLAP_STEPS * 2.1
