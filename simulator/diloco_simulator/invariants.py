"""What must hold in a schedule, beside the promises of `diloco_common.judge`. A breach raises `Violation`.

Each function reads what the product has, at one moment. docs/simulation.md says in words what is promised.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from diloco_server.core.cadence import Quorum, needed
from diloco_server.core.fragment import FragmentState
from diloco_server.core.round import Round

Name = tuple[int, int, int]
"""Of a version: fragment, the epoch that it was made in, and its number."""
TOLERANCE = 0.02
"""Values are small multiples of tokens: one that is lost or counted twice moves them by at least 1."""


class Violation(Exception):
    """Something that must always hold did not."""

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


def announced_versions_are_there(announced: Collection[Name], name: Name) -> None:
    """P2: a version is computed, and as durable as it will be, before anybody is told of it."""
    if name not in announced:
        raise Violation("announced_versions_are_there", f"version {name} is told of early")


def lost_versions_are_noticed(fragment_id: int, damage: str, *, is_renamed: bool) -> None:
    """P3: where damage shows that a version is lost, the one before it gets a name of its own. A file that is gone
    leaves no trace: then those notice that hold its version."""
    if damage in ("rot", "truncate") and not is_renamed:
        raise Violation("lost_versions_are_noticed", f"fragment {fragment_id} ({damage}) comes back under its old name")


def damage_has_a_cause(words: str, *, was_hurt: bool) -> None:
    """A crash alone damages no version file: none has its name before it is durable."""
    if not was_hurt:
        raise Violation("damage_has_a_cause", f"{words}, and nobody did it")


# ------------------------------------------------------------ a learner, after each of its steps


def progress_is_kept(process: str, fragment_id: int, theta: Tensor, anchor: Tensor, unmerged: Tensor) -> None:
    """theta = anchor + all that was trained and is not merged yet: nothing is lost, nothing is there twice."""
    off = float((theta - anchor - unmerged).abs_().max())
    if not off <= TOLERANCE:
        raise Violation("progress_is_kept", f"{process} fragment {fragment_id}: off by {off:.3f}")


def contribution_is_what_was_trained(process: str, fragment_id: int, meant: Tensor, low: Tensor, high: Tensor) -> None:
    """What is sent is what was trained since the last merged contribution: at least until the step boundary (`low`), at
    most until the snapshot was read (`high`). All are float32 [num_elements]."""
    trained = -meant
    off = float(torch.maximum(low - trained, trained - high).max())
    if not off <= TOLERANCE:
        raise Violation("contribution_is_what_was_trained", f"{process} fragment {fragment_id}: off by {off:.3f}")


def error_feedback_is_whole(process: str, fragment_id: int, residual: Tensor, lost: Tensor) -> None:
    """What encoders lost of the contribution merged last is in the next one."""
    off = float((residual - lost).abs_().max())
    if not off <= TOLERANCE:
        raise Violation("error_feedback_is_whole", f"{process} fragment {fragment_id}: off by {off:.3f}")


def steps_keep_their_pace(now: float, due: float) -> None:
    """P6: a learner's step ends when it is due, whatever the network does."""
    if abs(now - due) > 1e-9:
        raise Violation("steps_keep_their_pace", f"a step that was due at {due:.3f} ended at {now:.3f}")


def superseded_only_by_another(learner_id: str, code: str, processes: int) -> None:
    """A learner gives up for good only where another process has joined under its id."""
    if code != "SUPERSEDED" or processes < 2:
        raise Violation("superseded_only_by_another", f"{learner_id} gave up: {code}, {processes} process(es)")


def _where(state: FragmentState) -> str:
    return f"fragment {state.fragment.fragment_id}"
