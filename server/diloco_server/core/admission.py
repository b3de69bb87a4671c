"""Decides on a push from its header and the fragment's state. Changes nothing.

In this order: a contribution to versions that this shard does not continue is refused; one that the shard already has
is a duplicate; a copy of one that was not taken gets the same answer again; one to a round that is over, or not open,
is late. For all others, checks decide whether the bytes are wanted; each check raises a `Refusal` that says what to do.

All checks of a push, in order: identity and run (the shell), lease and generation (membership.py), manifest, epoch,
round and sizes from the header (here), sizes, checksum and decoder limits of the bytes (codec), finite values
(taking.py). Nothing else is refused; `influence.py` decides how much a contribution counts.
"""

from __future__ import annotations

from collections.abc import Collection

from diloco_common.codec import check_header
from diloco_common.errors import (
    Busy,
    ContributionConflict,
    ManifestMismatch,
    NotFinite,
    NotSeeded,
    TooStale,
    WrongEpoch,
    WrongRound,
)
from diloco_common.settings import SyncSettings
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Outcome, PushAnswer, PushHeader
from diloco_server.core.fragment import FragmentState
from diloco_server.core.parts import HalfContribution, check_ranges, is_part, whole_of

SEED_ENCODINGS = ("float32", "bfloat16")
ACCEPTED = PushAnswer(Outcome.ACCEPTED)
DUPLICATE = PushAnswer(Outcome.DUPLICATE)
LATE = PushAnswer(Outcome.LATE)
PART = "PART"
HELD = PushAnswer(Outcome.ACCEPTED, PART)
"""The part was received, but others are missing: the contribution is not complete yet."""


def by_header(
    header: PushHeader, state: FragmentState, learner_id: str, epoch: int, sync: SyncSettings, quiet_since: float
) -> PushAnswer | None:
    """The answer to a push; None if its bytes are wanted. Raises a Refusal.

    `quiet_since`: an incomplete seed without a new part since then gives way. It always gives way to a whole seed.
    """
    check_epoch(header, state, epoch)
    if header.is_seed:
        if (state.seeded or state.computing) and learner_id not in state.may_bring:
            return DUPLICATE
        if state.computing:
            raise Busy(f"fragment {header.fragment_id}: a version is being made; send your values in a moment")
        check_sizes(header, state, SEED_ENCODINGS)
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
    check_round(header, state, learner_id, sync.staleness_max)
    if header.not_finite:
        raise NotFinite(f"fragment {header.fragment_id}: {learner_id} says that its values are not finite")
    check_sizes(header, state, (state.fragment.encoding(sync.push),))
    assert state.round is not None
    return _by_other_parts(header, state.round.halves.get(learner_id))


def _by_other_parts(header: PushHeader, half: HalfContribution | None) -> PushAnswer | None:
    """HELD for a part that is empty or already received: its bytes are not needed. Raises ContributionConflict."""
    if not is_part(header):
        return None
    is_there = not header.ranges or (half is not None and half.has(header))
    return HELD if is_there else None


def is_taken(header: PushHeader, state: FragmentState, learner_id: str) -> bool:
    """Whether this exact contribution is already in a round or a version."""
    if header.is_seed:
        return False
    held = state.held(learner_id, header.round)
    if held is not None:
        return held.is_what(header)
    # It was merged, or its learner has since pushed for a later round, and so knows the answer to this one.
    return state.may_hold(learner_id, header.round)


# ------------------------------------------------------------------ the checks


def check_origin(header: PushHeader, manifest: Manifest) -> None:
    """Check that the contribution is for this model. Raises ManifestMismatch."""
    if header.manifest_digest != manifest.digest:
        raise ManifestMismatch(
            f"manifest {header.manifest_digest[:12]!r} is not this run's {manifest.digest[:12]!r}; join again"
        )


def is_in_line(header: PushHeader, state: FragmentState, epoch: int) -> bool:
    """Whether the fragment's latest version is the base version or was made from it.

    A lost version never is: its number was used again, in another epoch.
    """
    if header.is_seed or not state.seeded:
        return header.epoch == epoch
    if header.epoch == state.epoch:
        return True
    return state.recovered is not None and (
        header.epoch == state.recovered.epoch and header.base_version <= state.recovered.version
    )


def check_epoch(header: PushHeader, state: FragmentState, epoch: int) -> None:
    """Raises WrongEpoch if the latest version was not made from the contribution's base version."""
    if not is_in_line(header, state, epoch):
        raise WrongEpoch(
            f"fragment {header.fragment_id}: version {header.base_version} of epoch {header.epoch} is over; "
            f"version {state.version} of epoch {state.epoch or epoch} was not made from it; pull first"
        )


def check_round(header: PushHeader, state: FragmentState, learner_id: str, staleness_max: int) -> None:
    """Check that the round is open, asked this learner, and fits the base version. Raises WrongRound or TooStale."""
    where = f"fragment {header.fragment_id}"
    if header.steps < 1 or header.tokens < 1:
        raise WrongRound(
            f"{where}: a contribution takes at least 1 step and 1 token, got {header.steps} and {header.tokens}"
        )
    if state.round is None or header.round != state.round.round:
        raise WrongRound(f"{where}: round {header.round} is not open (latest version {state.version})")
    if learner_id not in state.round.asked or learner_id in state.round.lost:
        raise WrongRound(f"{where}: round {header.round} did not ask {learner_id}")
    if header.base_version > state.version:
        raise WrongRound(f"{where}: base version {header.base_version} does not exist yet, latest is {state.version}")
    if state.version - header.base_version > staleness_max:
        raise TooStale(
            f"{where}: base version {header.base_version} is {state.version - header.base_version} versions old, "
            f"at most {staleness_max} are merged (sync.staleness_max); pull first"
        )


def check_sizes(header: PushHeader, state: FragmentState, encodings: Collection[str]) -> None:
    """Check the announced sizes against fragment, ranges and encoding. Raises BadPayload or UnknownEncoding."""
    num_elements = state.fragment.num_elements
    if is_part(header) or header.ranges:
        num_elements = check_ranges(header, num_elements)
        if not header.ranges:
            return
    check_header(header.payload, num_elements, encodings)
