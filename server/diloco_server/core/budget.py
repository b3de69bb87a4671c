"""The token budget: the run ends once every fragment has merged so many tokens, whoever is alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member
from diloco_server.core.trust.trail import STEPS_FACTOR


@dataclass(frozen=True, slots=True)
class Budget:
    """What each fragment is to merge."""

    tokens: int
    """0: the run has no end."""

    def believed(self, tokens_merged: int) -> int:
        """Of what a seed says was merged before. No more than there are; a run may have gone a little beyond."""
        return min(tokens_merged, self.tokens) if self.tokens > 0 else tokens_merged

    def fraction(self, state: FragmentState) -> float:
        """Of the budget, merged into this fragment; 0 in a run without end."""
        return min(1.0, state.tokens_merged / self.tokens) if self.tokens > 0 else 0.0

    def is_reached(self, state: FragmentState) -> bool:
        """Whether the fragment has merged all the tokens that the run asks for."""
        return 0 < self.tokens <= state.tokens_merged

    def rest_is_trained(self, state: FragmentState, live: Iterable[Member]) -> bool:
        """Whether what learners trained since the last round fills the budget. Then nobody waits for H steps."""
        if self.tokens <= 0:
            return False
        base = state.base_tokens
        shares = [max(0, m.counted.tokens - base.get(m.learner_id, m.counted.tokens)) for m in live]
        most = STEPS_FACTOR * median_low(shares) if shares else 0  # nobody ends the waiting of all by what it reports
        trained = sum(min(share, most) for share in shares)
        return trained > 0 and self.tokens <= state.tokens_merged + trained
