"""Which norm of a contribution is usual for a fragment: one vote per learner, and no growth by leaps.

A vote is the median of a learner's own last norms, and the usual norm is the median of the votes. So a learner that
contributes often, or alone for a while, counts once: it cannot pull the usual norm after itself, step by step, while
others are there. Where it is the only one, growth is bounded. Of an even number the lower median is taken, so that of
two learners neither can raise it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

NORMS_MIN = 8
"""Merged contributions after which their median is trusted."""
NORMS_OF_ONE = 8
"""Of a learner that are remembered. They make one vote."""
EMPTY = 1e-3
"""Share of a learner's longest contribution below which one of its own tells nothing. A snapshot that is read in the
background may hold a step more than was counted, and the contribution after it none."""
GROWTH = 10.0
"""The usual norm grows at most by this factor while as many contributions are merged as are remembered."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the contributions merged last, oldest first, and who sent them ("": an earlier release did not say)."""

    norms: tuple[float, ...] = ()
    learners: tuple[str, ...] = ()
    usual: float = 0.0
    """0: too few were merged, or they were all 0."""

    @classmethod
    def of(cls, norms: Sequence[float], learners: Sequence[str], usual: float) -> Norms:
        """As a version keeps them; `learners` may be shorter, then the oldest norms have no name."""
        names = ("",) * (len(norms) - len(learners)) + tuple(learners)[: len(norms)]
        known = cls(tuple(norms), names, usual)
        return known if usual else cls(known.norms, known.learners, known._median())

    def add(
        self,
        merged: Sequence[tuple[str, float]],
        last_merged: Mapping[str, int],
        version: int,
        window: int,
        least: float,
    ) -> Norms:
        """After the contributions (learner, norm) of this version.

        At most `window` are remembered, and none of a learner that was last merged `window` versions ago. What is above
        goes from whoever has most of them. `least`: the usual norm may grow from there, however small it was.
        """
        kept = [*zip(self.learners, self.norms, strict=True), *merged]
        kept = [one for one in kept if last_merged.get(one[0], version) > version - window]
        counts = Counter(name for name, _ in kept)
        while kept and (len(kept) > window or max(counts.values()) > NORMS_OF_ONE):
            most = max(counts.values())
            oldest = next(i for i, (name, _) in enumerate(kept) if counts[name] == most)
            counts[kept.pop(oldest)[0]] -= 1
        after = Norms(tuple(norm for _, norm in kept), tuple(name for name, _ in kept))
        usual = after._median()
        if self.usual:
            usual = min(usual, max(self.usual, least) * GROWTH ** (len(merged) / window))
        return Norms(after.norms, after.learners, usual)

    def _median(self) -> float:
        if len(self.norms) < NORMS_MIN:
            return 0.0
        votes: dict[str, list[float]] = {}
        for learner, norm in zip(self.learners, self.norms, strict=True):
            votes.setdefault(learner, []).append(norm)
        return median_low([_vote(norms) for norms in votes.values()])


def _vote(norms: Sequence[float]) -> float:
    telling = EMPTY * max(norms)
    return median_low([norm for norm in norms if norm >= telling])
