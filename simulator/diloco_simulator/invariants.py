"""What must hold at every step, one function each. A breach raises `Violation` with the name of its function.

docs/simulation.md says in words what is promised, and what a shard that loses its memory may take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_common.codec import Payload
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.cadence import Quorum, needed
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member, State
from diloco_server.core.record import Record
from diloco_server.core.rounds import Contribution, Round
from diloco_simulator.arithmetic import Value
from diloco_simulator.truth import Name, Origin, Truth, Version
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
            and member.process_id == origin.process_id
            and member.state is not State.EVICTED
        )
        if not current or origin.epoch != epoch or origin.learner_id != contribution.learner_id:
            raise Violation("only_current_generations_are_merged", f"{_name(origin)} merged in epoch {epoch}")


def contributions_are_merged_whole(contributions: Sequence[Contribution], origins: Sequence[Origin]) -> None:
    """Round, fragment and tokens stay with the bytes that they were taken with."""
    for c, o in zip(contributions, origins, strict=True):
        if (c.fragment_id, c.round, c.tokens) != (o.fragment_id, o.round, o.end - o.start):
            raise Violation("contributions_are_merged_whole", f"{_name(o)} came as {c}")


def merged_at_most_once(truth: Truth, before: Version, origins: Sequence[Origin], *, gapless: bool) -> None:
    """P1: no contribution, and no token of a process, is in a version and one before; with carry none is left out."""
    for origin in origins:
        merged = before.merged.get(origin.process_id, ())
        entered, reached = truth.entries[origin.process_id, origin.fragment_id]
        if len(merged) > entered:
            reached = merged[-1].end
        if origin in merged:
            raise Violation("merged_at_most_once", f"{_name(origin)} is merged again")
        if origin.start < reached or (gapless and origin.start > reached):
            raise Violation("merged_at_most_once", f"{_name(origin)}, but tokens up to {reached} were merged before")


def nothing_carried_is_merged(origins: Sequence[Origin]) -> None:
    """What a learner counts as not merged, and so puts into its next contribution, stays out."""
    for origin in origins:
        if origin.belief == "carried":
            raise Violation("nothing_carried_is_merged", f"{_name(origin)} is merged, its learner carried it")


def versions_grow_by_one(before: int, round_number: int, after: int) -> None:
    if not before + 1 == round_number == after:
        raise Violation("versions_grow_by_one", f"version {before}, round {round_number}, then version {after}")


# ------------------------------------------------------------ a shard, after anything happened


def rounds_make_the_next_version(state: FragmentState, collecting: Round) -> None:
    if collecting.round != state.version + 1:
        raise Violation(
            "rounds_make_the_next_version", f"{_where(state)}: round {collecting.round} at version {state.version}"
        )


def rounds_are_bounded(state: FragmentState, collecting: Round, max_learners: int) -> None:
    """P7: a round holds at most one contribution of each learner that it asked."""
    held, asked = collecting.contributions, collecting.asked
    if not held.keys() <= asked.keys() or len(asked) > max_learners:
        raise Violation("rounds_are_bounded", f"{_where(state)}: holds {sorted(held)}, asked {sorted(asked)}")


def nobody_delays_a_round_beyond_its_grace(
    state: FragmentState, collecting: Round, quorum: Quorum, waited_s: float, grace_s: float
) -> None:
    """P6: while it has its quorum, a round waits for the grace window and no longer, whoever is silent.

    `waited_s`: since it had it first. `grace_s`: the window, and until somebody looks.
    """
    enough = max(1, needed(quorum, len(collecting.asked)))
    if waited_s > grace_s and len(collecting.contributions) >= enough:
        raise Violation(
            "nobody_delays_a_round_beyond_its_grace",
            f"{_where(state)}: round {collecting.round} waits {waited_s:.2f} s for {collecting.missing}",
        )


def announced_versions_are_there(truth: Truth, fragment_id: int, name: Name) -> None:
    """P2: a version is computed before anybody is told of it, and never taken back."""
    version, before = truth.versions.get((fragment_id, name)), truth.announced.get(fragment_id)
    if version is None:
        raise Violation("announced_versions_are_there", f"fragment {fragment_id}: version {name} is announced early")
    if before is not None and version is not before and not version.descends_from(before):
        words = f"fragment {fragment_id}: version {name} is announced after {before.name}"
        raise Violation("announced_versions_are_there", words)
    truth.announced[fragment_id] = version


def served_versions_are_published(
    truth: Truth, fragment_id: int, name: Name, payload: Payload, merged_version: int
) -> None:
    """P3: everybody gets the same bytes of a version."""
    announced_versions_are_there(truth, fragment_id, name)
    if truth.versions[fragment_id, name].payload is not payload or merged_version > name[1]:
        raise Violation("served_versions_are_published", f"fragment {fragment_id}: version {name} has other bytes")


# ------------------------------------------------------------ a shard begins another life


def damage_has_a_cause(damage: str, *, was_hurt: bool) -> None:
    """A crash alone damages no version file: none has its name before it is durable."""
    if damage and not was_hurt:
        raise Violation("damage_has_a_cause", f"{damage}, and nobody did it")


def recovered_versions_are_what_they_were(
    truth: Truth, known: Version | None, record: Record, values: Values, published: Published
) -> None:
    """P2: what comes back from the disk was computed, and is the same bit for bit: for the shard and for learners."""
    same, decoded = truth.arithmetic.same, truth.arithmetic.decoded
    if known is None or not same(known.theta, values.theta) or not same(known.values, decoded(published.values)):
        name = (record.epoch, record.version)
        words = f"fragment {record.fragment_id}: version {name} comes back as another one"
        raise Violation("recovered_versions_are_what_they_were", words)


def announced_versions_survive(
    announced: Version, back: Version | None, hurt: str, *, lasts: bool, renamed: bool
) -> None:
    """P2: only damage to the disk loses an announced version; it is noticed, and nothing else gets the version's name.

    A file that is gone may leave no trace on the disk. Then those notice that hold its version.
    """
    words = f"fragment {announced.fragment_id}: version {announced.name} was announced, "
    words += f"{back.name if back is not None else 'nothing'} came back (damage: {hurt or 'none'})"
    if lasts and not hurt:
        raise Violation("announced_versions_survive", words)
    if hurt in ("rot", "truncate") and not renamed:
        raise Violation("announced_versions_survive", f"{words}, under its old name")


def names_are_of_this_life(version: Version, name: Name, epoch: int) -> None:
    """A version that gets another name keeps its number, in the epoch of this life."""
    if name != (epoch, version.name[1]):
        raise Violation("names_are_of_this_life", f"version {version.name} is called {name} in epoch {epoch}")


def names_are_given_once(truth: Truth, fragment_id: int, name: Name) -> None:
    """P3: no two versions have the same epoch and number."""
    if (fragment_id, name) in truth.versions:
        raise Violation("names_are_given_once", f"fragment {fragment_id}: version {name} is made again")


# ------------------------------------------------------------ a learner, after each of its events


def belief_is_true(truth: Truth, origin: Origin, version: Version) -> None:
    """Counted as merged: it is in the version that the learner has. Counted as carried: it is in none that counts."""
    if origin.belief == "merged" and origin not in version.merged.get(origin.process_id, ()):
        raise Violation("belief_is_true", f"{_name(origin)} is counted as merged, and is not in {version.name}")
    head = truth.heads.get(origin.fragment_id)
    if origin.belief == "carried":
        if head is not None and origin in head.merged.get(origin.process_id, ()):
            raise Violation("belief_is_true", f"{_name(origin)} is counted as carried, and is in {head.name}")
        if origin.merged:
            truth.counts["tokens merged and lost"] += origin.end - origin.start


def tokens_add_up(truth: Truth, process_id: str, fragment: LearnerFragment, base: int, *, gapless: bool) -> None:
    """Trained = merged + not merged yet: the versions up to the anchor hold the tokens before `base`, and no others."""
    p = fragment.fragment.fragment_id
    version, head = truth.versions[p, (fragment.epoch, fragment.version)], truth.heads.get(p)
    merged = version.merged.get(process_id, ())
    entered, reached = truth.entries[process_id, p]
    for origin in merged[entered:]:
        if origin.start < reached or (gapless and origin.start > reached):
            raise Violation("tokens_add_up", f"{_name(origin)}, but tokens up to {reached} were merged before")
        reached = origin.end
    if head is not None and head is not version and head.descends_from(version):
        for origin in head.merged.get(process_id, ())[len(merged) :]:
            if fragment.pending is None or fragment.pending.round != origin.round:
                raise Violation("tokens_add_up", f"{_name(origin)} is merged, its learner has it no longer")
    if base < reached or (gapless and base > reached):
        raise Violation("tokens_add_up", f"{process_id} fragment {p}: counts {base} tokens as merged, {reached} are")


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
    residual = truth.residuals.get((origin.process_id, origin.fragment_id))
    off = compute.distance(pending.delta(), compute.plus(residual, pattern, origin.start - origin.end))
    if not off <= TOLERANCE:
        raise Violation("contribution_is_what_was_trained", f"{_name(origin)} is off by {off:.3f}")


def anchors_are_published_values(truth: Truth, fragment: LearnerFragment) -> None:
    """P3: whoever holds a version holds the same values, bit for bit."""
    name = (fragment.epoch, fragment.version)
    known = truth.versions.get((fragment.fragment.fragment_id, name))
    if known is None or fragment.anchor is None or not truth.arithmetic.same(known.values, fragment.anchor):
        raise Violation("anchors_are_published_values", f"fragment {fragment.fragment.fragment_id}: version {name}")


def anchors_grow(truth: Truth, before: Version, after: Version) -> None:
    """A learner's versions come one from the other, unless what it had is lost."""
    head = truth.heads.get(before.fragment_id)
    if not after.descends_from(before) and head is not None and head.descends_from(before):
        raise Violation("anchors_grow", f"version {before.name} is followed by {after.name}")


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
    return f"{o.process_id} fragment {o.fragment_id} round {o.round} epoch {o.epoch} tokens [{o.start}, {o.end})"
