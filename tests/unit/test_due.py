"""Which fragments are due, how H is chosen for them, and the last rounds of a learner that leaves."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import asking, make_settings
from diloco_common.codec import encode_payload
from diloco_common.settings import EVERY_LEAST, EVERY_MOST, SyncSettings
from diloco_common.wire.calls import NOTICE_S
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import Collect, Outcome, Progress
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.arrivals import Reports
from diloco_server.core.due import ASKED, QUIET, Measured, SyncInterval, carried, first_interval, following, is_due
from diloco_server.core.fragment import FragmentState, Phase, Restored
from diloco_server.core.ledger import RoundOpened
from diloco_server.core.membership import IDLE_ROUNDS, LAST_TRIES, Member
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard
from rig import TOKENS, Rig


def make_shard(fragments: int, version: int = 5, *, sections: Any = None, **sync: object) -> Shard:
    """A shard whose fragments, of one element each, have a version already."""
    sections = {"sync": {"fragments": fragments, "sync_every": 4, **sync}} | (sections or {})
    shard = Shard(make_settings(**sections), 2)
    values = Values(torch.ones(1), [])
    published = Published(encode_payload(values.theta, "float32"))
    shard.versions.restore(
        cut(SPECS[:fragments], fragments, 1),
        [Restored(Record(p, 1, version, {}, {}, 0), values, published, False) for p in range(fragments)],
    )
    return shard


SPECS = [TensorSpec(f"w{i:04d}", (1,)) for i in range(64)]


def dumb(shard: Shard, state: FragmentState, sync_every: int, quorum: int) -> list[str] | None:
    """Whom the round of a fragment asks, by looking at every learner; None: it is not due."""
    if state.phase is not Phase.RESTING:
        return None
    fragment_id = state.fragment.fragment_id
    live = [m for m in shard.membership.live() if m.first_step is not None]
    there = [m for m in live if m.takes_part(fragment_id)]
    never = state.last_request.round == 0
    steps = first_interval(fragment_id, len(shard.fragments), sync_every) if never else sync_every
    wanted = any(m.wants_last(fragment_id) for m in there)
    busy = [m for m in there if not m.is_idle]
    if not wanted and not is_due(busy or there, state.base_steps, steps, quorum):
        return None
    ready = [m for m in there if m.progress.last_rounds is not None or unmerged(m, fragment_id) >= 0.75 * steps]
    return [m.learner_id for m in ready or there]


def unmerged(member: Member, fragment_id: int) -> float:
    """Steps that a learner has to contribute."""
    since = member.reports.merged_until.get(fragment_id)
    has_begun_anew = since is not None and since.inner_step > member.reported.inner_step
    return math.inf if since is None or has_begun_anew else member.reported.inner_step - since.inner_step


@pytest.mark.parametrize("seed", range(8))
def test_the_table_decides_as_looking_at_every_learner_does(seed: int) -> None:
    r = random.Random(seed)
    quorum, fragments = r.randint(1, 4), r.randint(1, 9)
    shard = make_shard(fragments, version=r.choice([0, 5]), quorum=quorum)
    members: dict[str, Member] = {}
    steps: dict[str, int] = {}
    for now in range(150):
        name = r.choice("abcdefg")
        member = members.get(name)
        if member is None or not member.live:
            members[name] = shard.join(name, asking(SPECS[:fragments], f"process {r.randint(0, 1)}{name}"), float(now))
            steps[name] = r.choice([0, 3, 1000])
        elif r.random() < 0.08:
            shard.leave(members.pop(name))
        else:
            steps[name] += r.choice([0, 1, 1, 2, 7])
            leaving = frozenset(r.sample(range(fragments), 1)) if r.random() < 0.05 else member.progress.last_rounds
            shard.progress(member, Progress(steps[name], 0, None, 0.1, last_rounds=leaving), float(now))
            member.idle_rounds = r.choice([0, 0, 0, IDLE_ROUNDS])
        merged, state = r.choice([*members.values()] or [None]), r.choice([*shard.fragments.values()])
        if merged is not None and merged.reports is not None and state.phase is not Phase.COLLECTING:
            steps_of = merged.reported.inner_step - r.randint(0, 6)
            merged.reports.merged_until[state.fragment.fragment_id] = Progress(steps_of, 0)
            state.phases.changed.add(state.fragment.fragment_id)  # as every version does
        if r.random() < 0.2:  # nobody answers; the round is given up, and is due again later
            for state in shard.fragments.values():
                if state.round is not None:
                    for asked in list(state.round.asked):
                        state.round.lose(asked, quorum)
        shard._expire(float(now))
        shard.rounds._outbox.now = float(now)
        for state in [s for s in shard.fragments.values() if s.round is not None and s.round.is_void]:
            state.abandon_round()
        found = {p: dumb(shard, state, 4, quorum) for p, state in shard.fragments.items()}
        shard.take_effects()
        shard.tick(float(now))
        opened = [effect.fragment_id for effect in shard.take_effects() if isinstance(effect, RoundOpened)]
        asked = {p: list(shard.fragments[p].last_request.expected) for p in opened}
        whom = {p: [members[i].arrivals for i in asks] for p, asks in found.items() if asks is not None}
        assert asked == whom


def member(learner_id: str, step: int, first: int | None = 0) -> Member:
    made = Member(learner_id, "p", 1, last_heard=0.0, last_step_at=0.0, began=0.0)
    made.reports, made.first_step = Reports.begin(Progress(step, 0), 0.0), first
    return made


@given(num_fragments=st.integers(1, 300), sync_every=st.integers(1, 300))
def test_fragments_spread_evenly_over_h(num_fragments: int, sync_every: int) -> None:
    intervals = sorted(first_interval(p, num_fragments, sync_every) for p in range(num_fragments))
    assert intervals[0] >= 1
    assert intervals[-1] == sync_every
    per_step = [intervals.count(step) for step in range(1, sync_every + 1)]
    assert max(per_step) - min(per_step) <= 1


# H = 4; `steps` are those reported now, `base` those when the last round opened.
@pytest.mark.parametrize(
    ("steps", "base", "quorum", "due"),
    [
        ({}, {}, 1, False),
        ({"a": 4}, {}, 1, True),
        ({"a": 3}, {}, 1, False),
        ({"a": 8}, {"a": 4}, 1, True),
        ({"a": 8, "b": 1}, {"a": 4}, 2, False),
        ({"a": 8, "b": 4}, {"a": 4}, 2, True),
        ({"a": 8, "b": 4, "c": 3}, {"a": 4}, "all", False),
        ({"a": 8, "b": 4, "c": 4}, {"a": 4}, "all", True),
        ({"a": 8}, {"a": 4}, 3, True),  # who is not there is not waited for
        ({"b": 4}, {"a": 1000}, "all", True),  # the fastest has died; the cadence goes on
    ],
)
def test_a_fragment_is_due_when_enough_learners_took_h_steps_of_their_own(steps, base, quorum, due) -> None:
    assert is_due([member(i, s) for i, s in steps.items()], base, 4, quorum) is due


@pytest.mark.parametrize(
    ("sections", "tokens", "asked"),
    [
        ({}, 0, ["fast"]),
        ({"run": {"tokens": 12}}, 1, ["fast", "slow"]),  # the budget ends
    ],
)
def test_a_round_asks_those_that_have_most_of_an_interval(
    sections: dict[str, Any], tokens: int, asked: list[str]
) -> None:
    shard = make_shard(1, sections=sections, quorum=1)
    (state,) = shard.fragments.values()
    for name, steps in (("fast", 4), ("slow", 2)):
        member = shard.join(name, asking(SPECS[:1], f"process {name}"), 0.0)
        shard.progress(member, Progress(0, 0, None, 1.0), 1.0)
        member.reports.merged_until[0] = Progress(0, 0)
        state.base_steps[name] = state.base_tokens[name] = 0
        shard.progress(member, Progress(steps, tokens * 4 * steps, None, 1.0), 5.0)
    shard.tick(5.0)
    assert sorted(state.round.asked) == asked


AUTO = SyncSettings(sync_every="auto")


@pytest.mark.parametrize(
    ("measured", "every"),
    [
        (Measured(1.0), 1),  # nothing is known, so nothing is in the way
        (Measured(1.0, push_s=6.0, pull_s=1.0), 12),  # half of the time is enough to push
        (Measured(1.0, pull_s=9.0), 12),  # three quarters are enough to pull
        (Measured(1.0, shard_s=5.0, push_s=4.0), 10),
        (Measured(0.011, round_s=0.5), 91),
    ],
)
def test_the_smallest_h_leaves_room(measured: Measured, every: int) -> None:
    assert carried(measured) == every


@pytest.mark.parametrize(
    ("every", "carries", "absent", "may_fall", "then"),
    [
        (24, 24, 0.0, True, 24),
        (24, 36, 0.0, False, 36),
        (24, 200, 0.0, False, 48),  # at most twice
        (24, 2, 0.03, True, 48),  # absent, whatever the reason
        (24, 2, 0.02, True, 18),  # a quarter less, at most
        (24, 2, 0.0, False, 24),
        (7, 1, 0.0, True, 6),  # the least
        (400, 900, 0.5, False, 500),
    ],
)
def test_h_follows_slowly_and_within_bounds(every: int, carries: int, absent: float, may_fall: bool, then: int) -> None:
    assert following(every, carries, absent, EVERY_LEAST, EVERY_MOST, may_fall=may_fall) == then


def look(every: SyncInterval, carries_s: float, absent: int = 0, fragments: int = 4) -> str:
    """One pass over all fragments, and enough contributions."""
    while not every.is_time(fragments):
        every.closed(ASKED // fragments - absent, absent)
    return every.look(Measured(1.0, push_s=carries_s))


def test_h_rises_at_once_and_falls_after_a_while() -> None:
    every = SyncInterval(AUTO)
    assert look(every, 12.0) == "24 would do"
    assert [look(every, 3.0) for _ in range(QUIET)] == ["", "6 would do"]
    assert every.steps == 18


def test_h_that_fell_too_far_falls_later_the_next_time() -> None:
    every, waits = SyncInterval(AUTO), []
    every.steps = 24
    for _ in range(3):
        waits.append(next(i for i in range(1, 100) if look(every, 3.0)))
        assert (every.steps, look(every, 3.0, absent=1)) == (18, "8.3% absent")
        every.steps = 24
    assert waits == [QUIET, 2 * QUIET, 4 * QUIET]


class Pair(Rig):
    def __init__(self, **sync: Any) -> None:
        sync = {"sync_every": "auto", "quorum": 1, "grace": "adaptive"} | sync
        super().__init__(sync=sync, lease={"lease_s": 1e6, "heartbeat_s": 1.0})
        self.join("a", "b")
        self.seed("a")

    def report(self, learner_id: str, **more: Any) -> None:
        super().report(learner_id, step_time_s=1.0, **more)

    def rounds(self, count: int, *, b_is_late: bool = False) -> None:
        for _ in range(count):
            while self.state.round is None:
                self.advance(1.0)
                self.step("a", "b")
            asked = self.state.round.round
            self.contribute("a", asked)
            if b_is_late:
                self.advance(30.0)
            self.contribute("b", asked)
            self.advance()


def test_h_rises_where_contributions_come_late_and_falls_where_none_does() -> None:
    pair = Pair()
    policy = pair.shard.join_answer().policy
    pair.rounds(7 * ASKED)
    assert pair.shard.rounds.every.steps == EVERY_LEAST
    began = pair.steps["a"]
    pair.rounds(20)
    assert pair.steps["a"] - began <= 20 * EVERY_LEAST, "rounds are due by the new H"
    assert pair.shard.join_answer().policy == policy, "all shards tell learners the same, and each finds its own H"
    pair.rounds(2 * ASKED, b_is_late=True)
    assert pair.shard.rounds.every.steps > 10 * EVERY_LEAST


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
    while rig.now < began + NOTICE_S - 1.0:
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


def test_it_gets_another_one_where_it_lost_its_lease_before_it_contributed() -> None:
    rig = leaving("a", "b")
    rig.join("b")
    assert rig.contribute("a", 2, tokens=3 * TOKENS, steps=3).outcome is Outcome.ACCEPTED
    assert rig.state.version == 2
    rig.report("b", last_rounds=FRAGMENT_0)
    assert rig.state.round.missing == ["b"]
