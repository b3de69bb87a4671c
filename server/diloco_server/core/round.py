"""A round: collects the contributions for one outer step of one fragment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from diloco_common.codec import Payload
from diloco_common.wire.messages import PushHeader
from diloco_server.core.membership import Member
from diloco_server.core.parts import HalfContribution, PartedPayload, is_part

Quorum = int | Literal["all"]


def needed(quorum: Quorum, learners: int) -> int:
    """K, or the number of learners if that is smaller."""
    return learners if quorum == "all" else min(quorum, learners)


class CloseReason(StrEnum):
    ALL = "all"  # every learner it asked has answered
    GRACE = "grace"  # the grace window after the quorum is over
    LEASE = "lease"  # every missing learner has lost the lease under which it was asked


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The length above which a contribution of this many inner steps is cut."""

    length: float
    """The L2 norm."""
    steps: int

    def at(self, steps: int) -> float:
        return self.length * max(1.0, steps / self.steps)


@dataclass(frozen=True)
class Contribution:
    """One pseudo-gradient, still compressed, and its origin."""

    learner_id: str
    generation: int
    fragment_id: int
    round: int
    base_version: int
    tokens: int
    steps: int
    payload: Payload | PartedPayload
    piece_norms: tuple[float, ...]
    """L2 norm of each piece of the fragment, in order."""
    rounds: int = 1
    """For buffers: rounds of the fragment since this learner's previous contribution. Set when the round closes."""
    kept: float = 1.0
    """The factor that scales its length, in (0, 1]. `influence.py` sets this and the next two when the round closes."""
    weight_max: float = math.inf
    counted: int = 0
    """How many of its tokens count as merged."""

    @classmethod
    def of(
        cls, member: Member, header: PushHeader, payload: Payload | PartedPayload, piece_norms: tuple[float, ...]
    ) -> Contribution:  # fmt: skip
        return cls(
            member.learner_id, member.generation, header.fragment_id, header.round, header.base_version,
            header.tokens, header.steps, payload, piece_norms,
        )  # fmt: skip

    @property
    def norm(self) -> float:
        return total_norm(self.piece_norms)

    def is_what(self, header: PushHeader) -> bool:
        """Whether a push with this header, from the same learner and round, repeats this contribution."""
        return self._brings(header) and (self.tokens, self.steps) == (header.tokens, header.steps)

    def _brings(self, header: PushHeader) -> bool:
        if isinstance(self.payload, PartedPayload):
            return is_part(header) and self.payload.has(header)
        return not is_part(header) and self.payload.header == header.payload

    @property
    def weight(self) -> float:
        """tokens^2 / steps: quantity times quality. For buffers, divided by the rounds that the contribution covers."""
        return min(self.tokens * self.tokens / self.steps, self.weight_max) / self.rounds


@dataclass
class Round:
    round: int
    """The version that it will produce."""
    opened_at: float
    asked: dict[str, int]
    """Learner -> the generation that was asked. It includes learners that have lost their lease since."""
    lost: set[str] = field(default_factory=set)
    """Asked learners whose generation has ended: they left or joined again."""
    refused: set[str] = field(default_factory=set)
    """Asked learners whose contribution was refused. The round does not wait for another one."""
    contributions: dict[str, Contribution] = field(default_factory=dict)
    halves: dict[str, HalfContribution] = field(default_factory=dict)
    """Learner -> the parts of its incomplete contribution. Only current generations that were asked have any."""
    last_of: set[str] = field(default_factory=set)
    """Leaving learners whose last work this round collects. It waits for them beyond the grace window."""
    beside: frozenset[str] = frozenset()
    """Learners that were left out when it opened (`influence.py`): their contributions are observed, not merged."""
    quorum_at: float | None = None
    closed_at: float = 0.0
    limit: LengthLimit | None = None
    """The length limit for the next round. Set when this round closes."""
    asked_at: float = field(init=False)
    usual_at: float = 0.0
    """When the median asked learner is expected to have contributed; 0: unknown."""
    awaited_last: str = ""
    """The learner for which the round last decided to wait; it is checked first the next time."""
    awaited: dict[str, int] = field(init=False)
    """The learners of `asked` that may still contribute: not lost, not refused, not done. A dict and not a set: up to
    Python 3.13 the garbage collector skips a dict of strings and integers, but visits each of a set's million names."""

    def __post_init__(self) -> None:
        self.asked_at = self.opened_at
        over = {*self.lost, *self.refused, *self.contributions}
        self.awaited = {i: g for i, g in self.asked.items() if i not in over} if over else self.asked.copy()

    def ask_again(self, learner_id: str, generation: int) -> bool:
        """Ask a learner that is not awaited. Returns whether it was asked."""
        if learner_id in self.contributions or learner_id in self.awaited:
            return False
        self.asked[learner_id] = generation
        self.awaited[learner_id] = generation
        self.lost.discard(learner_id)
        self.refused.discard(learner_id)
        return True

    @property
    def missing(self) -> list[str]:
        return sorted(self.awaited)

    def accept(self, contribution: Contribution, quorum: Quorum, now: float) -> None:
        assert self.asked.get(contribution.learner_id) == contribution.generation
        self.halves.pop(contribution.learner_id, None)
        self.contributions[contribution.learner_id] = contribution
        self.awaited.pop(contribution.learner_id, None)
        self.look(quorum, now)

    def look(self, quorum: Quorum, now: float) -> None:
        """Update `quorum_at`. A round can lose its quorum: a contribution is fenced off, or the quorum rises."""
        if self._lacks(quorum):
            self.quorum_at = None
        elif self.quorum_at is None:
            self.quorum_at = now

    def refuse(self, learner_id: str, generation: int, whole: PushHeader | None = None) -> bool:
        """Stop waiting for a learner whose contribution was refused. Returns whether the round was waiting.

        `whole`: identifies the contribution (`parts.whole_of`) whose parts are dropped; parts of a later one stay.
        None: drop any.
        """
        half = self.halves.get(learner_id)
        if half is not None and whole in (None, half.whole):
            del self.halves[learner_id]
        waited = self.awaited.get(learner_id) == generation
        if waited:
            self.refused.add(learner_id)
            del self.awaited[learner_id]
        return waited

    def lose(self, learner_id: str, quorum: Quorum) -> Contribution | None:
        """The generation that was asked has ended: remove its contribution and return it.

        If the quorum is lost with it, the round later asks again, like one that never had its quorum.
        """
        if learner_id not in self.asked:
            return None
        self.lost.add(learner_id)
        self.awaited.pop(learner_id, None)
        self.halves.pop(learner_id, None)
        fenced = self.contributions.pop(learner_id, None)
        if self._lacks(quorum):
            self.quorum_at = None
        return fenced

    def _lacks(self, quorum: Quorum) -> bool:
        """Whether contributions are missing for the quorum. "all" includes learners that are left out."""
        if quorum == "all":
            return len(self.contributions) < max(1, len(self.asked))
        there, asked = (len(ids) - sum(i in ids for i in self.beside) for ids in (self.contributions, self.asked))
        return there < max(1, needed(quorum, asked))

    def parted(self) -> tuple[list[Contribution], list[Contribution]]:
        """The contributions to merge and those that are left out, each sorted by learner."""
        ordered = [self.contributions[i] for i in sorted(self.contributions)]
        return (
            [c for c in ordered if c.learner_id not in self.beside],
            [c for c in ordered if c.learner_id in self.beside],
        )

    def verdict(self, waits_until: float, now: float) -> CloseReason | None:
        """Why the round closes now, or None. With a quorum it stays open until `waits_until`."""
        if not self.contributions:
            return None
        if not self.awaited:
            return CloseReason.LEASE if self.lost else CloseReason.ALL
        return None if self.quorum_at is None or now < waits_until else CloseReason.GRACE

    def lacks_quorum_since(self, then: float) -> bool:
        """Whether the quorum is still missing, although every asked learner has had time since `then`.

        The round then asks again, so that one learner that never contributes cannot block those that joined later.
        """
        return self.quorum_at is None and self.asked_at < then

    @property
    def is_void(self) -> bool:
        """Whether it has nothing to merge and waits for nobody."""
        return not self.awaited and self.contributions.keys() <= self.beside


def total_norm(norms: Sequence[float]) -> float:
    return math.hypot(*norms)
