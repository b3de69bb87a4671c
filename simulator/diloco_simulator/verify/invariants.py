"""Checks that must hold in a schedule, besides the promises of `diloco_simulator.verify.judge`. Raise `Violation`.

Each function looks at the product's state at one moment. docs/simulation.md describes the promises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from diloco_common.errors import ContributionConflict
from diloco_server.core.fragment import FragmentState
from diloco_server.core.parts import PartedPayload
from diloco_server.core.round import LengthLimit, Quorum, Round, needed
from diloco_simulator.world.transport import encoded
from diloco_worker.core.agreement import REFUSALS_MAX

Name = tuple[int, int, int]
"""A version: fragment, epoch in which it was made, and number."""
Taken = tuple[int, int, int]
"""A contribution: the generation that pushed it, its tokens and its steps."""
TOLERANCE = 0.02
"""Values are small multiples of tokens: one that is lost or counted twice changes them by at least 1."""
ROUNDING = 1e-4
"""Allowed error of an element as a share of the largest value: a hostile learner can make values so large that float32
cannot represent a token beside them."""
BFLOAT16_ROUNDING = torch.finfo(torch.bfloat16).eps / 2
"""Allowed error of an element of a residual or snapshot, as a share of the element: both are kept as bfloat16."""
NORM_CAP = 2 + TOLERANCE
"""Longest move of a version, as a multiple of the longest honest norm: a radius may be twice the median."""


HEARD_STEPS = 4
"""Maximum number of steps from an answer until the learner has processed it."""
REFUSALS_A_FRAME = 2
"""Number of waiting refusals that a rank of an island passes to the other ranks per step."""


class Violation(Exception):
    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name = name


# ------------------------------------------------------------ a shard


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
    state: FragmentState, collecting: Round, quorum: Quorum, waited_s: float, at_most_s: float
) -> None:
    """P6: after its quorum, a round waits at most `at_most_s`, whoever is silent. `waited_s`: since the quorum."""
    there, enough = towards_its_quorum(collecting, quorum)
    if waited_s > at_most_s and there >= enough:
        raise Violation(
            "nobody_delays_a_round_beyond_its_grace",
            f"{_where(state)}: round {collecting.round} waits {waited_s:.2f} s for {collecting.missing}",
        )


def nobody_is_waited_for_again_and_again(state: FragmentState, learner_id: str, steps: int, at_least: int) -> None:
    """P6: an overdue learner holds up at most one round per `at_least` of its inner steps."""
    if steps < at_least:
        raise Violation(
            "nobody_is_waited_for_again_and_again",
            f"{_where(state)}: {learner_id} is waited for again after {steps} steps, not {at_least}",
        )


def no_round_stands_still(state: FragmentState, why: str, waited_s: float, at_most_s: float) -> None:
    """P6: a round that can go on does so. If nobody is expected any more, it closes or is given up. With its quorum, it
    closes after the grace window. Without it, others are asked after a lease. `waited_s`: since it could go on."""
    if waited_s > at_most_s:
        raise Violation("no_round_stands_still", f"{_where(state)}: {why} for {waited_s:.2f} s")


def rounds_wait_for_their_quorum(state: FragmentState, closed: Round, quorum: Quorum) -> None:
    """P12: below its quorum, a round closes only if nobody is expected any more. `quorum`: the setting."""
    there, enough = towards_its_quorum(closed, quorum)
    if closed.awaited and there + len(closed.refused) < enough:
        held = f"{there} of {enough} contributions"
        raise Violation("rounds_wait_for_their_quorum", f"{_where(state)}: closed with {held}, awaits {closed.missing}")


def towards_its_quorum(collecting: Round, quorum: Quorum) -> tuple[int, int]:
    """How many contributions count, and how many are needed. Those left out count only if the quorum is "all"."""
    left_out = collecting.beside if quorum != "all" else frozenset()
    asked = collecting.asked.keys() - left_out
    return len(collecting.contributions.keys() - left_out), max(1, needed(quorum, len(asked)))


def windows_are_as_set(grace_s: float, at_most_s: float) -> None:
    """P6: no grace window is longer than its setting, or than the formula's result for the slowest learner."""
    if grace_s > at_most_s + 1e-9:
        raise Violation("windows_are_as_set", f"{grace_s:.3f} s, at most {at_most_s:.3f} s")


def steps_fit_tokens(process: str, fragment_id: int, steps: int, tokens: int, tokens_max: int) -> None:
    """P12: a contribution is weighted by the steps that its tokens took, each of at least one token."""
    if not steps <= tokens <= tokens_max * steps:
        raise Violation("steps_fit_tokens", f"{process} fragment {fragment_id}: {tokens} tokens in {steps} steps")


def nobody_is_lost_to_a_freeze(learner_id: str, left_s: float, since_s: float) -> None:
    """P6: no lease ends because its shard was frozen, as a frozen shard hears nobody. `left_s`: the lease time that
    remained before the freeze; `since_s`: time since the thaw."""
    if since_s < left_s:
        raise Violation("nobody_is_lost_to_a_freeze", f"{learner_id} after {since_s:.2f} s, it had {left_s:.2f} s left")


def accepted_work_is_merged(
    fragment_id: int, accepted: Mapping[str, Taken], merged: Mapping[str, Taken], left_out: Collection[str]
) -> None:
    """P12: a version holds exactly the contributions accepted for it, unchanged, except for those whose generation is
    over or that are left out by name. The mappings give generation, tokens and steps of each learner."""
    expected = {learner_id: taken for learner_id, taken in accepted.items() if learner_id not in left_out}
    if expected != merged:
        raise Violation("accepted_work_is_merged", f"fragment {fragment_id}: {merged}, accepted were {expected}")


def no_healthy_work_is_cut(fragment_id: int, theta: Tensor, expected: Tensor, *, is_exact: bool) -> None:
    """P12: a version, and the outer optimizer's state, are what the published formulas give for its round, up to
    rounding. Both tensors are (num_elements,), float32 or bfloat16. `is_exact`: neither a cosine nor a root
    is computed. A cosine from float32 sums is less exact, the shorter one contribution is beside another."""
    rounding = (1e-5 if is_exact else 1e-4) if theta.dtype == torch.float32 else 2.0**-6
    if not torch.allclose(theta, expected, rtol=rounding, atol=rounding * float(expected.abs().max())):
        words = f"{theta.tolist()}, the formula gives {expected.tolist()}"
        raise Violation("no_healthy_work_is_cut", f"fragment {fragment_id}: {words}")


def nobody_healthy_is_left_out(learner_id: str, *, is_sick: bool) -> None:
    """P12: a member is left out only if its last contributions point away from what the others train by more than
    chance, or are the same noise again and again."""
    if not is_sick:
        raise Violation("nobody_healthy_is_left_out", learner_id)


def the_sick_are_left_out(learner_id: str, pointed: Sequence[float], *, is_out: bool) -> None:
    """P12: a member whose contributions point away is left out once there are enough of them for a mean. `pointed`:
    the cosines between them and what was trained."""
    if not is_out:
        raise Violation("the_sick_are_left_out", f"{learner_id} takes part: {[round(p, 2) for p in pointed]}")


def only_the_healed_take_part_again(learner_id: str, *, is_back: bool) -> None:
    """P12: a member that is left out takes part again only once its contributions have pointed the same way as the
    others' for long enough, or if fewer than two others are left."""
    if not is_back:
        raise Violation("only_the_healed_take_part_again", learner_id)


def the_healed_take_part_again(learner_id: str, *, is_back: bool) -> None:
    """P12: a member that is healed takes part again once it has sent enough contributions for a mean."""
    if not is_back:
        raise Violation("the_healed_take_part_again", learner_id)


def somebody_judges_those_left_out(fragment_id: int, left_out: Collection[str], judges: int) -> None:
    """P12: when a round opens, no learner is left out unless at least two others can judge it."""
    if left_out and judges < 2:
        raise Violation("somebody_judges_those_left_out", f"fragment {fragment_id}: {sorted(left_out)}, by {judges}")


def exactly_the_left_out_are_not_merged(
    fragment_id: int, left_out: Collection[str], *, at_least: set[str], at_most: set[str]
) -> None:
    """P12: no version holds work of a member that was left out when its round opened; each holds all other work.
    Learners whose status has changed since are in `at_most`, but not in `at_least`."""
    if not at_least <= set(left_out) <= at_most:
        words = f"{sorted(left_out)}, not {sorted(at_least)} to {sorted(at_most)}"
        raise Violation("exactly_the_left_out_are_not_merged", f"fragment {fragment_id}: {words}")


def lengths_are_bounded_by_the_round(
    fragment_id: int, learner_id: str, counts: float, norm: float, low: float, high: float
) -> None:
    """P12: a contribution counts with its full length, up to its limit, which lies between `low` and `high`."""
    if not min(norm, low) * (1 - 1e-9) <= counts <= min(norm, high) * (1 + 1e-9):
        words = f"{learner_id} counts {counts:.4g} of {norm:.4g}, the limit is {low:.4g} to {high:.4g}"
        raise Violation("lengths_are_bounded_by_the_round", f"fragment {fragment_id}: {words}")


def limits_follow_the_round(fragment_id: int, limit: LengthLimit | None, expected: LengthLimit | None) -> None:
    """P12: the limit for the next round is the second largest length in this one, or what is left of the last limit."""
    same = limit == expected or (
        limit is not None and expected is not None and limit.steps == expected.steps
        and abs(limit.length - expected.length) <= 1e-9 * expected.length
    )  # fmt: skip
    if not same:
        raise Violation("limits_follow_the_round", f"fragment {fragment_id}: {limit}, the formula gives {expected}")


def only_the_longest_is_cut(fragment_id: int, contributions: Sequence[tuple[float, int, float]]) -> None:
    """P12: of members' contributions to a round, only the longest for its steps is cut, and never below the second
    longest. A round of one or two is limited by earlier rounds. Each is given as norm, inner steps, and kept share."""
    if sum(norm > 0 for norm, _, _ in contributions) < 3:
        return
    for i, (norm, steps, kept) in enumerate(contributions):
        others = [other * max(1.0, steps / its) for j, (other, its, _) in enumerate(contributions) if j != i]
        if not norm * kept >= min(norm, max(others)) * (1 - 1e-9):
            raise Violation(
                "only_the_longest_is_cut", f"fragment {fragment_id}: {kept:.3g} of {norm:.3g}, beside {others}"
            )


def announced_versions_are_there(announced: Collection[Name], name: Name) -> None:
    """P2: a version is computed, and as durable as it ever will be, before anybody is told about it."""
    if name not in announced:
        raise Violation("announced_versions_are_there", f"version {name} is told of early")


def what_is_said_fits_the_wire(item: Any) -> None:
    """P10: every counter that a shard sends fits into its field."""
    try:
        encoded(item)
    except ValueError as error:
        raise Violation("what_is_said_fits_the_wire", f"{item}: {error}") from error


def rounds_follow_honest_steps(fragment_id: int, rounds: int, at_most: float) -> None:
    """P10: a fragment opens a round after H steps of some learner, and no learner is credited with impossible steps."""
    if rounds > at_most:
        raise Violation(
            "rounds_follow_honest_steps", f"fragment {fragment_id}: {rounds} rounds, at most {at_most:.1f} were due"
        )


def nobody_outweighs_a_round(fragment_id: int, weights: Sequence[tuple[str, float]]) -> None:
    """P10: no contribution weighs more than the median of its round. `weights`: learners and their weights."""
    cap = median_low(weight for _, weight in weights)
    for learner_id, weight in weights:
        if not weight <= cap * (1 + 1e-9):
            raise Violation(
                "nobody_outweighs_a_round",
                f"fragment {fragment_id}: {learner_id} weighs {weight:.3g}, the median is {cap:.3g}",
            )


def values_stay_finite(fragment_id: int, theta: Tensor) -> None:
    """P10: no version holds NaN or infinity."""
    if not bool(torch.isfinite(theta).all()):
        raise Violation("values_stay_finite", f"fragment {fragment_id}: {theta.tolist()}")


def a_minority_moves_nothing(fragment_id: int, after: Tensor, before: Tensor, at_most: float) -> None:
    """P10: if most contributions are honest, a version moves at most about twice as far as the longest honest one.

    `at_most`: the largest norm of an honest contribution.
    """
    moved = float(torch.linalg.vector_norm(after - before))
    if not moved <= NORM_CAP * at_most + TOLERANCE + ROUNDING * float(before.abs().max()):
        raise Violation("a_minority_moves_nothing", f"fragment {fragment_id}: by {moved:.3g}, not {at_most:.3g}")


def honest_pushes_find_a_place(process: str, fragment_id: int, busy_s: float, at_most_s: float) -> None:
    """P10: whatever others hold open, an honest push is not answered BUSY for long."""
    if busy_s > at_most_s:
        raise Violation(
            "honest_pushes_find_a_place", f"{process} fragment {fragment_id}: BUSY for {busy_s:.1f} s and longer"
        )


def lost_versions_are_noticed(fragment_id: int, damage: str, *, is_renamed: bool) -> None:
    """P3: if damage shows that a version is lost, the previous one gets a name of its own. A missing file leaves no
    trace: then the holders of its version notice."""
    if damage in ("rot", "truncate") and not is_renamed:
        raise Violation("lost_versions_are_noticed", f"fragment {fragment_id} ({damage}) comes back under its old name")


def damage_has_a_cause(words: str, *, was_hurt: bool) -> None:
    """A crash alone damages no version file, as a file gets its name only after it is durable."""
    if not was_hurt:
        raise Violation("damage_has_a_cause", f"{words}, and nobody did it")


# ------------------------------------------------------------ a learner, after each of its steps


def progress_is_kept(
    process: str, fragment_id: int, theta: Tensor, anchor: Tensor, unmerged: Tensor, largest: float
) -> None:
    """theta = anchor + everything that was trained and is not merged yet: nothing is lost or counted twice.

    `largest`, here and below: the largest magnitude of a value in the anchors of this process so far.
    """
    off = float((theta - anchor - unmerged).abs_().max())
    if not off <= TOLERANCE + ROUNDING * largest:
        raise Violation("progress_is_kept", f"{process} fragment {fragment_id}: off by {off:.3f}")


def contribution_is_what_was_trained(
    process: str, fragment_id: int, meant: Tensor, low: Tensor, high: Tensor, largest: float
) -> None:
    """A contribution is what was trained since the last merged one: at least up to the step boundary (`low`), at most
    up to when the snapshot was read (`high`). All are float32 [num_elements]."""
    trained = -meant
    off = float((torch.maximum(low - trained, trained - high) - BFLOAT16_ROUNDING * trained.abs()).max())
    if not off <= TOLERANCE + ROUNDING * largest:
        raise Violation("contribution_is_what_was_trained", f"{process} fragment {fragment_id}: off by {off:.3f}")


def error_feedback_is_whole(
    process: str, fragment_id: int, added: Tensor, lost: Tensor, lost_now: Tensor, largest: float
) -> None:  # fmt: skip
    """The last merged contribution lost `lost`, which was `added` to the next one. That one lost `lost_now`."""
    kept = BFLOAT16_ROUNDING * torch.maximum(lost.abs(), lost_now.abs())
    off = float(((added - lost).abs_() - kept).max())
    if not off <= TOLERANCE + ROUNDING * largest:
        raise Violation("error_feedback_is_whole", f"{process} fragment {fragment_id}: off by {off:.3f}")


def ranks_decide_alike(process: str, what: str, answers: Sequence[Any]) -> None:
    """P11: all ranks of an island reach the same decisions at the same step boundary."""
    if any(answer != answers[0] for answer in answers):
        raise Violation("ranks_decide_alike", f"{process}: {what}: {list(answers)}")


def halves_are_bounded(state: FragmentState, collecting: Round) -> None:
    """P11: half a contribution is incomplete, and belongs to a generation that was asked and is not over.

    Its learner may have been refused before. Then nobody waits for another contribution, but one may still come.
    """
    may_contribute = collecting.asked.keys() - collecting.lost - collecting.contributions.keys()
    for learner_id, half in collecting.halves.items():
        if learner_id not in may_contribute or half.is_complete:
            raise Violation("halves_are_bounded", f"{_where(state)}: holds parts of {learner_id}")


def contributions_are_whole(state: FragmentState, collecting: Round) -> None:
    """P11: if a contribution is accepted in parts, each element of the fragment is in exactly one part."""
    for learner_id, contribution in collecting.contributions.items():
        if isinstance(contribution.payload, PartedPayload):
            ranges = sorted(r for part in contribution.payload.parts for r in part.ranges)
            ends = [0, *(r.stop for r in ranges)]
            if ends != [*(r.start for r in ranges), state.fragment.num_elements]:
                raise Violation("contributions_are_whole", f"{_where(state)}: of {learner_id} it has only {ranges}")


def parts_belong_together(process: str, fragment_id: int, code: str) -> None:
    """P11: a shard combines parts of an island's ranks only if they were taken at the same boundary."""
    if code == ContributionConflict.code:
        raise Violation("parts_belong_together", f"{process} fragment {fragment_id}: {code}")


def checkpoints_count_what_they_hold(process: str, saved: tuple[int, int], taken: tuple[int, int]) -> None:
    """P5: a resumed learner's counts match its model. Both are inner steps and tokens."""
    if saved != taken:
        raise Violation("checkpoints_count_what_they_hold", f"{process}: {saved} of {taken}")


def refusals_are_heard(process: str, fragment_id: int, steps: int, waiting: int) -> None:
    """A refused contribution is not pushed again: its work goes into the next one within a few steps. `steps`: how many
    `process` has taken since it took the answer out of its inbox. `waiting`: refusals that this rank may have to pass
    on first; 0 outside an island."""
    if steps > HEARD_STEPS + waiting // REFUSALS_A_FRAME:
        raise Violation("refusals_are_heard", f"{process} fragment {fragment_id}: refused {steps} steps ago")


def steps_keep_their_pace(now: float, due: float) -> None:
    """P6: a learner's step ends when it is due, whatever the network does."""
    if abs(now - due) > 1e-9:
        raise Violation("steps_keep_their_pace", f"a step that was due at {due:.3f} ended at {now:.3f}")


def superseded_only_by_another(learner_id: str, code: str, processes: int, poisoned: int) -> None:
    """A learner gives up for good only if another process joined under its id, or if so many (`poisoned`) of its
    contributions were made to hold NaN that several rounds in a row may have refused them."""
    if code == "NOT_FINITE" and poisoned >= REFUSALS_MAX:
        return
    if code != "SUPERSEDED" or processes < 2:
        raise Violation(
            "superseded_only_by_another", f"{learner_id} gave up: {code}, {processes} process(es), {poisoned} with NaN"
        )


def _where(state: FragmentState) -> str:
    return f"fragment {state.fragment.fragment_id}"
