"""A round: the collecting of contributions for one outer step of one fragment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from diloco_common.codec import Payload
from diloco_common.wire.messages import PushHeader
from diloco_server.core.cadence import Quorum, needed
from diloco_server.core.membership import Member
from diloco_server.core.parts import HalfContribution, PartedPayload, is_part


class CloseReason(StrEnum):
    ALL = "all"  # nobody is missing
    GRACE = "grace"  # it had its quorum, and the grace window is over
    LEASE = "lease"  # everybody who is missing has lost the lease that was asked


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The longest that a contribution of so many inner steps counts for."""

    length: float
    """L2 norm."""
    steps: int

    def at(self, steps: int) -> float:
        return self.length * max(1.0, steps / self.steps)


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
    payload: Payload | PartedPayload
    piece_norms: tuple[float, ...]
    """L2 norm of each piece of the fragment, in order."""
    rounds: int = 1
    """To buffers: of the fragment, since the one before of this learner. Known once the round is closed."""
    kept: float = 1.0
    """What is left of its length, in (0, 1]. This and the next two: by `influence.py`, once the round is closed."""
    weight_max: float = math.inf
    counted: int = 0
    """Of its tokens, those that count as merged."""

    @classmethod
    def of(
        cls, member: Member, header: PushHeader, payload: Payload | PartedPayload, piece_norms: tuple[float, ...]
    ) -> Contribution:  # fmt: skip
        """What a push brings, or the last of its parts."""
        return cls(
            member.learner_id, member.generation, header.fragment_id, header.round, header.base_version,
            header.tokens, header.steps, payload, piece_norms,
        )  # fmt: skip

    @property
    def norm(self) -> float:
        return total_norm(self.piece_norms)

    def is_what(self, header: PushHeader) -> bool:
        """Whether a push with this header, of the same learner and round, brings this contribution again."""
        return self._brings(header) and (self.tokens, self.steps) == (header.tokens, header.steps)

    def _brings(self, header: PushHeader) -> bool:
        if isinstance(self.payload, PartedPayload):
            return is_part(header) and self.payload.has(header)
        return not is_part(header) and self.payload.header == header.payload

    @property
    def weight(self) -> float:
        """Quantity times quality: tokens^2 / steps. To buffers that of one round, as others may take several."""
        return min(self.tokens * self.tokens / self.steps, self.weight_max) / self.rounds


@dataclass
class Round:
    """What a round asked for and has got."""

    round: int
    """The version that it will make."""
    opened_at: float
    asked: dict[str, int]
    """Learner -> the generation that was asked. Learners that lose their lease stay here."""
    lost: set[str] = field(default_factory=set)
    """Asked learners whose generation is over: they are gone, or have joined again."""
    refused: set[str] = field(default_factory=set)
    """Asked learners whose contribution was refused. Nobody waits for another one."""
    contributions: dict[str, Contribution] = field(default_factory=dict)
    halves: dict[str, HalfContribution] = field(default_factory=dict)
    """Learner -> the parts of its contribution that have come, while others are missing.

    Of whose generation was asked, is not over, and has not contributed."""
    last_of: set[str] = field(default_factory=set)
    """Learners that leave, and for whose work it was opened. It waits for them, beyond the grace window."""
    beside: frozenset[str] = frozenset()
    """Learners that were left out when it was opened (`influence.py`): what they contribute is looked at, and not
    merged."""
    quorum_at: float | None = None
    closed_at: float = 0.0
    limit: LengthLimit | None = None
    """Of lengths, for the next round. Known once the round is closed."""
    asked_at: float = field(init=False)
    """When learners were asked last."""
    usual_at: float = 0.0
    """When the usual one of those that were asked is expected to have contributed; 0: not known."""
    awaited_last: str = ""
    """The learner for which it turned out last that waiting is worth while: asked about first, the next time."""
    awaited: dict[str, int] = field(init=False)
    """Those of `asked` that are still expected to contribute: not the lost, the refused, and who has. No set: in a
    set Python's garbage collector would look at each of a million names. Up to 3.13 it passes over a dict of them."""

    def __post_init__(self) -> None:
        self.asked_at = self.opened_at
        over = {*self.lost, *self.refused, *self.contributions}
        self.awaited = {i: g for i, g in self.asked.items() if i not in over} if over else self.asked.copy()

    def ask_again(self, learner_id: str, generation: int) -> bool:
        """Ask a learner that is not expected to contribute any more, or never was. Returns whether it is one."""
        if learner_id in self.contributions or learner_id in self.awaited:
            return False
        self.asked[learner_id] = generation
        self.awaited[learner_id] = generation
        self.lost.discard(learner_id)
        self.refused.discard(learner_id)
        return True

    @property
    def missing(self) -> list[str]:
        """Those that are awaited, in order."""
        return sorted(self.awaited)

    def accept(self, contribution: Contribution, quorum: Quorum, now: float) -> None:
        """Take a contribution of a generation that was asked."""
        assert self.asked.get(contribution.learner_id) == contribution.generation
        self.halves.pop(contribution.learner_id, None)
        self.contributions[contribution.learner_id] = contribution
        self.awaited.pop(contribution.learner_id, None)
        self.look(quorum, now)

    def look(self, quorum: Quorum, now: float) -> None:
        """Since when it has its quorum. It may lose it: what was contributed is fenced off, or more are needed."""
        if self._lacks(quorum):
            self.quorum_at = None
        elif self.quorum_at is None:
            self.quorum_at = now

    def refuse(self, learner_id: str, generation: int, whole: PushHeader | None = None) -> bool:
        """Wait no longer for a learner whose contribution was refused. Returns whether the round had waited.

        `whole`: which one (`parts.whole_of`). Its parts are dropped, and those of a later one stay. None: any.
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
        """The generation that was asked is over: fence off what it contributed, and return that.

        The quorum may go with it. Then the round asks again in time, as one that never had it.
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
        there, needs = self._progress(quorum)
        return there < needs

    def _progress(self, quorum: Quorum) -> tuple[int, int]:
        """Contributions that count for the quorum, and how many it takes. Whoever waits for all waits for all."""
        if quorum == "all":
            return len(self.contributions), max(1, len(self.asked))
        there, asked = (len(ids) - sum(i in ids for i in self.beside) for ids in (self.contributions, self.asked))
        return there, max(1, needed(quorum, asked))

    def parted(self) -> tuple[list[Contribution], list[Contribution]]:
        """What takes part, by learner, and what is beside it."""
        ordered = [self.contributions[i] for i in sorted(self.contributions)]
        return (
            [c for c in ordered if c.learner_id not in self.beside],
            [c for c in ordered if c.learner_id in self.beside],
        )

    def verdict(self, quorum: Quorum, waits_until: float, now: float) -> tuple[CloseReason | None, str]:
        """Why the round closes now, or None; and the same in words. With its quorum it waits until a time."""
        if not self.contributions:
            return None, f"0/{len(self.asked)} contributions"
        if not self.awaited:
            reason = CloseReason.LEASE if self.lost else CloseReason.ALL
            return reason, str(reason)
        if self.quorum_at is None:
            return None, "{}/{} contributions".format(*self._progress(quorum))
        left_s = waits_until - now
        if left_s > 0:
            return None, f"{left_s:.3f} s of grace left"
        return CloseReason.GRACE, str(CloseReason.GRACE)

    def lacks_quorum_since(self, then: float) -> bool:
        """Whether everybody who was asked had the time since `then`, and too few contributed.

        One learner that reports and never contributes must not hold up all that were refused, or have joined again.
        """
        return self.quorum_at is None and self.asked_at < then

    @property
    def is_void(self) -> bool:
        """Nothing of it will be merged, and nobody is expected any more."""
        return not self.awaited and self.contributions.keys() <= self.beside


def total_norm(norms: Sequence[float]) -> float:
    """L2 norm of a fragment from those of its pieces."""
    return math.hypot(*norms)
