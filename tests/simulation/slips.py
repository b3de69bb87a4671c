"""Slips that an engineer could have made: what drawn schedules alone must find, without one made for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutants import Mutant

from diloco_common.wire.messages import Outcome
from diloco_server.core import merge, outer
from diloco_server.core.cadence import GraceWindow
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Membership
from diloco_server.core.outer import Adam, Nesterov, Sgd
from diloco_server.core.parts import HalfContribution
from diloco_server.core.round import Contribution, Round
from diloco_server.core.rounds import Rounds
from diloco_server.core.versions import Versions
from diloco_server.shell.driver import EffectDriver
from diloco_server.shell.host import AwakeClock
from diloco_worker.core.connection import AndTell, AsTold, ConnectionState
from diloco_worker.core.council_log import CouncilLog
from diloco_worker.core.events import EventQueue
from diloco_worker.core.fragment import LearnerFragment, Pushes
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import ContributionTensors, FragmentTensors
from diloco_worker.shell.boundary import StepBoundary

# ------------------------------------------------------------ merging and stepping


def weigh_by_tokens_alone(original: Any) -> Any:
    """The steps that a contribution took are left out of its weight."""
    return property(lambda self: self.tokens * self.tokens)


def weigh_by_tokens_per_step(original: Any) -> Any:
    """Tokens are not squared."""
    return property(lambda self: self.tokens / self.steps)


def share_alike(original: Any) -> Any:
    """All contributions to a round weigh the same."""
    return lambda ordered, most: [1 / len(ordered)] * len(ordered)


def take_the_longest_radius(original: Any) -> Any:
    """RDA is as long as its longest contribution."""

    def weights(sources: Any, piece: Any, shares: Any, norms: Any, radius: float) -> Any:
        return original(sources, piece, shares, norms, max(norms))

    return weights


def fall_back_to_the_mean(original: Any) -> Any:
    """Directions are always taken to cancel."""
    return lambda *args: None


def add_up_norms_of_parts(original: Any) -> Any:
    """The norm of a contribution in parts is the sum of their squares, without the root."""
    return lambda self: tuple(self._squares)


def keep_no_momentum(original: Any) -> Any:
    """The momentum is used and not written back."""
    return lambda momentum, mu, gradient: momentum.float().mul_(mu).add_(gradient)


def step_along_the_momentum_alone(original: Any) -> Any:
    """Classic momentum where Nesterov's is asked for."""

    def step_merged(self: Nesterov, theta: Any, merged: Any, buffers: Any, outer_step: int) -> None:
        (b,) = buffers
        theta.add_(outer._moved(b, self.settings.momentum, merged.tensor()), alpha=-self.settings.lr)

    return step_merged


def correct_the_bias_a_step_late(original: Any) -> Any:
    """Adam takes its first step for its second."""
    return lambda self, theta, gradient, buffers, outer_step: original(self, theta, gradient, buffers, outer_step + 1)


def damp_the_gradient(original: Any) -> Any:
    """SGD multiplies the gradient with 1 - mu, as other libraries do."""

    def update(self: Sgd, theta: Any, gradient: Any, buffers: Any, outer_step: int) -> None:
        original(self, theta, gradient.mul_(1 - self.settings.momentum), buffers, outer_step)

    return update


def step_companions_as_the_model(original: Any) -> Any:
    """Companions are stepped by the outer optimizer, and not averaged."""
    return lambda self, fragment: self._of_model


# ------------------------------------------------------------ rounds and leases


def restart_the_grace_window(original: Any) -> Any:
    """Whenever a round is looked at, its grace begins anew."""

    def look(self: Round, quorum: Any, now: float) -> None:
        self.quorum_at = None
        original(self, quorum, now)

    return look


def never_ask_again(original: Any) -> Any:
    """A round without its quorum waits for those it has asked."""
    return lambda self, then: False


def ask_again_only_who_was_asked(original: Any) -> Any:
    """Who has come since the round opened is not asked for it."""

    def ask_again(self: FragmentState, live: Any, now: float) -> Any:
        assert self.round is not None
        return original(self, [m for m in live if m.learner_id in self.round.asked], now)

    return ask_again


def wait_for_the_refused(original: Any) -> Any:
    """A round waits for a learner whose contribution was refused."""
    return lambda self, learner_id, generation, whole=None: False


def keep_a_void_round(original: Any) -> Any:
    """A round that nobody can contribute to any more stays open."""
    return property(lambda self: False)


def fence_who_says_goodbye(original: Any) -> Any:
    """What a learner contributed before it left is dropped."""
    return lambda self, member: self.lose(member, "LEFT")


def lose_what_lost_its_quorum(original: Any) -> Any:
    """A round that falls below its quorum drops what it has."""

    def lose(self: Round, learner_id: str, quorum: Any) -> Any:
        fenced = original(self, learner_id, quorum)
        if self.quorum_at is None and fenced is not None:
            self.contributions.clear()
        return fenced

    return lose


def never_notice_a_freeze(original: Any) -> Any:
    """A shard that was frozen takes that time for its learners' silence."""
    return lambda self: self._clock()


def count_leases_from_the_join(original: Any) -> Any:
    """A report does not renew the lease."""

    def heard(self: Membership, member: Any, progress: Any, now: float) -> None:
        before = member.last_heard
        original(self, member, progress, now)
        member.last_heard = before

    return heard


def close_with_half_the_quorum(original: Any) -> Any:
    """The quorum is looked at before the last contribution is needed."""

    def look(self: Round, quorum: Any, now: float) -> None:
        original(self, quorum if quorum == "all" else max(1, quorum - 1), now)

    return look


def let_windows_grow(original: Any) -> Any:
    """The adaptive window is ten times as long."""
    return lambda self, step_time_s: 10 * original(self, step_time_s)


def count_one_contribution_less(original: Any) -> Any:
    """The first contribution of a round is left out of the merge."""

    def close_round(self: FragmentState, *args: Any) -> Round:
        closed = original(self, *args)
        if len(closed.contributions) > 1:
            del closed.contributions[min(closed.contributions)]
        return closed

    return close_round


def announce_under_the_name_before(original: Any) -> Any:
    """The record of a version keeps the merges of the one before."""

    def next_record(self: Versions, fragment_id: int) -> Any:
        record = original(self, fragment_id)
        return replace(record, merged_versions=dict(self.fragments[fragment_id].record.merged_versions))

    return next_record


# ------------------------------------------------------------ learners


def count_steps_from_the_start(original: Any) -> Any:
    """A contribution says that it holds all steps that its learner has taken."""

    def contribute(self: LearnerFragment, tokens: int, steps: int) -> Any:
        contribution = original(self, tokens, steps)
        contribution.steps = steps
        return contribution

    return contribute


def count_from_here_once_merged(original: Any) -> Any:
    """What was trained while a contribution was under way is not counted in the next one."""

    def carry(self: LearnerFragment, values: Any, version: int, epoch: int, **facts: Any) -> None:
        before = self._base_tokens
        original(self, values, version, epoch, **facts)
        if self._base_tokens != before:
            self._base_tokens += 1

    return carry


def leave_the_snapshot_where_it_was(original: Any) -> Any:
    """A version of an earlier round does not move what the contribution under way is counted from."""
    return lambda self, difference: None


def push_again_what_was_refused(original: Any) -> Any:
    """Only LATE ends a contribution; what was rejected is pushed on."""

    def ended(self: Pushes, lease: Any, answer: Any) -> None:
        original(self, lease, None if answer is not None and answer.outcome is Outcome.REJECTED else answer)

    return ended


def answer_whatever_was_asked_last(original: Any) -> Any:
    """The epoch that a round asks about is not compared with that of the anchor."""

    def contribute(self: LearnerCore) -> Any:
        for fragment in self.fragments.values():
            if fragment.asked is not None:
                fragment.asked = replace(fragment.asked, epoch=fragment.epoch)
        return original(self)

    return contribute


def drop_a_version_while_reading(original: Any) -> Any:
    """A version that comes while the fragment is read is forgotten."""
    return lambda self, event: None


def feed_back_twice(original: Any) -> Any:
    """After a version, the loss of a contribution that is under way is taken for that of the merged one."""

    def settle(self: FragmentTensors, values: Any, *, merged: bool) -> None:
        if self.contribution is not None and not merged:
            self._residual = self.contribution.loss
        original(self, values, merged=merged)

    return settle


def seed_what_is_held(original: Any) -> Any:
    """The hold before a seed begins anew with each join."""

    def hold_s(self: StepBoundary, fragment_id: int, epoch: int) -> float:
        self._empty_since.pop(fragment_id, None)
        return float(original(self, fragment_id, epoch))

    return hold_s


# ------------------------------------------------------------ islands


def keep_what_an_epoch_announced(original: Any) -> Any:
    """Followers go on pulling what the epoch before had announced."""

    def take_lease(self: ConnectionState, joined: Any) -> bool:
        announced = dict(self.to_pull.now)
        is_another = bool(original(self, joined))
        self.to_pull.now |= announced if isinstance(self.to_pull, AsTold) else {}
        return is_another

    return take_lease


def keep_pulls_of_the_epoch_before(original: Any) -> Any:
    """A shard's new epoch drops nothing that ranks were pulling."""
    return lambda self, joined: None


def forget_the_newer_version(original: Any) -> Any:
    """What was announced while a version was pulled is never pulled."""

    def drop(self: CouncilLog, fragment_id: int, **how: Any) -> None:
        self._newer.pop(fragment_id, None)
        original(self, fragment_id, **how)

    return drop


def hear_ends_of_any_epoch(original: Any) -> Any:
    """The end of a pull counts for whatever has that name."""

    def ended(self: AndTell, fragment_id: int, version: Any, **how: bool) -> None:
        self._said.setdefault(fragment_id, version)
        original(self, fragment_id, version, **how)

    return ended


def wait_for_all_but_one_rank(original: Any) -> Any:
    """A version is applied before the last rank has it."""

    def is_ready(self: CouncilLog, rank: int, word: Any) -> None:
        self.size -= 1
        original(self, rank, word)
        self.size += 1

    return is_ready


def say_versions_before_leases(original: Any) -> Any:
    """A word that does not fit into a frame is cut off."""

    def frame(self: CouncilLog, tokens: int | None) -> bytes:
        said = bytes(original(self, tokens))
        self._begun = bytearray()
        return said

    return frame


SLIPS: dict[str, Mutant] = {
    make.__name__: (owner, name, make)
    for owner, name, make in (
        (Contribution, "weight", weigh_by_tokens_alone),
        (Contribution, "weight", weigh_by_tokens_per_step),
        (merge, "shares_of", share_alike),
        (merge, "_rda_weights", take_the_longest_radius),
        (merge, "_rda_weights", fall_back_to_the_mean),
        (HalfContribution, "piece_norms", add_up_norms_of_parts),
        (outer, "_moved", keep_no_momentum),
        (Nesterov, "step_merged", step_along_the_momentum_alone),
        (Adam, "update", correct_the_bias_a_step_late),
        (Sgd, "update", damp_the_gradient),
        (EffectDriver, "making", step_companions_as_the_model),
        (Round, "look", restart_the_grace_window),
        (Round, "lacks_quorum_since", never_ask_again),
        (FragmentState, "ask_again", ask_again_only_who_was_asked),
        (Round, "refuse", wait_for_the_refused),
        (Round, "is_void", keep_a_void_round),
        (Rounds, "leave", fence_who_says_goodbye),
        (Round, "lose", lose_what_lost_its_quorum),
        (AwakeClock, "__call__", never_notice_a_freeze),
        (Membership, "heard", count_leases_from_the_join),
        (Round, "look", close_with_half_the_quorum),
        (GraceWindow, "seconds", let_windows_grow),
        (FragmentState, "close_round", count_one_contribution_less),
        (Versions, "next_record", announce_under_the_name_before),
        (LearnerFragment, "contribute", count_steps_from_the_start),
        (LearnerFragment, "carry", count_from_here_once_merged),
        (ContributionTensors, "move", leave_the_snapshot_where_it_was),
        (Pushes, "ended", push_again_what_was_refused),
        (LearnerCore, "contribute", answer_whatever_was_asked_last),
        (EventQueue, "put_back", drop_a_version_while_reading),
        (FragmentTensors, "_settle", feed_back_twice),
        (StepBoundary, "_hold_s", seed_what_is_held),
        (ConnectionState, "take_lease", keep_what_an_epoch_announced),
        (CouncilLog, "_joined", keep_pulls_of_the_epoch_before),
        (CouncilLog, "_drop", forget_the_newer_version),
        (AndTell, "ended", hear_ends_of_any_epoch),
        (CouncilLog, "_is_ready", wait_for_all_but_one_rank),
        (CouncilLog, "frame", say_versions_before_leases),
    )
}

KEPT: dict[str, tuple[str, str]] = {
    "weigh_by_tokens_alone": ("short:1", "no_healthy_work_is_cut"),
    "weigh_by_tokens_per_step": ("short:1", "no_healthy_work_is_cut"),
    "share_alike": ("short:1", "no_healthy_work_is_cut"),
    "take_the_longest_radius": ("short:4", "no_healthy_work_is_cut"),
    "fall_back_to_the_mean": ("short:4", "no_healthy_work_is_cut"),
    "add_up_norms_of_parts": ("short:38", "AssertionError"),
    "keep_no_momentum": ("short:1", "no_healthy_work_is_cut"),
    "step_along_the_momentum_alone": ("short:5", "no_healthy_work_is_cut"),
    "correct_the_bias_a_step_late": ("short:7", "no_healthy_work_is_cut"),
    "damp_the_gradient": ("short:1", "no_healthy_work_is_cut"),
    "step_companions_as_the_model": ("short:1", "no_healthy_work_is_cut"),
    "restart_the_grace_window": ("short:21", "no_round_stands_still"),
    "lose_what_lost_its_quorum": ("short:12", "accounting"),
    "count_leases_from_the_join": ("short:1", "well_again_after_faults"),
    "close_with_half_the_quorum": ("short:1", "rounds_wait_for_their_quorum"),
    "let_windows_grow": ("short:3", "windows_are_as_set"),
    "count_one_contribution_less": ("short:0", "accounting"),
    "announce_under_the_name_before": ("short:0", "double_counted"),
    "count_steps_from_the_start": ("short:0", "steps_fit_tokens"),
    "count_from_here_once_merged": ("short:0", "work_lost"),
    "leave_the_snapshot_where_it_was": ("short:7", "progress_is_kept"),
    "keep_pulls_of_the_epoch_before": ("short:5", "well_again_after_faults"),
    "wait_for_all_but_one_rank": ("short:3", "KeyError"),
}
"""The schedule that has found a slip, to be tried first, and what is broken there."""
MISSED: dict[str, str] = {
    "never_ask_again": "rare; test_rounds.py finds it",
    "ask_again_only_who_was_asked": "rare; no unit test of rounds or shards finds it",
    "wait_for_the_refused": "rare; test_rounds.py finds it",
    "keep_a_void_round": "rare: the round asks again after a lease; test_rounds.py finds it",
    "fence_who_says_goodbye": "few leave while their contribution waits; test_shard.py finds it",
    "never_notice_a_freeze": "a frozen shard hears what waited before it looks; test_awake_clock.py finds it",
    "push_again_what_was_refused": "in 6 to 30 schedules; unit tests were not tried",
    "answer_whatever_was_asked_last": "in 6 to 30 schedules; unit tests were not tried",
    "drop_a_version_while_reading": "in 6 to 30 schedules; unit tests were not tried",
    "feed_back_twice": "in 6 to 30 schedules; unit tests were not tried",
    "seed_what_is_held": "in 6 to 30 schedules; unit tests were not tried",
    "keep_what_an_epoch_announced": "in 6 to 30 schedules; unit tests were not tried",
    "forget_the_newer_version": "changes nothing: the leader says one version at a time",
    "hear_ends_of_any_epoch": "changes nothing: the log says no such end any more",
    "say_versions_before_leases": "needs hundreds of fragments",
}
"""Slips that no schedule has found, and why."""
