"""A round: the collecting of contributions for one outer step of one fragment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_common.codec import Payload
from diloco_common.messages import PushAnswer, PushHeader
from diloco_server.core.cadence import Quorum, needed


@dataclass(frozen=True)
class Contribution:
    """One pseudo-gradient, still compressed, and where it came from."""

    learner_id: str
    generation: int
    fragment_id: int
    round: int
    base_version: int
    tokens: int
    steps: int
    payload: Payload
    piece_norms: tuple[float, ...]
    """L2 norm of each piece of the fragment, in order."""

    @property
    def norm(self) -> float:
        """Of the whole fragment."""
        return total_norm(self.piece_norms)

    def is_what(self, header: PushHeader) -> bool:
        """Whether a push that begins with this header, of the same learner and round, is this contribution again."""
        return (self.payload.header, self.tokens, self.steps) == (header.payload, header.tokens, header.steps)

    @property
    def weight(self) -> float:
        """Quantity times quality: tokens^2 / steps."""
        return self.tokens * self.tokens / self.steps


@dataclass
class Round:
    """What a fragment's open round asked for and has got."""

    round: int
    """The version that it will make."""
    opened_at: float
    asked: dict[str, int]
    """Learner id -> generation that was asked. Learners that lose their lease stay here."""
    lost: set[str] = field(default_factory=set)
    """Asked learners that are gone, or joined again since."""
    refused: dict[str, tuple[PushHeader, PushAnswer]] = field(default_factory=dict)
    """Asked learners whose contribution was refused, which one, and the answer: they gave its work back, will not push
    it again, and no copy of it that is still under way may be taken."""
    contributions: dict[str, Contribution] = field(default_factory=dict)
    quorum_at: float | None = None
    closed_at: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Who was asked, is expected to contribute, and has not."""
        return sorted(self.asked.keys() - self.lost - self.refused.keys() - self.contributions.keys())

    def accept(self, contribution: Contribution, quorum: Quorum, now: float) -> None:
        assert contribution.learner_id in self.asked
        self.contributions[contribution.learner_id] = contribution
        if self.quorum_at is None and len(self.contributions) >= needed(quorum, len(self.asked)):
            self.quorum_at = now

    def refuse(self, learner_id: str, generation: int, header: PushHeader, answer: PushAnswer) -> bool:
        """Do not wait for a learner whose contribution was refused; says whether the round had waited for it."""
        waited = learner_id in self.missing and self.asked[learner_id] == generation
        if waited:
            self.refused[learner_id] = (header, answer)
        return waited

    def refusal_of(self, learner_id: str, header: PushHeader) -> PushAnswer | None:
        """What was answered to a copy of this contribution that was refused."""
        refused, answer = self.refused.get(learner_id, (None, None))
        return answer if refused == header else None

    def lose(self, learner_id: str) -> Contribution | None:
        """The learner lost the generation that was asked: fence off what it sent."""
        if learner_id not in self.asked:
            return None
        self.lost.add(learner_id)
        return self.contributions.pop(learner_id, None)

    def verdict(self, quorum: Quorum, grace_s: float, now: float) -> tuple[bool, str]:
        """Say whether the round may close, and why."""
        if not self.contributions:
            return False, f"0/{len(self.asked)} contributions"
        if not self.missing:
            return True, "lease" if self.lost else "all"
        enough = needed(quorum, len(self.asked))
        if len(self.contributions) < enough or self.quorum_at is None:
            return False, f"{len(self.contributions)}/{enough} contributions"
        left_s = self.quorum_at + grace_s - now
        return left_s <= 0, "grace" if left_s <= 0 else f"{left_s:.3f} s of grace left"

    @property
    def is_void(self) -> bool:
        """Nobody who was asked is expected to contribute any more, and nobody did."""
        return not self.contributions and not self.missing


def total_norm(norms: Sequence[float]) -> float:
    """L2 norm of a fragment from those of its pieces."""
    return math.hypot(*norms)
