"""How much a stranger's contribution may count for, whatever it claims and whatever is in it. Arithmetic on numbers.

A member's is not cut: the formulas are the published ones then. `most` says, for each contribution of a round, how
many times the median it may be: infinity for members, from 1 to `MOST` for strangers. Of an even number it is the lower
median: half of the learners cannot raise it, and of two learners neither can; a liar can only make a round shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high, median_low

from torch import Tensor

MOST = 2.0
"""No stranger's weight counts for more than this many times the median weight, and only with as many times the median
of inner steps."""
NONE, FULL = 0.6, 0.85
"""Of the usual agreement: a stranger with as much counts for nothing, in full; in proportion in between."""
CHANCE = 4.0
"""Standard deviations of the cosine of vectors with nothing in common. One is 1 / sqrt(elements)."""


def capped(weights: Sequence[float], most: Sequence[float]) -> list[float]:
    """The weights, none above so many times their median.

    Of M strangers one then has at most 2 / M of all, where it is allowed once: half of the others weigh as much.
    """
    if all(map(math.isinf, most)):
        return [*weights]
    usual = median_low(weights)
    return [min(weight, times * usual) for weight, times in zip(weights, most, strict=True)]


def clipping(lengths: Sequence[float], most: Sequence[float]) -> list[float]:
    """What to multiply vectors of these lengths with, so that none is longer than so many times their median.

    Where most lengths are 0 the median is that of the others: few learners may have met the rows of an embedding, or
    the expert, and their work is no lie. Whoever is alone there is bounded by the norm guard only.
    """
    if all(map(math.isinf, most)):
        return [1.0] * len(lengths)
    usual = median_low(lengths) or median_low([length for length in lengths if length > 0] or [0.0])
    return [min(1.0, times * usual / one) if one > 0 else 1.0 for one, times in zip(lengths, most, strict=True)]


def allowed(steps: Sequence[int], strange: Sequence[bool]) -> list[float]:
    """How often the median each contribution may count for. `strange`: whose are bounded at all.

    A stranger's once, and up to `MOST` times in proportion to inner steps above their median. So where slow learners
    are many, the fast ones are not cut down to them. Of weights, and of lengths in the radius of RDA, which scales a
    step and cannot turn it. Not in a mean (`once`), where length is influence as weight is: with twice of both a liar
    would outvote seven learners that agree little.
    """
    usual = median_low(steps)
    return [
        min(MOST, max(1.0, one / usual)) if is_strange else math.inf
        for one, is_strange in zip(steps, strange, strict=True)
    ]


def once(most: Sequence[float]) -> list[float]:
    """The same, without what more steps allow."""
    return [times if math.isinf(times) else 1.0 for times in most]


def agreeing(shares: Sequence[float], cosines: Tensor, most: Sequence[float], num_elements: int) -> list[float]:
    """The shares, less of a stranger's that agrees with the others less than `FULL` times as much as is usual, and
    nothing below `NONE` times. `cosines`: (M, M), M > 2, of so many elements.

    How much one agrees is the median of its cosines to the others: a minority of liars, who may agree with each other,
    changes it for nobody. The higher median, so that of two others one that is honest suffices.
    """
    rows = cosines.tolist()
    agrees = [median_high([*row[:i], *row[i + 1 :]]) for i, row in enumerate(rows)]
    usual = median_low(agrees)
    if usual <= CHANCE / math.sqrt(num_elements):
        return [*shares]  # nobody can say who points away
    kept = [min(1.0, max(0.0, (one / usual - NONE) / (FULL - NONE))) for one in agrees]
    left = [s if math.isinf(times) else s * part for s, part, times in zip(shares, kept, most, strict=True)]
    return [one / sum(left) for one in left]
