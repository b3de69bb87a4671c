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

ACCEPTED = PushAnswer(Outcome.ACCEPTED)
DUPLICATE = PushAnswer(Outcome.DUPLICATE)
LATE = PushAnswer(Outcome.LATE)


def by_header(
    header: PushHeader, state: FragmentState, learner_id: str, epoch: int, sync: SyncSettings
) -> PushAnswer | None:
    """The answer to a push; None if its bytes are wanted. Raises a Refusal."""
    guards.check_epoch(header, state, epoch)
    if header.is_seed:
        if state.seeded or state.computing:
            return DUPLICATE
        guards.check_sizes(header, state, guards.SEED_ENCODINGS)
        return None
    if not state.seeded:
        raise NotSeeded(f"fragment {header.fragment_id} has no version yet; seed it first")
    if is_taken(header, state, learner_id):
        return DUPLICATE
    if state.held(learner_id, header.round) is not None:
        raise ContributionConflict(
            f"fragment {header.fragment_id}: round {header.round} holds other bytes from this learner; "
            "a contribution cannot be changed"
        )
    if (answer := state.answered(learner_id, header)) is not None:
        return answer
    if header.round <= state.version or (state.round is None and header.round == state.version + 1):
        return LATE
    guards.check_round(header, state, learner_id, sync.staleness_max)
    if header.not_finite:
        raise NotFinite(f"fragment {header.fragment_id}: {learner_id} says that its values are not finite")
    guards.check_sizes(header, state, (sync.push,))
    return None


def is_taken(header: PushHeader, state: FragmentState, learner_id: str) -> bool:
    """Whether this very contribution is already in a round or in a version."""
    if header.is_seed:
        return False
    held = state.held(learner_id, header.round)
    if held is not None:
        return held.is_what(header)
    # Merged, or its learner has pushed for a later round since: then it knows the fate of this one.
    return state.may_hold(learner_id, header.round)
