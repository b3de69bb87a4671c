"""Whoever points away from the others has no weight among strangers; whoever agrees as usual has all of it."""

from __future__ import annotations

import math

import pytest
import torch

from diloco_server.core.trust.cuts import agreeing

C = 0.5
"""Cosine of two honest contributions."""
SIZE = 100


@pytest.mark.parametrize(
    ("signs", "kept"),
    [
        ((1, 1, 1), (1, 1, 1)),
        ((1, 1, -1), (1, 1, 0)),
        ((1, 1, 1, 1, 1, 1, -1, -1), (1, 1, 1, 1, 1, 1, 0, 0)),  # liars agree with each other
        ((1, 1, 1, 0.9), (1, 1, 1, 1)),  # agrees a little less
        ((1, 1, 1, 1, 0.725), (1, 1, 1, 1, 1 / 2)),
        ((1, 1, 0), (1, 1, 0)),  # noise
        ((1, -1, 0), (1, 1, 1)),  # nobody agrees
        ((0.8, 0.8, -0.8), (1, 1, 1)),  # or by chance
    ],
)
@pytest.mark.parametrize("member", [False, True])
def test_a_stranger_that_points_away_has_no_weight(signs, kept, member) -> None:
    """`signs`: of each contribution, how much of the common direction is in it."""
    s = torch.tensor(signs, dtype=torch.float64)
    cosines = C * torch.outer(s, s)
    most = [math.inf if member else 1.0] * len(signs)
    shares = [1 / len(signs)] * len(signs)
    expected = shares if member else [one / sum(kept) for one in kept]
    assert agreeing(shares, cosines, most, SIZE) == pytest.approx(expected, abs=1e-9)
