"""How long rounds wait once they have their quorum, and for which learners.

Once a round has its quorum, it stays open for a fixed or an adaptive time. Meanwhile no learner waits or loses work:
waiting only delays the next version. An adaptive round waits for every learner that is expected (`arrivals.py`), but at
most its patience beyond the usual learner:

    patience = max(PATIENCE * H, tau) * step_time + 4 * scatter, within H (or tau) steps

where scatter is the deviation of the usual learner's steps from their average: on a busy machine, or when steps are
reported in bursts, some take no time at all. From its quorum on, a round never waits longer than `LONGEST` times its
patience, nor longer than a minute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from diloco_common.settings import OVERLAP_STEPS, PATIENCE, SyncSettings
from diloco_common.wire.calls import LONG_S, NOTICE_S
from diloco_server.core.arrivals import Reports
from diloco_server.core.due import Measured, SyncInterval
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Influence
from diloco_server.core.membership import Member, Membership
from diloco_server.core.round import Quorum, Round
from diloco_server.core.versions import Versions

LONGEST = 2.5
"""After its quorum, a round waits at most this many times its patience: the usual learner may itself be late."""
SCATTER = 4.0
"""Mean deviations beyond the mean, as in TCP's retransmission timeout."""
OVERDUE = 2
"""A learner is overdue after this many times H steps without a merge."""
SLACK = 0.1
"""Tolerance for an overdue learner, as a share of one step."""


@dataclass
class MovingAverage:
    """Exponential moving average in seconds; the first value counts in full."""

    alpha: float = 0.1
    value: float | None = None

    def add(self, seconds: float) -> None:
        self.value = seconds if self.value is None else self.value + self.alpha * (seconds - self.value)


def adaptive_s(step_time_s: float, every: int, scatter_s: float) -> float:
    """How long a round stays open after its quorum, in seconds. `step_time_s`, `scatter_s`: medians of the live
    learners, so that a straggler does not prolong it. `every`: the current H."""
    patience_s = max(PATIENCE * every, OVERLAP_STEPS) * step_time_s + SCATTER * scatter_s
    return min(LONGEST * min(patience_s, max(every, OVERLAP_STEPS) * step_time_s), LONG_S)


class RoundPatience:
    def __init__(
        self, sync: SyncSettings, every: SyncInterval, influence: Influence, membership: Membership, versions: Versions
    ) -> None:
        self._open_s = MovingAverage()  # from opening a round to announcing its version
        self._publish_s = MovingAverage()  # from closing a round to announcing its version
        self._sync = sync
        self._every = every
        self._influence = influence
        self._membership = membership
        self._versions = versions

    def quorum(self, collecting: Round) -> Quorum:
        found = (
            self._membership.get(learner_id) for learner_id in collecting.asked if learner_id not in collecting.beside
        )
        return self._influence.quorum((m for m in found if m is not None), self._sync.quorum)

    def announced(self, closed: Round, now: float) -> None:
        """Measure a closed round that became a version."""
        self._publish_s.add(now - closed.closed_at)
        self._open_s.add(min(now - closed.opened_at, self.overdue_after_s))  # capped, because a standstill is not usual

    @property
    def overdue_after_s(self) -> float:
        """Age at which an open round is reported: ten times the usual, but at least 10 s; at first 60 s."""
        usual_s = self._open_s.value
        return 60.0 if usual_s is None else max(10 * usual_s, 10.0)

    def grace_s(self) -> float:
        """The current grace window in seconds, measured on learners that contribute; if none do, on all live ones."""
        if self._sync.grace != "adaptive":
            return self._sync.grace
        reports = self._usual_reports()
        return adaptive_s(
            _usual(r.step_time_s for r in reports), self._every.steps, _usual(r.scatter_s for r in reports)
        )

    def patience_s(self) -> float:
        """How much later than the usual learner another one may be."""
        return self.grace_s() / LONGEST

    def _setting_pace(self) -> list[Member]:
        return [m for m in self._membership.live() if m.sets_pace and not m.is_idle]

    def _usual_reports(self) -> list[Reports]:
        members = self._setting_pace() or self._membership.live()
        return [m.reports for m in members if m.reports is not None and m.reports.step_time_s > 0]

    def waits_until(self, state: FragmentState, grace_s: float, now: float) -> float:
        """Time until which an open round waits for missing learners, once it has its quorum."""
        collecting = state.round
        assert collecting is not None
        if collecting.quorum_at is None:
            return math.inf
        latest = collecting.quorum_at + grace_s
        if not collecting.last_of.isdisjoint(collecting.awaited):
            return max(latest, collecting.opened_at + NOTICE_S)
        if self._sync.grace != "adaptive":
            return latest
        patience_s = grace_s / LONGEST
        until = min(max(collecting.quorum_at, collecting.usual_at) + patience_s, latest)
        for learner_id in itertools.chain([collecting.awaited_last], collecting.awaited):
            member = self._membership.get(learner_id) if learner_id in collecting.awaited else None
            if member is None or member.is_idle:
                continue
            if member.arrivals.expected_at(state.last_request, state.fragment.num_elements) <= until:
                collecting.awaited_last = learner_id
                return until
        return max((self._overdue_until(state, i, patience_s, now) for i in collecting.awaited), default=now)

    def _overdue_until(self, state: FragmentState, learner_id: str, patience_s: float, now: float) -> float:
        """Time until which one round waits for a learner that has not been merged here for `OVERDUE` times its usual
        steps. Its step takes longer than rounds wait, so it might never contribute while one is open."""
        member, collecting = self._membership.get(learner_id), state.round
        if member is None or member.reports is None or collecting is None:
            return now
        fragment_id, reports = state.fragment.fragment_id, member.reports
        if reports.step_s <= patience_s:
            return now
        merged = reports.merged_until.get(fragment_id, reports.first).inner_step
        waits_in, waited = member.waited_for.get(fragment_id, (0, merged))
        expected_at = member.arrivals.expected_at(state.last_request, state.fragment.num_elements)
        slack_s = SLACK * reports.step_s
        if expected_at + slack_s > collecting.opened_at + min((1 + 2 * SLACK) * reports.step_s, LONG_S):
            return now
        if member.reported.inner_step - max(merged, waited) >= OVERDUE * self._every.steps_for(state.fragment):
            waits_in = collecting.round
            member.waited_for[fragment_id] = waits_in, member.reported.inner_step
        return expected_at + slack_s if waits_in == collecting.round else now

    def usual_at(self, state: FragmentState, collecting: Round) -> float:
        """When the median learner of those that this round asked is expected to have contributed."""
        found = {learner_id: self._membership.get(learner_id) for learner_id in collecting.asked}
        members = [m for i, m in found.items() if m is not None and m.generation == collecting.asked[i]]
        num_elements = state.fragment.num_elements
        return median_low(m.arrivals.expected_at(state.last_request, num_elements) for m in members)

    def measured(self) -> Measured:
        """The measurements that bound H. Fragments that are due less often weigh less."""
        manifest, found = self._versions.manifest, [m.arrivals for m in self._setting_pace()]
        assert manifest is not None
        own = sum(1 / s.fragment.traits.times(self._sync) for s in self._versions.fragments.values())
        elements = sum(f.num_elements / f.traits.times(self._sync) for f in manifest.fragments)
        pull_s = _usual(a.pull_s for a in found if a.pull_s is not None)
        return Measured(
            _usual(r.step_time_s for r in self._usual_reports()),
            push_s=elements * _usual(a.s_per_element for a in found if a.s_per_element > 0),
            pull_s=own * pull_s,
            shard_s=own * (self._publish_s.value or 0.0),
            round_s=(self._open_s.value or 0.0) + pull_s,
        )


def _usual(seconds: Iterable[float]) -> float:
    return median_low(found) if (found := [*seconds]) else 0.0
