"""P6: how long a round may wait once it has its quorum."""

from __future__ import annotations

from collections import defaultdict

from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import LAST_S, Member
from diloco_server.core.patience import LONGEST_S, OVERDUE, SLACK
from diloco_server.core.round import Round
from diloco_server.core.shard import Shard
from diloco_simulator.verify import invariants


class Waits:
    """The wait limits of one shard's rounds."""

    def __init__(self) -> None:
        self._grace_s = 0.0
        """The longest window so far."""
        self._step_s: dict[str, float] = defaultdict(float)
        """The longest step so far, by learner."""
        self._longest_s: dict[int, tuple[float, float]] = {}
        """Fragment -> when its round was opened, and how long it may wait."""
        self._overdue: dict[tuple[str, int], tuple[Member, int, int]] = {}
        """Learner and fragment -> the last round that waited for it while overdue, and its inner step then."""

    def of(self, shard: Shard, state: FragmentState, collecting: Round) -> float:
        """Longest wait in seconds: the grace window; for a last round, the time for its last work; for an overdue
        learner, until its next step ends. Raises Violation."""
        self._grace_s = max(self._grace_s, shard.rounds.patience.grace_s())
        waits_s = self._grace_s
        if collecting.last_of.intersection(collecting.missing):
            waits_s += LAST_S
        for learner_id in collecting.missing:
            member = shard.membership.get(learner_id)
            if member is not None and member.reports is not None:
                self._step_s[learner_id] = max(self._step_s[learner_id], member.reports.step_s)
                if self._is_overdue(shard, state, collecting, member):
                    waits_s = max(waits_s, min((1 + 2 * SLACK) * self._step_s[learner_id], LONGEST_S))
        fragment_id = state.fragment.fragment_id
        opened_at, longest_s = self._longest_s.get(fragment_id, (-1.0, 0.0))
        if opened_at == collecting.opened_at:
            waits_s = max(waits_s, longest_s)
        self._longest_s[fragment_id] = collecting.opened_at, waits_s
        return waits_s

    def _is_overdue(self, shard: Shard, state: FragmentState, collecting: Round, member: Member) -> bool:
        fragment, sync = state.fragment, shard.settings.sync
        waits_in, step = member.waited_for.get(fragment.fragment_id, (0, 0))
        if waits_in != collecting.round:
            return False
        before, in_round, since = self._overdue.get((member.learner_id, fragment.fragment_id), (None, 0, 0))
        if before is member and in_round != waits_in:
            at_least = OVERDUE * sync.first_every * fragment.traits.times(sync)
            invariants.nobody_is_waited_for_again_and_again(state, member.learner_id, step - since, at_least)
        self._overdue[member.learner_id, fragment.fragment_id] = member, waits_in, step
        return True
