"""What must hold at every step, one function each. A breach raises `Violation` with the name of its function.

docs/simulation.md says in words what is promised, and what a shard that loses its memory may take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_common.codec import Payload
from diloco_server.core.cadence import Quorum, needed
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member, State
from diloco_server.core.rounds import Contribution
from diloco_simulator.arithmetic import Value
from diloco_simulator.truth import Origin, Truth
from diloco_worker.core.fragment import LearnerFragment, Pending

TOLERANCE = 0.02
"""Values are small multiples of tokens: one that is lost or counted twice moves them by at least 1."""


class Violation(Exception):
    """Something that must always hold did not."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name = name


# ------------------------------------------------------------ a round closes, a version is committed


def only_current_generations_are_merged(
    contributions: Sequence[Contribution], origins: Sequence[Origin], members: Mapping[str, Member | None], epoch: int
) -> None:
    """P4: nothing of an evicted or replaced generation, of another process, or of another epoch is merged."""
    for contribution, origin in zip(contributions, origins, strict=True):
        member = members[contribution.learner_id]
        current = member is not None and (
            member.generation == contribution.generation
            and member.instance == origin.instance
            and member.state is not State.EVICTED
        )
        if not current or origin.epoch != epoch or origin.learner_id != contribution.learner_id:
            raise Violation("only_current_generations_are_merged", f"{_name(origin)} merged in epoch {epoch}")


def contributions_are_merged_whole(contributions: Sequence[Contribution], origins: Sequence[Origin]) -> None:
    """Round, fragment and tokens stay with the bytes that they were taken with."""
    for c, o in zip(contributions, origins, strict=True):
        if (c.fragment_id, c.round, c.tokens) != (o.fragment_id, o.round, o.end - o.start):
            raise Violation("contributions_are_merged_whole", f"{_name(o)} came as {c}")


def merged_at_most_once(truth: Truth, origins: Sequence[Origin], *, gapless: bool) -> None:
    """P1: no contribution, and no token of a process, is in two versions of an epoch; with carry none is left out."""
    for origin in origins:
        before = truth.merged[origin.instance, origin.fragment_id, origin.epoch]
        if origin.merged:
            raise Violation("merged_at_most_once", f"{_name(origin)} is merged again")
        if not before:
            continue
        last = before[-1]
        if origin.start < last.end or (gapless and origin.start > last.end):
            raise Violation("merged_at_most_once", f"{_name(origin)} follows {_name(last)}")


def nothing_carried_is_merged(origins: Sequence[Origin]) -> None:
    """What a learner counts as not merged, and so puts into its next contribution, stays out."""
    for origin in origins:
        if origin.belief == "carried":
            raise Violation("nothing_carried_is_merged", f"{_name(origin)} is merged, its learner carried it")


def versions_grow_by_one(before: int, round_number: int, after: int) -> None:
    if not before + 1 == round_number == after:
        raise Violation("versions_grow_by_one", f"version {before}, round {round_number}, then version {after}")


# ------------------------------------------------------------ a shard, after anything happened


def rounds_make_the_next_version(state: FragmentState) -> None:
    if state.round is not None and state.round.round != state.version + 1:
        raise Violation(
            "rounds_make_the_next_version", f"{_where(state)}: round {state.round.round} at version {state.version}"
        )


def rounds_are_bounded(state: FragmentState, max_learners: int) -> None:
    """P7: a round holds at most one contribution of each learner that it asked."""
    if state.round is None:
        return
    held, asked = state.round.contributions, state.round.asked
    if not held.keys() <= asked.keys() or len(asked) > max_learners:
        raise Violation("rounds_are_bounded", f"{_where(state)}: holds {sorted(held)}, asked {sorted(asked)}")


def nobody_delays_a_round_beyond_its_grace(
    state: FragmentState, quorum: Quorum, now: float, grace_s: float, slack_s: float
) -> None:
    """P6: while it has its quorum, a round waits for the grace window and no longer, whoever is silent."""
    if state.round is None or state.round.quorum_at is None:
        return
    if len(state.round.contributions) >= max(1, needed(quorum, len(state.round.asked))):
        waited_s = now - state.round.quorum_at
        if waited_s > grace_s + slack_s:
            raise Violation(
                "nobody_delays_a_round_beyond_its_grace",
                f"{_where(state)}: round {state.round.round} waits {waited_s:.2f} s for {state.round.missing}",
            )


def announced_versions_are_there(truth: Truth, epoch: int, fragment_id: int, version: int) -> None:
    """P2: a version is computed before anybody is told of it, and never taken back."""
    if version not in truth.published[epoch, fragment_id]:
        raise Violation("announced_versions_are_there", f"fragment {fragment_id}: version {version} is announced early")
    if version < truth.announced.get((epoch, fragment_id), 0):
        raise Violation("announced_versions_are_there", f"fragment {fragment_id}: version {version} is announced late")
    truth.announced[epoch, fragment_id] = version


def served_versions_are_published(
    truth: Truth, epoch: int, fragment_id: int, version: int, payload: Payload, merged_version: int
) -> None:
    """P3: everybody gets the same bytes of a version."""
    announced_versions_are_there(truth, epoch, fragment_id, version)
    if truth.published[epoch, fragment_id][version].payload is not payload or merged_version > version:
        raise Violation("served_versions_are_published", f"fragment {fragment_id}: version {version} has other bytes")


# ------------------------------------------------------------ a learner, after each of its events


def belief_is_true(truth: Truth, origin: Origin) -> None:
    """Counted as merged: it was. Counted as carried: it was not, or the shard has lost its memory since."""
    if origin.belief == "merged" and not origin.merged:
        raise Violation("belief_is_true", f"{_name(origin)} is counted as merged, and is not")
    if origin.belief == "carried" and origin.merged:
        if truth.is_live(origin.epoch):
            raise Violation("belief_is_true", f"{_name(origin)} is counted as carried, and is merged")
        truth.counts["tokens counted again"] += origin.end - origin.start


def tokens_add_up(truth: Truth, instance: str, fragment: LearnerFragment, base: int, *, gapless: bool) -> None:
    """Trained = merged + not merged yet: the versions up to the anchor hold the tokens before `base`, and no others."""
    p, epoch = fragment.fragment.fragment_id, fragment.epoch
    merged = truth.merged.get((instance, p, epoch), [])
    reached = truth.entries[instance, p, epoch]
    for origin in merged:
        if origin.round <= fragment.version:
            if origin.start < reached or (gapless and origin.start > reached):
                raise Violation("tokens_add_up", f"{_name(origin)}, but tokens up to {reached} were merged before")
            reached = origin.end
        elif truth.is_live(epoch) and (fragment.pending is None or fragment.pending.round != origin.round):
            raise Violation("tokens_add_up", f"{_name(origin)} is merged, its learner has it no longer")
    if base < reached or (gapless and base > reached):
        raise Violation("tokens_add_up", f"{instance} fragment {p}: counts {base} tokens as merged, {reached} are")


def progress_is_kept(truth: Truth, theta: Value, fragment: LearnerFragment, pattern: Value, tokens: int) -> None:
    """theta = anchor + all that was trained and is not merged yet: nothing is lost, nothing is there twice."""
    assert fragment.anchor is not None
    compute = truth.arithmetic
    off = compute.distance(theta, compute.plus(fragment.anchor, pattern, tokens))
    if not off <= TOLERANCE:
        raise Violation(
            "progress_is_kept", f"fragment {fragment.fragment.fragment_id}: off by {off:.3f} at {tokens} tokens"
        )


def contribution_is_what_was_trained(truth: Truth, origin: Origin, pending: Pending, pattern: Value) -> None:
    """delta = -(what was trained since the last merged one) + what encoders lost until then: error feedback."""
    compute = truth.arithmetic
    residual = truth.residuals.get((origin.instance, origin.fragment_id))
    off = compute.distance(pending.delta(), compute.plus(residual, pattern, origin.start - origin.end))
    if not off <= TOLERANCE:
        raise Violation("contribution_is_what_was_trained", f"{_name(origin)} is off by {off:.3f}")


def anchors_are_published_values(truth: Truth, fragment: LearnerFragment) -> None:
    """P3: whoever holds a version holds the same values, bit for bit."""
    known = truth.published[fragment.epoch, fragment.fragment.fragment_id].get(fragment.version)
    if known is None or fragment.anchor is None or not truth.arithmetic.same(known.values, fragment.anchor):
        raise Violation(
            "anchors_are_published_values",
            f"fragment {fragment.fragment.fragment_id}: version {fragment.version} of epoch {fragment.epoch}",
        )


def anchors_grow(before: tuple[int, int], after: tuple[int, int], epochs: Sequence[int]) -> None:
    """(epoch, version) of an anchor: the version grows within an epoch, and no epoch comes back."""
    if before[0] == after[0]:
        ok = before[1] < after[1]
    else:
        ok = after[0] not in epochs
    if not ok:
        raise Violation("anchors_grow", f"(epoch, version) {before} is followed by {after}")


def inbox_is_bounded(held: int, fragments: int, shards: int) -> None:
    """P7 for learners: of each kind of event, one per fragment or shard."""
    if held > 3 * fragments + 2 * shards + 1:
        raise Violation("inbox_is_bounded", f"{held} events for {fragments} fragments and {shards} shards")


def steps_keep_their_pace(now: float, due: float) -> None:
    """P6: a learner's step begins when the step before it has ended, whatever the network does."""
    if abs(now - due) > 1e-9:
        raise Violation("steps_keep_their_pace", f"a step that was due at {due:.3f} ended at {now:.3f}")


def superseded_only_by_another(learner_id: str, code: str, processes: int) -> None:
    """A learner gives up for good only where another process has joined under its id."""
    if code != "SUPERSEDED" or processes < 2:
        raise Violation("superseded_only_by_another", f"{learner_id} gave up: {code}, {processes} process(es)")


def _where(state: FragmentState) -> str:
    return f"fragment {state.fragment.fragment_id}"


def _name(o: Origin) -> str:
    return f"{o.instance} fragment {o.fragment_id} round {o.round} epoch {o.epoch} tokens [{o.start}, {o.end})"
