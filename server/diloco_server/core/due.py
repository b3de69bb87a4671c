"""Which fragments of a shard are due. The cadence rule decides for the model; companions may be due more rarely.

Out of turn, a fragment is due where a learner leaves that has trained since it contributed last.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_common.manifest import Fragment, Kind
from diloco_common.settings import SyncSettings
from diloco_server.core.cadence import CadenceRule, Quorum, Rest, interval, is_due
from diloco_server.core.fragment import FragmentState, Phase
from diloco_server.core.membership import Member
from diloco_server.core.versions import Versions


class DueFragments:
    """Decided anew only where something has changed: most ticks find all as the last one did."""

    def __init__(self, sync: SyncSettings, rule: CadenceRule, versions: Versions) -> None:
        self._sync = sync
        self._rule = rule
        self._versions = versions
        self._found: object = None  # what `among` last decided by

    def among(self, live: Sequence[Member], quorum: Quorum) -> set[int]:
        """The fragments that have become due for these learners: so many of them, at least, have taken the steps."""
        fragments = self._versions.fragments
        # Whether a fragment is due follows from these, not from the time.
        found = (
            [(m.generation, m.first_step, m.counted, m.progress.last_rounds) for m in live],
            [(s.phase, s.version, s.rounds_opened) for s in fragments.values()],
            quorum,
        )
        if found == self._found:
            return set()
        due = {fragment_id for fragment_id, state in fragments.items() if self._is_due(state, live, quorum)}
        self._found = found
        return due

    def usual_steps(self, fragment: Fragment) -> int:
        """Inner steps between two rounds of a fragment, as the settings have it."""
        return self._sync.sync_every * self._times(fragment)

    def _is_due(self, state: FragmentState, live: Sequence[Member], quorum: Quorum) -> bool:
        versions, fragment = self._versions, state.fragment
        if state.phase is not Phase.RESTING or versions.is_final(state):
            return False
        assert versions.manifest is not None
        number, total = versions.manifest.place(fragment)
        rest = Rest(number, total, state.version, versions.budget.fraction(state), self._sync.sync_every)
        never = state.rounds_opened == 0 and state.version == 0
        steps = interval(self._rule, rest, never=never, times=self._times(fragment))
        there = [m for m in live if m.takes_part(fragment.fragment_id)]
        if not fragment.companion:
            if any(m.wants_last(fragment.fragment_id) for m in there):
                return True
            if versions.budget.rest_is_trained(state, there):
                return True
        return is_due(there, state.base_steps, steps, quorum)

    def _times(self, fragment: Fragment) -> int:
        """H of a fragment, in those of the settings."""
        every: dict[Kind, int] = {"momentum": self._sync.companions_every, "buffer": self._sync.buffers_every}
        return every.get(fragment.kind, 1)
