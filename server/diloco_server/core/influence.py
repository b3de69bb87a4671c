"""How much one contribution may move the model: bounded by the others of its round, and by nothing else.

The shard does not guess who is honest. It looks at what a round holds. In each, the longest contribution counts as long
as the second longest, among strangers (`guard.trust`) as the median:

    v_i <- v_i min(1, limit_i / |v_i|)
    limit_i = max(rank-th longest of the round at equal steps, FALLS * limit of the round before)

At equal steps: another's length is first multiplied by max(1, steps_i / its steps). Clipping against the round itself
is adaptive robust clipping (arXiv 2405.14432), and with the median what a run among strangers used (arXiv 2603.08163).
What is cut off is gone: it is not told and not carried, as a remainder that came back would wind up. In a round of one
or two nobody can say who is right. There the limit of the rounds before holds, and rises as slowly as it falls.

A length says nothing about direction. Whoever's cosine with the sum of the others lies below zero by `ERRORS` standard
errors, while these agree without it, is left out as long as that lasts. Averages go over all fragments and two H. It is
asked like everybody, and takes the global values as if it were merged. So it cannot wind up either.

Claims of members are believed. A stranger's weight and its tokens count for at most the lower median of its round, and
strangers need a majority for a round. Whoever brings more than half of the weight of a round cannot be bounded by any
rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low, stdev
from typing import Literal

import torch

from diloco_server.core.cadence import Quorum
from diloco_server.core.membership import Member
from diloco_server.core.round import Contribution, Limit

FALLS, RISES = 0.95, 4.0
"""What a limit keeps in the next round, so that newcomers with a rate near zero do not silence whoever is there; and how
many times as long as before a contribution may be where nobody can say whether it is too long."""
TELLING = 3
"""Contributions with which a round can say that one is too long, or points away: with two, either may be."""
OPPOSED = 0.75
"""A flipped sign has a cosine of -1 times that of the others with each other. A healthy learner that alone has met some
rare words goes down to -0.5 times (`benchmarks/honest.py`), as the others pull the model back to what they know."""
ERRORS = 3.0
"""Standard errors beyond which a mean is no chance."""
TOLD_MIN = 16
"""Cosines that a standard error is taken from, where two H have fewer."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Where a contribution points, among those of its round."""

    cosine: float
    """With the sum of the others, as far as they take part."""
    others: float
    """How much these agree without it: their dot products with each other, over those of their lengths."""


@dataclass
class Told:
    """What the last contributions of one learner told: over all fragments of the model, and two H."""

    kept: deque[float]
    """What was left of the length of each, in (0, 1]."""
    directions: deque[Direction]

    def points_away(self) -> bool:
        """Whether it points away from the others nearly as much as these agree without it, beyond chance."""
        if len(self.directions) < (self.directions.maxlen or 0):
            return False
        agree = [d.others for d in self.directions]
        return _sure(agree) and _sure([-d.cosine - OPPOSED * d.others for d in self.directions])

    @property
    def mean_cosine(self) -> float | None:
        """None: there was nothing to compare with."""
        return fmean(d.cosine for d in self.directions) if self.directions else None

    @property
    def mean_kept(self) -> float:
        return fmean(self.kept) if self.kept else 1.0


@dataclass
class Influence:
    """Of the learners of one shard. Kept in memory only: a restarted shard listens anew."""

    trust: Literal["members", "strangers"]
    num_fragments: int = 0
    """Fragments of the model that this shard owns."""
    left_out: set[str] = field(default_factory=set)
    """Learners whose contributions are not merged."""
    _told: dict[str, Told] = field(default_factory=dict)
    _own: dict[int, dict[str, Limit]] = field(default_factory=dict)
    """Fragment -> learner -> as long as its last contribution counted."""

    @property
    def _strangers(self) -> bool:
        return self.trust == "strangers"

    # ------------------------------------------------------------ a round

    def quorum(self, asked: Iterable[Member], quorum: Quorum) -> Quorum:
        """How many learners make a round due, and let it close. Of strangers more than half of those that answer."""
        if not self._strangers or quorum == "all":
            return quorum
        return max(quorum, sum(m.may_answer for m in asked) // 2 + 1)

    def merging(self, live: Sequence[Member]) -> list[Member]:
        """Those that rounds are opened and closed for. Where all are left out, all of them."""
        return [m for m in live if m.learner_id not in self.left_out] or [*live]

    def claimed(self, tokens: Collection[int]) -> int:
        """What learners say they have trained, together."""
        most = median_low(tokens) if self._strangers and tokens else math.inf
        return sum(int(min(one, most)) for one in tokens)

    def bound(
        self, fragment_id: int, taken: Sequence[Contribution], before: Limit | None
    ) -> tuple[dict[str, Contribution], Limit | None]:
        """What counts of each contribution to a round that closes, and the limit after it.

        `before`: that after the round before; None: no round has told yet.
        """
        bounded, own = self.bound_weights(taken), self._own.setdefault(fragment_id, {})
        limits, after = self._limits([c for c in bounded.values() if c.norm > 0], before, own)
        for learner_id, most in limits.items():
            c = bounded[learner_id]
            bounded[learner_id] = replace(c, kept=min(1.0, most / c.norm))
            own[learner_id] = Limit(min(c.norm, most), c.steps)
        return bounded, after

    def bound_weights(self, taken: Sequence[Contribution]) -> dict[str, Contribution]:
        """The same of contributions whose length tells nothing: to buffers."""
        if not self._strangers:
            return {c.learner_id: replace(c, counted=c.tokens) for c in taken}
        weight, tokens = median_low(c.weight for c in taken), median_low(c.tokens for c in taken)
        return {c.learner_id: replace(c, weight_max=weight, counted=min(c.tokens, tokens)) for c in taken}

    def _limits(
        self, taken: Sequence[Contribution], before: Limit | None, own: Mapping[str, Limit]
    ) -> tuple[dict[str, float], Limit | None]:
        """Of each contribution that has a length. `own`: as long as those before counted, by learner."""
        known = {
            c.learner_id: max((k.at(c.steps) for k in (before, own.get(c.learner_id)) if k is not None), default=0.0)
            for c in taken
        }
        if len(taken) < TELLING:
            return {i: math.inf if before is None else RISES * most for i, most in known.items()}, before
        norms = torch.tensor([c.norm for c in taken], dtype=torch.float64)
        steps = torch.tensor([c.steps for c in taken], dtype=torch.float64)
        rank = (len(taken) + 1) // 2 if self._strangers else len(taken) - 1
        at_equal_steps = norms * (steps[:, None] / steps).clamp(min=1.0)
        reach = at_equal_steps.kthvalue(rank, dim=1).values.tolist()
        half = sum(c.weight for c in taken) / 2
        limits = {}
        for c, most in zip(taken, reach, strict=True):
            limits[c.learner_id] = max(most, FALLS * known[c.learner_id]) if c.weight <= half else math.inf
        usual = int(steps.kthvalue(rank).indices)
        told = Limit(reach[usual], taken[usual].steps)
        fallen_to = told if before is None else Limit(before.length * FALLS, before.steps)
        most_steps = max(told.steps, fallen_to.steps)
        return limits, max(told, fallen_to, key=lambda limit: limit.at(most_steps))

    # ------------------------------------------------------------ what rounds have told

    def begin(self, learner_id: str) -> None:
        """A process joins under this id that the shard has not heard of before, or it is forgotten."""
        self._told.pop(learner_id, None)
        self.left_out.discard(learner_id)
        for own in self._own.values():
            own.pop(learner_id, None)

    def told(self, learner_id: str) -> Told:
        length = max(TOLD_MIN, 2 * self.num_fragments)
        return self._told.get(learner_id) or Told(deque(maxlen=length), deque(maxlen=length))

    def hear(
        self, bounded: Iterable[Contribution], directions: Mapping[str, Direction]
    ) -> tuple[tuple[str, ...], str | None]:
        """A round of the model was merged. Returns who takes part again from now on, and who does not any more."""
        for c in bounded:
            told = self._told[c.learner_id] = self.told(c.learner_id)
            told.kept.append(c.kept)
            if c.learner_id in directions:
                told.directions.append(directions[c.learner_id])
        back = tuple(i for i in sorted(self.left_out & directions.keys()) if self._is_over(self._told[i]))
        self.left_out.difference_update(back)
        away = [i for i in directions if i not in self.left_out and self._told[i].points_away()]
        out = min(away, key=lambda i: (self._told[i].mean_cosine, i), default=None)
        if out is not None:
            self.left_out.add(out)
        if out is not None or back:
            for told in self._told.values():
                told.directions.clear()
        return back, out

    @staticmethod
    def _is_over(told: Told) -> bool:
        """Of one that is left out: as many cosines as put it there are no longer below zero."""
        return len(told.directions) == told.directions.maxlen and not told.points_away()


def _sure(values: Sequence[float]) -> bool:
    """Whether their mean lies above zero by more than chance."""
    return fmean(values) > ERRORS * stdev(values) / math.sqrt(len(values))
