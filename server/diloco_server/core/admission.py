"""What becomes of a push, decided from its header and the fragment's state. Changes nothing.

In this order: a contribution to another line of versions is refused; one that the shard has already is a duplicate; a
copy of one that was not taken gets the same answer again; one to a round that is over, or not open, is late. For the
rest the guards decide whether the bytes are wanted.
"""

from __future__ import annotations

from diloco_common.errors import ContributionConflict, NotFinite, NotSeeded
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_common.settings import SyncSettings
from diloco_server.core import guards
from diloco_server.core.fragment import FragmentState
from diloco_server.core.parts import HalfContribution, is_part, whole_of

ACCEPTED = PushAnswer(Outcome.ACCEPTED)
DUPLICATE = PushAnswer(Outcome.DUPLICATE)
LATE = PushAnswer(Outcome.LATE)
PART = "PART"
HELD = PushAnswer(Outcome.ACCEPTED, PART)
"""The part is there, and others are missing: nothing was contributed yet."""


def by_header(
    header: PushHeader, state: FragmentState, learner_id: str, epoch: int, sync: SyncSettings, quiet_since: float
) -> PushAnswer | None:
    """The answer to a push; None if its bytes are wanted. Raises a Refusal.

    `quiet_since`: half a seed that has not grown since then gives way. To a whole one it always does.
    """
    guards.check_epoch(header, state, epoch)
    if header.is_seed:
        if state.seeded or state.computing:
            return DUPLICATE
        guards.check_sizes(header, state, guards.SEED_ENCODINGS)
        half_seed = state.half_seed_of(learner_id, quiet_since) if is_part(header) else None
        return _by_other_parts(header, None if half_seed is None else half_seed.parts)
    if not state.seeded:
        raise NotSeeded(f"fragment {header.fragment_id} has no version yet; seed it first")
    if is_taken(header, state, learner_id):
        return DUPLICATE
    if (answer := state.answered(learner_id, whole_of(header))) is not None:
        return answer
    if state.held(learner_id, header.round) is not None:
        raise ContributionConflict(
            f"fragment {header.fragment_id}: round {header.round} holds other bytes from this learner; "
            "a contribution cannot be changed"
        )
    if header.round <= state.version or (state.round is None and header.round == state.version + 1):
        return LATE
    guards.check_round(header, state, learner_id, sync.staleness_max)
    if header.not_finite:
        raise NotFinite(f"fragment {header.fragment_id}: {learner_id} says that its values are not finite")
    guards.check_sizes(header, state, (state.fragment.encoding(sync.push),))
    assert state.round is not None
    return _by_other_parts(header, state.round.halves.get(learner_id))


def _by_other_parts(header: PushHeader, half: HalfContribution | None) -> PushAnswer | None:
    """An empty part, and one that is there already, need no bytes. Raises ContributionConflict."""
    if not is_part(header):
        return None
    is_there = not header.ranges or (half is not None and half.has(header))
    return HELD if is_there else None


def is_taken(header: PushHeader, state: FragmentState, learner_id: str) -> bool:
    """Whether this very contribution is already in a round or in a version."""
    if header.is_seed:
        return False
    held = state.held(learner_id, header.round)
    if held is not None:
        return held.is_what(header)
    # Merged, or its learner has pushed for a later round since: then it knows the fate of this one.
    return state.may_hold(learner_id, header.round)
