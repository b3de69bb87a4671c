"""Honest accounting: what became of everything that was pushed to this shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diloco_common.messages import Outcome, PushAnswer


@dataclass
class Ledger:
    """Counts that only grow. Tokens count once per fragment of the model that they were pushed for."""

    rounds: int = 0
    """Rounds that became a version."""
    participants: int = 0
    """Contributions merged, over all rounds."""
    duplicates: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Refusals by stable code."""
    evictions: Counter[str] = field(default_factory=Counter)
    """Evictions by stable code."""
    tokens_accepted: int = 0
    tokens_merged: int = 0
    tokens_late: int = 0
    """Of contributions that came too late. Their learners carry the work into the next round."""
    tokens_refused: Counter[str] = field(default_factory=Counter)
    tokens_fenced: int = 0
    """Accepted, then dropped: the learner lost its lease before the round closed. It carries the work if it lives."""

    def answered(self, answer: PushAnswer, tokens: int) -> None:
        """Count the answer to a contribution of so many tokens."""
        if answer.outcome is Outcome.REJECTED:
            self.rejected[answer.code] += 1
            self.tokens_refused[answer.code] += tokens
        elif answer.outcome is Outcome.ACCEPTED:
            self.tokens_accepted += tokens
        elif answer.outcome is Outcome.LATE:
            self.late += 1
            self.tokens_late += tokens
        else:
            self.duplicates += 1

    @property
    def tokens_in_flight(self) -> int:
        return self.tokens_accepted - self.tokens_merged - self.tokens_fenced

    @property
    def participants_mean(self) -> float:
        return self.participants / self.rounds if self.rounds else 0.0
