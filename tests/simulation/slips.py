"""Slips that an engineer could have made: what drawn schedules alone must find, without one made for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from mutants import Mutant, breaks, replaced

from diloco_common.wire.messages import Outcome
from diloco_server.core import influence, merge, outer
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Influence, Told
from diloco_server.core.membership import Membership
from diloco_server.core.outer import Adam, Nesterov, Sgd
from diloco_server.core.parts import HalfContribution
from diloco_server.core.patience import RoundPatience
from diloco_server.core.round import Contribution, LengthLimit, Round
from diloco_server.core.rounds import Rounds
from diloco_server.core.versions import Versions
from diloco_server.shell import driver
from diloco_server.shell.driver import EffectDriver
from diloco_server.shell.host import AwakeClock
from diloco_worker.core.connection import AsTold, ConnectionState
from diloco_worker.core.council_log import CouncilLog
from diloco_worker.core.events import EventQueue
from diloco_worker.core.fragment import LearnerFragment, Pushes
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import ContributionTensors, FragmentTensors
from diloco_worker.shell.boundary import StepBoundary

SLIPS: dict[str, Mutant] = {}
KEPT: dict[str, tuple[str, str]] = {}
"""The schedule that has found a slip, to be tried first, and what is broken there."""
MISSED: dict[str, str] = {}
"""Slips that no schedule has found, and why."""


def slip(owner: Any, name: str, schedule: str = "", broken: str = "", *, missed: str = "") -> Callable[[Any], Any]:
    """As `breaks`, and what is known of it."""

    def add(act: Any) -> Any:
        if missed:
            MISSED[act.__name__] = missed
        else:
            KEPT[act.__name__] = schedule, broken
        return breaks(owner, name, SLIPS)(act)

    return add


# ------------------------------------------------------------ merging and stepping


@slip(Contribution, "weight", "short:1", "no_healthy_work_is_cut")
def weigh_by_tokens_alone(original: Any, self: Any) -> Any:
    """The steps that a contribution took are left out of its weight."""
    return self.tokens * self.tokens


@slip(Contribution, "weight", "short:1", "no_healthy_work_is_cut")
def weigh_by_tokens_per_step(original: Any, self: Any) -> Any:
    """Tokens are not squared."""
    return self.tokens / self.steps


@slip(merge, "shares_of", "short:1", "no_healthy_work_is_cut")
def share_alike(original: Any, ordered: Any) -> Any:
    """All contributions to a round weigh the same."""
    return [1 / len(ordered)] * len(ordered)


@slip(merge, "_rda_weights", "short:3", "no_healthy_work_is_cut")
def take_the_longest_radius(original: Any, sources: Any, piece: Any, shares: Any, norms: Any, kept: Any) -> Any:
    """RDA is as long as its longest contribution."""
    weights = original(sources, piece, shares, norms, kept)
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    return weights and [weight * max(norms) / radius for weight in weights]


@slip(merge, "_rda_weights", "short:3", "no_healthy_work_is_cut")
def fall_back_to_the_mean(original: Any, *args: Any) -> Any:
    """Directions are always taken to cancel."""
    return None


@slip(HalfContribution, "piece_norms", "short:38", "AssertionError")
def add_up_norms_of_parts(original: Any, self: Any) -> Any:
    """The norm of a contribution in parts is the sum of their squares, without the root."""
    return tuple(self._squares)


@slip(outer, "_moved", "short:1", "no_healthy_work_is_cut")
def keep_no_momentum(original: Any, momentum: Any, mu: Any, gradient: Any) -> Any:
    """The momentum is used and not written back."""
    return momentum.float().mul_(mu).add_(gradient)


@slip(Nesterov, "step_merged", "short:5", "no_healthy_work_is_cut")
def step_along_the_momentum_alone(
    original: Any, self: Any, theta: Any, merged: Any, buffers: Any, outer_step: int
) -> None:
    """Classic momentum where Nesterov's is asked for."""
    (b,) = buffers
    theta.add_(outer._moved(b, self.momentum, merged.tensor()), alpha=-self.settings.lr)


@slip(Adam, "update", "short:7", "no_healthy_work_is_cut")
def correct_the_bias_a_step_late(original: Any, self: Any, theta: Any, gradient: Any, buffers: Any, t: int) -> Any:
    """Adam takes its first step for its second."""
    return original(self, theta, gradient, buffers, t + 1)


@slip(Sgd, "update", "short:1", "no_healthy_work_is_cut")
def damp_the_gradient(original: Any, self: Sgd, theta: Any, gradient: Any, buffers: Any, outer_step: int) -> None:
    """SGD multiplies the gradient with 1 - mu, as other libraries do."""
    original(self, theta, gradient.mul_(1 - self.momentum), buffers, outer_step)


@slip(EffectDriver, "making", "short:1", "no_healthy_work_is_cut")
def step_companions_as_the_model(original: Any, self: Any, fragment: Any) -> Any:
    """Companions are stepped by the outer optimizer, and not averaged."""
    return self._of_model


# ------------------------------------------------------------ rounds and leases


@slip(Round, "look", "short:48", "no_round_stands_still")
def restart_the_grace_window(original: Any, self: Round, quorum: Any, now: float) -> None:
    """Whenever a round is looked at, its grace begins anew."""
    self.quorum_at = None
    original(self, quorum, now)


@slip(Round, "lacks_quorum_since", missed="rare; test_rounds.py finds it")
def never_ask_again(original: Any, self: Any, then: Any) -> Any:
    """A round without its quorum waits for those it has asked."""
    return False


@slip(FragmentState, "ask_again", missed="rare; no unit test of rounds or shards finds it")
def ask_again_only_who_was_asked(original: Any, self: FragmentState, live: Any, *how: Any) -> Any:
    """Who has come since the round opened is not asked for it."""
    assert self.round is not None
    return original(self, [m for m in live if m.learner_id in self.round.asked], *how)


@slip(Round, "refuse", missed="rare; test_rounds.py finds it")
def wait_for_the_refused(original: Any, self: Any, learner_id: Any, generation: Any, whole: Any = None) -> Any:
    """A round waits for a learner whose contribution was refused."""
    return False


@slip(Round, "is_void", missed="rare: the round asks again after a lease; test_rounds.py finds it")
def keep_a_void_round(original: Any, self: Any) -> Any:
    """A round that nobody can contribute to any more stays open."""
    return False


@slip(Rounds, "leave", missed="few leave while their contribution waits; test_shard.py finds it")
def fence_who_says_goodbye(original: Any, self: Any, member: Any) -> Any:
    """What a learner contributed before it left is dropped."""
    return self.lose(member, "LEFT")


@slip(Round, "lose", "short:12", "accounting")
def lose_what_lost_its_quorum(original: Any, self: Round, learner_id: str, quorum: Any) -> Any:
    """A round that falls below its quorum drops what it has."""
    fenced = original(self, learner_id, quorum)
    if self.quorum_at is None and fenced is not None:
        self.contributions.clear()
    return fenced


@slip(AwakeClock, "__call__", missed="a frozen shard hears what waited before it looks; test_awake_clock.py finds it")
def never_notice_a_freeze(original: Any, self: Any) -> Any:
    """A shard that was frozen takes that time for its learners' silence."""
    return self._clock()


@slip(Membership, "heard", "short:1", "well_again_after_faults")
def count_leases_from_the_join(original: Any, self: Membership, member: Any, progress: Any, now: float) -> None:
    """A report does not renew the lease."""
    before = member.last_heard
    original(self, member, progress, now)
    member.last_heard = before


@slip(Round, "look", "short:1", "rounds_wait_for_their_quorum")
def close_with_half_the_quorum(original: Any, self: Round, quorum: Any, now: float) -> None:
    """The quorum is looked at before the last contribution is needed."""
    original(self, quorum if quorum == "all" else max(1, quorum - 1), now)


@slip(RoundPatience, "grace_s", "short:3", "windows_are_as_set")
def let_windows_grow(original: Any, self: Any) -> Any:
    """The adaptive window is ten times as long."""
    return 10 * original(self)


@slip(FragmentState, "close_round", "short:0", "accounting")
def count_one_contribution_less(original: Any, self: FragmentState, *args: Any) -> Round:
    """The first contribution of a round is left out of the merge."""
    closed = original(self, *args)
    if len(closed.contributions) > 1:
        del closed.contributions[min(closed.contributions)]
    return closed


@slip(Versions, "next_record", "short:0", "double_counted")
def announce_under_the_name_before(original: Any, self: Versions, fragment_id: int) -> Any:
    """The record of a version keeps the merges of the one before."""
    record = original(self, fragment_id)
    return replace(record, merged_versions=dict(self.fragments[fragment_id].record.merged_versions))


# ------------------------------------------------------------ learners


@slip(LearnerFragment, "contribute", "short:0", "steps_fit_tokens")
def count_steps_from_the_start(original: Any, self: LearnerFragment, tokens: int, steps: int) -> Any:
    """A contribution says that it holds all steps that its learner has taken."""
    contribution = original(self, tokens, steps)
    contribution.steps = steps
    return contribution


@slip(LearnerFragment, "carry", "short:0", "work_lost")
def count_from_here_once_merged(original: Any, self: Any, *args: Any, **how: Any) -> None:
    """What was trained while a contribution was under way is not counted in the next one."""
    before = self._base_tokens
    original(self, *args, **how)
    if self._base_tokens != before:
        self._base_tokens += 1


@slip(ContributionTensors, "move", "short:0", "progress_is_kept")
def leave_the_snapshot_where_it_was(original: Any, self: Any, difference: Any) -> Any:
    """A version of an earlier round does not move what the contribution under way is counted from."""
    return None


@slip(Pushes, "ended", missed="in 6 to 30 schedules; unit tests were not tried")
def push_again_what_was_refused(original: Any, self: Pushes, lease: Any, answer: Any) -> None:
    """Only LATE ends a contribution; what was rejected is pushed on."""
    original(self, lease, None if answer is not None and answer.outcome is Outcome.REJECTED else answer)


@slip(LearnerCore, "contribute", missed="in 6 to 30 schedules; unit tests were not tried")
def answer_whatever_was_asked_last(original: Any, self: LearnerCore) -> Any:
    """The epoch that a round asks about is not compared with that of the anchor."""
    for fragment in self.fragments.values():
        if fragment.asked is not None:
            fragment.asked = replace(fragment.asked, epoch=fragment.epoch)
    return original(self)


@slip(EventQueue, "put_back", missed="in 6 to 30 schedules; unit tests were not tried")
def drop_a_version_while_reading(original: Any, self: Any, event: Any) -> Any:
    """A version that comes while the fragment is read is forgotten."""
    return None


@slip(FragmentTensors, "_settle", missed="in 6 to 30 schedules; unit tests were not tried")
def feed_back_twice(original: Any, self: FragmentTensors, values: Any, *, merged: bool) -> None:
    """After a version, the loss of a contribution that is under way is taken for that of the merged one."""
    if self.contribution is not None and not merged:
        self._residual = self.contribution.loss
    original(self, values, merged=merged)


@slip(StepBoundary, "_hold_s", missed="in 6 to 30 schedules; unit tests were not tried")
def seed_what_is_held(original: Any, self: StepBoundary, fragment_id: int, epoch: int) -> float:
    """The hold before a seed begins anew with each join."""
    self._empty_since.pop(fragment_id, None)
    return float(original(self, fragment_id, epoch))


# ------------------------------------------------------------ islands


@slip(ConnectionState, "take_lease", missed="in 6 to 30 schedules; unit tests were not tried")
def keep_what_an_epoch_announced(original: Any, self: ConnectionState, joined: Any) -> bool:
    """Followers go on pulling what the epoch before had announced."""
    announced = dict(self.to_pull.now)
    is_another = bool(original(self, joined))
    self.to_pull.now |= announced if isinstance(self.to_pull, AsTold) else {}
    return is_another


@slip(CouncilLog, "_joined", missed="rare: no schedule of 220 finds it since draws have changed; one of before did")
def keep_pulls_of_the_epoch_before(original: Any, self: Any, joined: Any) -> Any:
    """A shard's new epoch drops nothing that ranks were pulling."""
    return None


@slip(CouncilLog, "_is_ready", "short:3", "KeyError")
def wait_for_all_but_one_rank(original: Any, self: CouncilLog, rank: int, word: Any) -> None:
    """A version is applied before the last rank has it."""
    self.size -= 1
    original(self, rank, word)
    self.size += 1


@slip(CouncilLog, "frame", missed="needs hundreds of fragments")
def say_versions_before_leases(original: Any, self: CouncilLog, tokens: int | None) -> bytes:
    """A word that does not fit into a frame is cut off."""
    said = bytes(original(self, tokens))
    self._begun = bytearray()
    return said


# ------------------------------------------------------------ how much a contribution counts for


@slip(Influence, "_limits", "short:3", "only_the_longest_is_cut")
def bound_by_the_third_longest(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """A rank is off by one."""
    limits, after = original(self, taken, before, own)
    third = sorted(c.norm for c in taken)[-3:][0]
    return {learner_id: min(most, third) for learner_id, most in limits.items()}, after


@slip(Influence, "_limits", "short:3", "limits_follow_the_round")
def compare_lengths_of_any_steps(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """Lengths are compared as they come."""
    return original(self, [replace(c, steps=1) for c in taken], before, own)


@slip(Influence, "_limits", "sick:0", "limits_follow_the_round")
def forget_the_limit_of_before(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """Each round begins anew."""
    return original(self, taken, None, own)


@slip(Influence, "_limits", "short:3", "limits_follow_the_round")
def never_lower_a_limit(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """What was once allowed stays allowed."""
    limits, after = original(self, taken, before, own)
    return limits, after if before is None else max(before, after, key=lambda limit: limit.at(1000))


@slip(Influence, "_limits", "sick:0", "lengths_are_bounded_by_the_round")
def forget_for_how_much_each_counted(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """Only the limit of the fragment is remembered."""
    return original(self, taken, before, {})


@slip(Influence, "_limits", "sick:0", "lengths_are_bounded_by_the_round")
def cut_whoever_has_most_of_the_weight(original: Any, self: Any, taken: Any, before: Any, own: Any) -> Any:
    """A large machine beside small ones is cut to their length."""
    return original(self, [replace(c, weight_max=1.0) for c in taken], before, own)


@slip(Influence, "bound", "sick:44", "lengths_are_bounded_by_the_round")
def let_two_grow_without_end(original: Any, self: Any, fragment_id: int, taken: Any, before: Any) -> Any:
    """In a round of two, what counts is remembered in full."""
    bounded, after = original(self, fragment_id, taken, before)
    for c in bounded.values():
        if c.norm > 0:
            self._own[fragment_id][c.learner_id] = LengthLimit(c.kept * c.norm, c.steps)
    return bounded, after


@slip(Influence, "bound", "short:3", "accounting")
def count_no_tokens(original: Any, self: Any, fragment_id: int, taken: Any, before: Any) -> Any:
    """What counts of the tokens is forgotten."""
    bounded, after = original(self, fragment_id, taken, before)
    return {learner_id: replace(c, counted=0) for learner_id, c in bounded.items()}, after


@slip(Influence, "claimed", missed="a budget beside hostile learners was not tried; test_influence.py finds it")
def believe_what_strangers_have_trained(original: Any, self: Any, tokens: Any) -> Any:
    """A budget is nearly full as soon as one of them says so."""
    return sum(tokens)


@slip(Influence, "quorum", "short:1", "rounds_wait_for_their_quorum")
def one_is_a_quorum(original: Any, self: Any, asked: Any, quorum: Any) -> Any:
    """The setting is forgotten."""
    return quorum if quorum == "all" else 1


# ------------------------------------------------------------ who is left out


@slip(Told, "points_away", "sick:0", "nobody_healthy_is_left_out")
def judge_by_one_contribution(original: Any, self: Any, opposed: float) -> bool:
    """Chance is forgotten."""
    return bool(self.directions) and self.directions[-1].cosine < 0.5


@slip(Told, "points_away", "sick:1", "nobody_healthy_is_left_out")
def leave_out_whoever_points_away_a_little(original: Any, self: Any, opposed: float) -> Any:
    """Members are judged like strangers."""
    return original(self, 0.0)


@slip(influence, "_sure", missed="healthy work all points one way, so chance decides nothing")
def take_chance_for_proof(original: Any, values: Any) -> bool:
    """A mean above zero is enough."""
    return fmean(values) > 0


@slip(Influence, "hear", missed="18 learners with a flip take long; test_influence.py finds it")
def leave_out_among_many(original: Any, self: Any, taken: Any, directions: Any) -> Any:
    """However many there are, one that points away is left out."""
    with replaced(influence, "FEW", lambda few: len(taken)):
        return original(self, taken, directions)


@slip(Influence, "hear", "sick:51", "nobody_healthy_is_left_out")
def judge_whoever_sends_little(original: Any, self: Any, taken: Any, directions: Any) -> Any:
    """Contributions of any length are compared."""
    return original(self, [replace(c, kept=1 / c.norm) if c.norm > 0 else c for c in taken], directions)


@slip(driver, "directions", "sick:1", "nobody_healthy_is_left_out")
def count_each_among_the_others(original: Any, *args: Any, **how: Any) -> Any:
    """How much the others agree is taken from all."""
    found = original(*args, **how)
    return {i: replace(d, others=fmean(each.cosine for each in found.values())) for i, d in found.items()}


@slip(Influence, "_repeating", missed="the healthy repeat themselves, too; test_influence.py finds it")
def keep_whoever_repeats_itself(original: Any, self: Any, learners: Any) -> Any:
    """Only directions are looked at."""
    return set()


@slip(Round, "parted", "sick:2", "exactly_the_left_out_are_not_merged")
def merge_whoever_is_left_out(original: Any, self: Round) -> Any:
    """The verdict is passed, and has no effect."""
    return [self.contributions[i] for i in sorted(self.contributions)], []


@slip(Rounds, "_open_some", "sick:6", "well_again_after_faults")
def ask_nobody_who_is_left_out(original: Any, self: Any, due: Any, live: Any, now: float) -> None:
    """Whoever is left out is never heard again."""
    original(self, due, self._influence.merging(live), now)


@slip(Versions, "next_record", "sick:2", "double_counted")
def tell_the_left_out_that_nothing_was_merged(original: Any, self: Versions, fragment_id: int) -> Any:
    """Whoever is left out carries its work, and sends more and more of it."""
    record, state = original(self, fragment_id), self.fragments[fragment_id]
    assert state.closed is not None
    left_out, before = {c.learner_id for c in state.closed.parted()[1]}, state.record.merged_versions
    merged = {i: number for i, number in record.merged_versions.items() if i not in left_out}
    return replace(record, merged_versions=merged | {i: before[i] for i in left_out & before.keys()})


@slip(Influence, "merging", "sick:997", "somebody_judges_those_left_out")
def wait_for_those_left_out(original: Any, self: Any, live: Any) -> Any:
    """Rounds are opened and closed for them."""
    return [*live]


@slip(Influence, "unjudged", "sick:997", "somebody_judges_those_left_out")
def never_take_back(original: Any, self: Any, live: Any) -> Any:
    """Whoever nobody can judge any more stays out."""
    return ()


@slip(Told, "is_back", "sick:2", "the_healed_take_part_again")
def leave_out_for_ever(original: Any, self: Any, opposed: float) -> bool:
    """Whoever was left out once stays out."""
    return False


@slip(Told, "is_back", "sick:2", "the_healed_take_part_again")
def take_back_the_sick(original: Any, self: Any, opposed: float) -> bool:
    """A sign is off."""
    return self.is_full and fmean(self._against(opposed)) > 0


@slip(Influence, "_listen_anew", "sick:2", "only_the_healed_take_part_again")
def remember_what_was_said_before(original: Any, self: Any) -> None:
    """What was compared with other learners is compared on."""


@slip(Influence, "begin", "sick:510", "lengths_are_bounded_by_the_round")
def blame_another_process(original: Any, self: Any, learner_id: str) -> None:
    """Whoever was left out is so under its id, whatever speaks for it now."""
