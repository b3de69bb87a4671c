"""Where the contributions to a version point: with the others of their round, and with what their learner said before.

All are compared over the same sample of their elements, so it takes no longer where the fragment is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_server.core.merge import FLOAT32_TINY, rows, shares_of
from diloco_server.core.round import Contribution

STRETCHES, STRETCH = 16, 1 << 12
"""Stretches of a fragment, evenly spread, and elements of each. The cosine of vectors with nothing in common is 0.004
then."""
MANY = 64
"""Contributions, each of which is compared with each. Of more, fewer elements are."""
KEPT = 512
"""Elements of the sample that are kept until the next contribution: 1 KiB for each learner and fragment."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Where a contribution points, in a round where one of them at least has two others."""

    cosine: float
    """With the others: the mean, weighted by how much each of them counts for. Among strangers the median."""
    others: float
    """The same of these with each other; 0 where there is only one."""
    again: float | None = None
    """With what its learner contributed to the version before; None: nothing."""


def directions(
    part: Sequence[Contribution],
    beside: Sequence[Contribution],
    num_elements: int,
    said: dict[str, Tensor],
    *,
    median: bool = False,
) -> dict[str, Direction]:
    """Of each contribution to a fragment of so many elements: those that take part, and those that do not.

    Of two alone, either may be the one that points away, so there are none. `said`: learner -> a sample of what it said
    last. Those of this round take its place. `median`: as among strangers.
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
        pairs = own @ along - 2 * own * along  # of the others with each other, both ways
        agreeing = _ratio(pairs, rest.square() - own.square().sum() + own.square())
    agreeing = torch.where(others > 1, agreeing, 0.0)
    again = [_again(said.get(c.learner_id), now) for c, now in zip(taken, sample, strict=True)]
    said.clear()
    said.update((c.learner_id, now.clone()) for c, now in zip(taken, sample, strict=True))
    found = map(Direction, with_others.tolist(), agreeing.tolist(), again)
    return {c.learner_id: one for c, one in zip(taken, found, strict=True)}


def _compared(taken: Sequence[Contribution], num_elements: int) -> tuple[Tensor, Tensor]:
    """Dot products of each with each over the sample, float64 (M, M), and what is kept of it, bfloat16 (M, n)."""
    stretches = [*_stretches(num_elements, len(taken))]
    every = max(1, sum(s.stop - s.start for s in stretches) // KEPT)
    products, kept = torch.zeros(len(taken), len(taken), dtype=torch.float64), []
    for stretch in stretches:
        for _, some in rows(taken, stretch):
            values = some.double()  # beside one with nearly all of the weight float32 would leave noise of the others
            products += values @ values.T
            kept.append(some[:, ::every].bfloat16())
    return products, torch.cat(kept, 1)


def _stretches(num_elements: int, contributions: int) -> Iterator[slice]:
    length = max(1, int(STRETCH * min(1.0, MANY / contributions) ** 2))
    if num_elements <= STRETCHES * length:
        yield slice(0, num_elements)
        return
    for i in range(STRETCHES):
        start = i * (num_elements - length) // (STRETCHES - 1)
        yield slice(start, start + length)


def _medians(cosines: Tensor, part: Tensor) -> Tensor:
    """Of each, the lower median of those with the others that take part."""
    own = torch.eye(len(cosines), dtype=torch.bool)
    return cosines.masked_fill(own | ~part, math.nan).nanmedian(1).values


def _again(before: Tensor | None, now: Tensor) -> float | None:
    return None if before is None else float(torch.cosine_similarity(before.float(), now.float(), dim=0))


def _ratio(dots: Tensor, sizes: Tensor) -> Tensor:
    """In [-1, 1]; 0 where there is nothing to compare with."""
    return torch.where(sizes > 0, dots / sizes.clamp(min=FLOAT32_TINY), 0.0).clamp(-1.0, 1.0)
