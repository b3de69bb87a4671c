"""Which fragments are due: the table decides as looking at every learner one by one does."""

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
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import Progress
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.arrivals import Reports
from diloco_server.core.due import first_interval, is_due
from diloco_server.core.fragment import FragmentState, Phase, Restored
from diloco_server.core.ledger import RoundOpened
from diloco_server.core.membership import IDLE_ROUNDS, Member
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard


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
    never = state.rounds_opened == 0 and state.version == 0
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
        asked = {p: list(shard.fragments[p].call.expected) for p in opened}
        whom = {p: [members[i].arrivals for i in asks] for p, asks in found.items() if asks is not None}
        assert asked == whom


def member(learner_id: str, step: int, first: int | None = 0) -> Member:
    made = Member(learner_id, "p", 1, last_heard=0.0, last_step_at=0.0)
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
