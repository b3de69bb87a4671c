"""Contributions to buffers -> the next version of them, by the rule of each.

A learner pushes what it has of a buffer, whole, as the difference to nothing. So these values are relative to no base
version, and the formulas are exact also where learners have different ones. And what a learner has contributed last
counts on while it has its lease, also in rounds without it: otherwise a slow learner's data would be in every fourth
version, and in no other. With values x of the learners, weights as in merge.py, for one round, and shares
s = w / sum w:

    mean       sum s x
    variance   sum s x + sum s (m - mean)^2,   m and mean of the running mean beside it
    most       max x
    one        x of the learner with the largest weight, the first of these by id

What is the same at all learners stays that, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diloco_common.manifest import Piece, mean_of
from diloco_server.core.merge import allowed, rows, shares_of
from diloco_server.core.round import Contribution, Round


class Latest:
    """What each learner has contributed last to one fragment of buffers."""

    def __init__(self) -> None:
        self._of: dict[str, Contribution] = {}

    def take(self, closed: Round, live: Collection[str]) -> tuple[list[Contribution], list[Contribution]]:
        """The contributions of a closed round, and those of earlier rounds that count beside them, by learner.

        `live`: who has its lease, and is not left out of rounds.
        """
        mine = {i: self._over_its_rounds(c) for i, c in closed.contributions.items()}
        self._of = {i: c for i, c in self._of.items() if i in live} | mine
        return [mine[i] for i in sorted(mine)], [self._of[i] for i in sorted(self._of.keys() - mine.keys())]

    def _over_its_rounds(self, contribution: Contribution) -> Contribution:
        before = self._of.get(contribution.learner_id)
        return replace(contribution, rounds=max(1, contribution.round - before.round) if before is not None else 1)


def pool(contributions: Sequence[Contribution], pieces: Sequence[Piece]) -> Iterator[tuple[slice, Tensor]]:
    """The merged values, float32, slice by slice of the fragment in order."""
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    weights = shares_of(ordered, allowed(ordered))
    shares = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
    by_name = {piece.tensor: piece for piece in pieces}
    for piece in pieces:
        means = by_name.get(mean_of(piece.tensor)) if piece.rule == "variance" else None
        spread = None if means is None else _spread(ordered, means, shares)
        for bounds, deltas in rows(ordered, piece):
            values = -deltas.double()
            match piece.rule:
                case "most":
                    merged = values.amax(0)
                case "one":
                    merged = values[weights.index(max(weights))]
                case _:
                    merged = _mean(values, shares)
            if spread is not None:
                merged = (merged + spread[bounds.start - piece.offset : bounds.stop - piece.offset]).clamp_(min=0.0)
            yield bounds, merged.float()


def _spread(ordered: Sequence[Contribution], means: Piece, shares: Tensor) -> Tensor:
    """The variance of running means among learners: float64 [num_elements]."""
    values = -torch.cat([deltas for _, deltas in rows(ordered, means)], dim=1).double()
    return ((values - _mean(values, shares)).square() * shares).sum(0)


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    """Of values [M, n], by their shares [M, 1]."""
    first = values[0]
    return first + ((values - first) * shares).sum(0)
