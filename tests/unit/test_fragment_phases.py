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


def abandon_round(state: FragmentState) -> None:
    if state.collected is not None:
        state.collected.lose("ann", 1)
    state.abandon_round()


KEPT = Restored(replace(empty_record(0), epoch=1, version=5), VALUES, PUBLISHED, is_new_line=False)


def close_round(state: FragmentState) -> None:
    if state.collected is not None:
        state.collected.accept(make_contribution("ann", torch.ones(2)), 1, 0.0)
    state.close_round(Membership(LeaseSettings(), 1), 4, 0, 1.0)


TRANSITIONS: dict[str, tuple[Callable[[FragmentState], object], Phase, Phase]] = {
    "restore": (lambda state: state.restore(KEPT, 2), UNSEEDED, RESTING),
    "begin seed": (lambda state: state.begin_seed(1.0, 0), UNSEEDED, SEEDING),
    "fail seed": (FragmentState.fail_seed, SEEDING, UNSEEDED),
    "seed": (lambda state: state.seed(replace(state.record, epoch=1), VALUES, PUBLISHED), SEEDING, RESTING),
    "open": (lambda state: state.open_round(Asking.of([ANN], 0.0, 0.0), {}, 0.0), RESTING, COLLECTING),
    "abandon": (abandon_round, COLLECTING, RESTING),
    "close": (close_round, COLLECTING, MERGING),
    "advance": (lambda s: s.advance(replace(s.record, version=s.version + 1), PUBLISHED), MERGING, RESTING),
}
WAYS = {
    UNSEEDED: [],
    SEEDING: ["begin seed"],
    RESTING: ["begin seed", "seed"],
    COLLECTING: ["begin seed", "seed", "open"],
    MERGING: ["begin seed", "seed", "open", "close"],
}


def state_in(phase: Phase) -> FragmentState:
    state = FragmentState.unseeded(FRAGMENT, Phases())
    for transition in WAYS[phase]:
        TRANSITIONS[transition][0](state)
    assert state.phase is phase
    return state


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_transition_leaves_one_phase_for_another(transition: str, phase: Phase) -> None:
    go, begins, ends = TRANSITIONS[transition]
    state = state_in(phase)
    if phase is begins:
        go(state)
        assert state.phase is ends
    else:
        with pytest.raises(AssertionError):
            go(state)


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
