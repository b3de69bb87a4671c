"""The token budget: the run ends once every fragment has merged so many tokens, whoever is alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member


@dataclass(frozen=True, slots=True)
class Budget:
    """What each fragment is to merge."""

    tokens: int
    """0: the run has no end."""

    def is_reached(self, state: FragmentState) -> bool:
        """Whether the fragment has merged all the tokens that the run asks for."""
        return 0 < self.tokens <= state.tokens_merged

    def rest_is_trained(self, state: FragmentState, live: Iterable[Member]) -> bool:
        """Whether what learners trained since the last round fills the budget. Then nobody waits for H steps."""
        if self.tokens <= 0:
            return False
        base = state.base_tokens
        trained = sum(max(0, m.progress.tokens - base.get(m.learner_id, m.progress.tokens)) for m in live)
        return trained > 0 and self.tokens <= state.tokens_merged + trained
