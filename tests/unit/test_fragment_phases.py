"""The phases of a fragment: which transition leads where, and that each is impossible everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from builders import make_contribution
from diloco_common.codec import encode_payload
from diloco_common.settings import LeaseSettings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.fragment import Asking, FragmentState, Phase, Phases, Restored
from diloco_server.core.membership import Member, Membership
from diloco_server.core.record import empty_record

FRAGMENT = cut([TensorSpec("w", (2,))], 1, 1).fragments[0]
VALUES = Values(torch.zeros(2), [])
PUBLISHED = Published(encode_payload(torch.zeros(2), "float32"))
ANN = Member("ann", "process", 1, last_heard=0.0, last_step_at=0.0)

UNSEEDED, SEEDING, RESTING, COLLECTING, MERGING = Phase


def restore(state: FragmentState) -> None:
    state.restore(Restored(replace(empty_record(0), epoch=1, version=5), VALUES, PUBLISHED, is_new_line=False), 2)


def begin_seed(state: FragmentState) -> None:
    state.begin_seed(1.0, 0)


def fail_seed(state: FragmentState) -> None:
    state.fail_seed()


def seed(state: FragmentState) -> None:
    state.seed(replace(state.record, epoch=1), VALUES, PUBLISHED)


def open_round(state: FragmentState) -> None:
    state.open_round(Asking.of([ANN], 0.0, 0.0), {}, 0.0)


def abandon_round(state: FragmentState) -> None:
    if state.collected is not None:
        state.collected.lose("ann", 1)
    state.abandon_round()


def close_round(state: FragmentState) -> None:
    if state.collected is not None:
        state.collected.accept(make_contribution("ann", torch.ones(2)), 1, 0.0)
    state.close_round(Membership(LeaseSettings(), 1), 4, 0, 1.0)


def advance(state: FragmentState) -> None:
    state.advance(replace(state.record, version=state.version + 1), PUBLISHED)


TRANSITIONS: dict[Callable[[FragmentState], None], tuple[Phase, Phase]] = {
    restore: (UNSEEDED, RESTING),
    begin_seed: (UNSEEDED, SEEDING),
    fail_seed: (SEEDING, UNSEEDED),
    seed: (SEEDING, RESTING),
    open_round: (RESTING, COLLECTING),
    abandon_round: (COLLECTING, RESTING),
    close_round: (COLLECTING, MERGING),
    advance: (MERGING, RESTING),
}
WAYS = {
    UNSEEDED: [],
    SEEDING: [begin_seed],
    RESTING: [begin_seed, seed],
    COLLECTING: [begin_seed, seed, open_round],
    MERGING: [begin_seed, seed, open_round, close_round],
}


def state_in(phase: Phase) -> FragmentState:
    state = FragmentState.unseeded(FRAGMENT, Phases())
    for transition in WAYS[phase]:
        transition(state)
    assert state.phase is phase
    return state


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda t: t.__name__)
def test_a_transition_leaves_one_phase_for_another(transition: Callable[[FragmentState], None], phase: Phase) -> None:
    begins, ends = TRANSITIONS[transition]
    state = state_in(phase)
    if phase is begins:
        transition(state)
        assert state.phase is ends
    else:
        with pytest.raises(AssertionError):
            transition(state)


@pytest.mark.parametrize(
    ("phase", "seeded", "computing", "has_open_round", "has_closed_round"),
    [
        (UNSEEDED, False, False, False, False),
        (SEEDING, False, True, False, False),
        (RESTING, True, False, False, False),
        (COLLECTING, True, False, True, False),
        (MERGING, True, True, False, True),
    ],
)
def test_what_a_phase_implies(phase, seeded, computing, has_open_round, has_closed_round) -> None:
    state = state_in(phase)
    rounds = (state.round is not None, state.closed is not None)
    assert (state.seeded, state.computing, *rounds) == (seeded, computing, has_open_round, has_closed_round)
    assert (state.published is not None) is seeded


def test_a_version_that_does_not_follow_is_our_mistake() -> None:
    state = state_in(MERGING)
    with pytest.raises(AssertionError):
        state.advance(replace(state.record, version=state.version + 2), PUBLISHED)


def test_a_round_that_somebody_may_still_answer_is_not_abandoned() -> None:
    with pytest.raises(AssertionError):
        state_in(COLLECTING).abandon_round()
