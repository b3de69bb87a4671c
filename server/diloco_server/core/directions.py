"""Compares the direction of each contribution with the others of its round, and with its learner's previous one.

All are compared on one sample of their elements, so the time does not grow with the fragment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_server.core.merge import FLOAT32_TINY, rows, shares_of
from diloco_server.core.round import Contribution

STRETCHES, STRETCH = 16, 1 << 12
"""Sampled stretches of a fragment, evenly spread, and their length. Unrelated vectors then have a cosine of 0.004."""
MANY = 64
"""Above this many contributions, which are compared in pairs, fewer elements are sampled."""
KEPT = 512
"""Elements of the sample kept until the next contribution: 1 KiB for each learner and fragment."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The direction of a contribution, in a round where at least one has two others."""

    cosine: float
    """Cosine with the others: the mean, by how much each counts; among strangers, the median."""
    others: float
    """The others' cosine with each other; 0 if there is only one."""
    again: float | None = None
    """Cosine with its learner's contribution to the version before; None: there was none."""


def directions(
    part: Sequence[Contribution],
    beside: Sequence[Contribution],
    num_elements: int,
    said: dict[str, Tensor],
    *,
    median: bool = False,
) -> dict[str, Direction]:
    """The direction of each contribution to a fragment of `num_elements`: of `part`, which is merged, and of `beside`.

    Empty where there are only two, since either may point away. `said`: learner -> the sample of its last contribution;
    replaced by those of this round. `median`: compare as among strangers.
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
    every = max(1, sum(s.stop - s.start for s in stretches) // KEPT)
    products, kept = torch.zeros(len(taken), len(taken), dtype=torch.float64), []
    for stretch in stretches:
        for _, some in rows(taken, stretch):
            values = some.double()  # float32 would lose the others beside one with nearly all of the weight
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
