"""Limits how much one contribution may move the model, from the other contributions of its round.

In each round, the longest contribution counts as at most twice as long as the second longest; among strangers
(`guard.trust`), as at most as long as the median (adaptive robust clipping, arXiv 2405.14432):

    v_i <- v_i min(1, limit_i / |v_i|)
    limit_i = max(times_i * second longest at equal steps, FALLS * what i or the second counted for before)

`times_i` lies between `APART` and `TWICE`, and grows with the learner's agreement in direction with the others. "At
equal steps" multiplies another's length by max(1, steps_i / its steps); strangers' steps are not believed. The part cut
off is lost: if it were carried, it would accumulate. A round of one or two has no majority, so a contribution may be
`RISES` times as long as before. A contribution with more than half of the weight of its round is not cut either.

Directions are compared with the others of the round and with the learner's previous contribution, on one sample of
elements, so the time does not grow with the fragment. A learner is left out while it points away from the others,
beyond chance, nearly as much as they agree without it; a stranger, if it points away at all. A learner that alone
repeats itself is also left out. It is asked like the others, and applies the global values as if it were merged.

The shard believes what members claim. A stranger's weight and tokens count as at most the lower median of its round,
and a round of strangers needs a majority.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low, stdev

import torch
from torch import Tensor

from diloco_common.codec.blocks import FLOAT32_TINY
from diloco_server.core.membership import Member
from diloco_server.core.merge import rows, shares_of
from diloco_server.core.round import Contribution, LengthLimit, Quorum

STRETCHES, STRETCH = 16, 1 << 12
"""Evenly spread stretches sampled in a fragment, and their length. Unrelated vectors then have a cosine of 0.004."""
MANY = 64
"""Above this many contributions, which are compared in pairs, fewer elements are sampled."""
COMPARED = 512
"""Elements of the sample that are kept until the next contribution: 1 KiB for each learner and fragment."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The direction of a contribution, in a round where at least one has two others."""

    cosine: float
    """Cosine with the others: the mean, weighted by how much each counts; among strangers, the median."""
    others: float
    """The others' cosine with each other; 0 if there is only one."""
    again: float | None = None
    """Cosine with its learner's contribution to the previous version; None: there was none."""


def directions(
    part: Sequence[Contribution],
    beside: Sequence[Contribution],
    num_elements: int,
    said: dict[str, Tensor],
    *,
    median: bool = False,
) -> dict[str, Direction]:
    """The direction of each contribution to a fragment of `num_elements`: of `part`, which is merged, and of `beside`.

    Empty if there are only two, since either may point away. `said`: learner -> the sample of its last contribution;
    this call replaces them by those of this round. `median`: compare as among strangers.
    """
    taken = [c for c in (*part, *beside) if c.norm > 0]
    shares = dict(zip((c.learner_id for c in part), shares_of(part), strict=True))
    weights = torch.tensor([shares.get(c.learner_id, 0.0) * c.kept for c in taken], dtype=torch.float64)
    others = (weights > 0).sum() - (weights > 0).long()
    if not (others > 1).any():
        return {}
    products, sample = _compared(taken, num_elements)
    lengths = products.diagonal().sqrt()
    cosines = _ratio(products, torch.outer(lengths, lengths))
    own = weights * lengths
    if median:
        with_others = _medians(cosines, weights > 0)
        agreeing = _medians(with_others.expand_as(cosines), weights > 0)
    else:
        rest, along = own.sum() - own, cosines @ own - own
        with_others = _ratio(along, rest)
        pairs = own @ along - 2 * own * along  # of the others with each other, each pair twice
        agreeing = _ratio(pairs, rest.square() - own.square().sum() + own.square())
    agreeing = torch.where(others > 1, agreeing, 0.0)
    now = {c.learner_id: kept.clone() for c, kept in zip(taken, sample, strict=True)}
    again = [
        float(torch.cosine_similarity(said[i].float(), x.float(), dim=0)) if i in said else None for i, x in now.items()
    ]
    said.clear()
    said.update(now)
    return dict(zip(now, map(Direction, with_others.tolist(), agreeing.tolist(), again), strict=True))


def _compared(taken: Sequence[Contribution], num_elements: int) -> tuple[Tensor, Tensor]:
    """Dot products of all pairs over the sample, float64 (M, M), and the part of it to keep, bfloat16 (M, n)."""
    stretches = _stretches(num_elements, len(taken))
    every = max(1, sum(s.stop - s.start for s in stretches) // COMPARED)
    products, kept = torch.zeros(len(taken), len(taken), dtype=torch.float64), []
    for stretch in stretches:
        for _, some in rows(taken, stretch):
            values = some.double()  # float32 would lose the others next to one with nearly all of the weight
            products += values @ values.T
            kept.append(some[:, ::every].bfloat16())
    return products, torch.cat(kept, 1)


def _stretches(num_elements: int, contributions: int) -> list[slice]:
    length = max(1, int(STRETCH * min(1.0, MANY / contributions) ** 2))
    if num_elements <= STRETCHES * length:
        return [slice(0, num_elements)]
    starts = (i * (num_elements - length) // (STRETCHES - 1) for i in range(STRETCHES))
    return [slice(start, start + length) for start in starts]


def _medians(cosines: Tensor, part: Tensor) -> Tensor:
    """For each contribution, the lower median of its cosines with the others in `part`."""
    own = torch.eye(len(cosines), dtype=torch.bool)
    return cosines.masked_fill(own | ~part, math.nan).nanmedian(1).values


def _ratio(dots: Tensor, sizes: Tensor) -> Tensor:
    """In [-1, 1]; 0 where there is nothing to compare with."""
    return torch.where(sizes > 0, dots / sizes.clamp(min=FLOAT32_TINY), 0.0).clamp(-1.0, 1.0)


TWICE = 2.0
"""Limit relative to the second longest: healthy learners that agree in direction stay within it, except in warm-up."""
FALLS = 0.8
"""Share of a limit that remains in the next round, so that newcomers with a rate near zero do not cut the others. With
a larger share, a learner that is ten times too long would keep the length that it had before all rates fell."""
APART = 1 / FALLS
"""Limit for a learner that points nowhere, like noise and outdated work: it may be as long as the second longest of the
previous round, after that has fallen. At `TWICE`, noise costs more than the learner's absence."""
RISES = TWICE * TWICE
"""Limit relative to the previous round, in rounds of one or two: two warm-up rounds differ by up to this factor."""
OPPOSED = 0.75
"""A learner points away if its cosine is below minus this multiple of the others' own. A flipped sign gives -1 times
it. A healthy learner that alone has met some rare words goes down to -0.5 times, as the others pull the model back. A
learner repeats itself only if its agreement is below this share of the others' own."""
FEW = 16
"""With more members than this, none is left out for pointing away: among 17, a flipped sign costs 1 %, and rare words
look worse."""
LITTLE = 0.1
"""A contribution shorter than this share of the longest is not judged: at a rate of zero, it is only rounding. A
learner that changes this much less repeats itself; one that alone pulls in its direction changes 0.4 times as much."""
ERRORS = 3.0
"""A mean this many standard errors above zero is not chance."""
TOLD = 24
"""Number of contributions in a mean: those of one H for a shard that has all 24 fragments."""


@dataclass
class LearnerStatistics:
    """Statistics of a learner's last contributions to the model, over all fragments."""

    kept: deque[float] = field(default_factory=lambda: deque(maxlen=TOLD))
    """The factor that scaled the length of each, in (0, 1]."""
    directions: deque[Direction] = field(default_factory=lambda: deque(maxlen=TOLD))

    @property
    def is_full(self) -> bool:
        return len(self.directions) == TOLD

    @property
    def along(self) -> float:
        """Its agreement with the others, relative to their agreement with each other, from 0 to 1; 1 while unknown."""
        if not self.is_full or not self._others_agree():
            return 1.0
        others = fmean(d.others for d in self.directions)
        return min(1.0, max(0.0, fmean(d.cosine for d in self.directions) / others))

    def points_away(self, opposed: float) -> bool:
        """Whether it points away from the others by `opposed` times their own agreement, beyond chance."""
        return self.is_full and self._others_agree() and _sure(self._against(opposed))

    def is_back(self, opposed: float) -> bool:
        return self.is_full and (fmean(self._against(opposed)) <= 0 or not self._others_agree())

    def _others_agree(self) -> bool:
        return _sure([d.others for d in self.directions])

    def _against(self, opposed: float) -> list[float]:
        return [-d.cosine - opposed * d.others for d in self.directions]

    @property
    def mean_cosine(self) -> float | None:
        return fmean(d.cosine for d in self.directions) if self.directions else None

    @property
    def mean_kept(self) -> float:
        return fmean(self.kept) if self.kept else 1.0


@dataclass
class Influence:
    """The influence of each learner of one shard. It is only in memory; a restarted shard starts without it."""

    strangers: bool = False
    left_out: set[str] = field(default_factory=set)
    _told: dict[str, LearnerStatistics] = field(default_factory=dict)
    _own: dict[int, dict[str, LengthLimit]] = field(default_factory=dict)
    """Fragment -> learner -> the length that counted of its last contribution."""

    def quorum(self, asked: Iterable[Member], quorum: Quorum) -> Quorum:
        """The quorum for opening and closing rounds: among strangers, more than half of the learners that answer."""
        if not self.strangers or quorum == "all":
            return quorum
        return max(quorum, sum(m.may_answer for m in asked) // 2 + 1)

    def merging(self, live: Sequence[Member]) -> list[Member]:
        """The learners for which rounds open and close."""
        return [m for m in live if m.learner_id not in self.left_out]

    def unjudged(self, live: Sequence[Member]) -> tuple[str, ...]:
        """If fewer than two others remain to judge them, readmit all learners that are left out, and return them."""
        if not self.left_out or len(self.merging(live)) > 1:
            return ()
        back = tuple(sorted(self.left_out))
        self.left_out.clear()
        self._listen_anew()
        return back

    def claimed(self, tokens: Collection[int]) -> int:
        most = median_low(tokens) if self.strangers and tokens else math.inf
        return sum(int(min(one, most)) for one in tokens)

    def bound(
        self, fragment_id: int, taken: Sequence[Contribution], before: LengthLimit | None
    ) -> tuple[dict[str, Contribution], LengthLimit | None]:
        """Bound the contributions to a round that closes. Returns them by learner, and the limit for the next round.

        `before`: the limit from the previous round; None: there was none.
        """
        bounded, own = self.bound_weights(taken), self._own.setdefault(fragment_id, {})
        limits, after = self._limits([c for c in bounded.values() if c.norm > 0], before, own)
        for learner_id, most in limits.items():
            c = bounded[learner_id]
            bounded[learner_id] = replace(c, kept=min(1.0, most / c.norm))
            # In a round of one or two, remember less than the length that counts, or the limit would grow without end.
            remembered = most * TWICE / RISES if len(limits) < 3 else most
            if not self.strangers:
                own[learner_id] = LengthLimit(min(c.norm, remembered), c.steps)
        return bounded, after

    def bound_weights(self, taken: Sequence[Contribution]) -> dict[str, Contribution]:
        """Bound only weights and tokens, because the lengths of contributions to buffers mean nothing."""
        if not self.strangers:
            return {c.learner_id: replace(c, counted=c.tokens) for c in taken}
        weight, tokens = median_low(c.weight for c in taken), median_low(c.tokens for c in taken)
        return {c.learner_id: replace(c, weight_max=weight, counted=min(c.tokens, tokens)) for c in taken}

    def _limits(
        self, taken: Sequence[Contribution], before: LengthLimit | None, own: Mapping[str, LengthLimit]
    ) -> tuple[dict[str, float], LengthLimit | None]:
        """The length limit of each contribution, and of the next round. `own`: as in `_own`, of this fragment."""
        steps = {c.learner_id: 1 if self.strangers else c.steps for c in taken}
        known = {
            i: max((limit.at(its) for limit in (before, own.get(i)) if limit is not None), default=0.0)
            for i, its in steps.items()
        }
        if len(taken) < 3:
            return {i: math.inf if before is None else RISES * most for i, most in known.items()}, before
        norms = torch.tensor([c.norm for c in taken], dtype=torch.float64)
        taken_in = torch.tensor([*steps.values()], dtype=torch.float64)
        rank = (len(taken) + 1) // 2 if self.strangers else len(taken) - 1
        different, which = torch.unique(taken_in, return_inverse=True)  # few values even for many contributions
        at_equal_steps = norms * (different[:, None] / taken_in).clamp(min=1.0)
        reach = at_equal_steps.kthvalue(rank, dim=1).values[which].tolist()
        limits = dict(zip(steps, reach, strict=True))
        if not self.strangers:
            half = sum(c.weight for c in taken) / 2
            for i, c in zip(steps, taken, strict=True):
                times = APART + (TWICE - APART) * self.told(i).along
                limits[i] = max(times * limits[i], FALLS * known[i]) if c.weight <= half else math.inf
        usual = int(taken_in.kthvalue(rank).indices)
        told = LengthLimit(reach[usual], int(taken_in[usual]))
        fallen = told if before is None else LengthLimit(FALLS * before.length, before.steps)
        return limits, max(told, fallen, key=lambda limit: limit.at(max(told.steps, fallen.steps)))

    def begin(self, learner_id: str) -> None:
        """Forget a learner: a new process joined with its id, or the shard has forgotten it."""
        self._told.pop(learner_id, None)
        self.left_out.discard(learner_id)
        for own in self._own.values():
            own.pop(learner_id, None)

    def told(self, learner_id: str) -> LearnerStatistics:
        return self._told.get(learner_id) or LearnerStatistics()

    def hear(
        self, taken: Collection[Contribution], directions: Mapping[str, Direction]
    ) -> tuple[tuple[str, ...], str | None]:
        """Update from a round of the model that became a version. `taken`: includes contributions that are left out.

        Returns the learners that take part again, and the one that is left out from now on.
        """
        counted = {c.learner_id: c.kept * c.norm for c in taken}
        longest = max((length for i, length in counted.items() if i not in self.left_out), default=0.0)
        said = {i: d for i, d in directions.items() if i in self.left_out or counted[i] >= LITTLE * longest}
        for c in taken:
            told = self._told.setdefault(c.learner_id, LearnerStatistics())
            told.kept.append(c.kept)
            if c.learner_id in said:
                told.directions.append(said[c.learner_id])
        opposed = 0.0 if self.strangers else OPPOSED
        repeating = self._repeating(said)
        back = tuple(i for i in sorted(self.left_out & said.keys() - repeating) if self._told[i].is_back(opposed))
        self.left_out.difference_update(back)
        taking, judged = said.keys() - self.left_out, self.strangers or len(counted) <= FEW
        away = [i for i in taking if i in repeating or (judged and self._told[i].points_away(opposed))]
        out = min(away, key=lambda i: (self._told[i].mean_cosine, i), default=None)
        if out is not None:
            self.left_out.add(out)
        if out is not None or back:
            self._listen_anew()
        return back, out

    def _repeating(self, learners: Iterable[str]) -> set[str]:
        """Learners that repeat themselves, measured against the second smallest change among those that take part."""
        full = {i: told for i in learners if (told := self._told[i]).is_full}
        changes = {i: max(0.0, fmean(1.0 - (d.again or 0.0) for d in told.directions)) for i, told in full.items()}
        least = sorted(change for i, change in changes.items() if i not in self.left_out)
        return {i for i in full if len(least) > 1 and changes[i] < LITTLE * least[1] and full[i].along < OPPOSED}

    def _listen_anew(self) -> None:
        """Drop all directions: other learners are merged from now on, so old and new ones cannot be compared."""
        for told in self._told.values():
            told.directions.clear()


def _sure(values: Sequence[float]) -> bool:
    """Whether their mean lies above zero by more than chance."""
    return fmean(values) > ERRORS * stdev(values) / math.sqrt(len(values))
