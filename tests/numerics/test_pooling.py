"""How buffers of learners become one, against the formulas written down plainly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from builders import make_contribution
from diloco_common.wire.manifest import Piece, Rule
from diloco_server.core.merge import pool

SIZES: tuple[tuple[str, Rule, int], ...] = (
    ("codebook", "mean", 500), ("n.num_batches_tracked", "most", 1), ("n.running_mean", "mean", 300),
    ("n.running_var", "variance", 300), ("u", "one", 40),
)  # fmt: skip
"""Pieces that begin and end inside chunks of 256."""


def pieces_of(sizes: tuple[tuple[str, Rule, int], ...]) -> dict[str, Piece]:
    found, offset = {}, 0
    for name, rule, size in sizes:
        found[name] = Piece(name, 0, size, offset, rule)
        offset += size
    return found


PIECES = pieces_of(SIZES)
TOTAL = sum(size for *_, size in SIZES)


def pooled(values: list[Tensor], weights: list[int]) -> Tensor:
    """Weights as tokens of one step each would give them, were the largest not cut to the median."""
    pieces = tuple(PIECES.values())
    contributions = [
        make_contribution("edcba"[i], -v, pieces=pieces, tokens=n, steps=n)
        for i, (v, n) in enumerate(zip(values, weights, strict=True))
    ]
    merged = torch.full((TOTAL,), torch.nan)
    for bounds, part in pool(contributions, pieces):
        merged[bounds] = part
    return merged


def values_of(learner: int) -> Tensor:
    generator = torch.Generator().manual_seed(learner)
    values = torch.randn(TOTAL, generator=generator) + 3.0 * learner
    return torch.where(torch.arange(TOTAL) >= PIECES["n.running_var"].offset, values.abs(), values)


@pytest.mark.parametrize("weights", [[4], [4, 4], [4, 4, 1], [1, 2, 2]], ids=str)
def test_buffers_are_merged_by_the_rules_on_paper(weights: list[int]) -> None:
    values = [values_of(i) for i in range(len(weights))]
    merged, share = pooled(values, weights), [w / sum(weights) for w in weights]
    of = {name: [v[p.bounds].double() for v in values] for name, p in PIECES.items()}

    def mean(xs: list[Tensor]) -> Tensor:
        return sum((s * x for s, x in zip(share, xs, strict=True)), torch.zeros(()))

    means = of["n.running_mean"]
    expected = {
        "codebook": mean(of["codebook"]),
        "n.num_batches_tracked": torch.stack(of["n.num_batches_tracked"]).max(0).values,
        "n.running_mean": mean(means),
        # E[x^2] - E[x]^2 of all the data together
        "n.running_var": mean([v + m**2 for v, m in zip(of["n.running_var"], means, strict=True)]) - mean(means) ** 2,
        "u": of["u"][max(i for i, w in enumerate(weights) if w == max(weights))],  # the ids descend
    }
    for name, piece in PIECES.items():
        torch.testing.assert_close(merged[piece.bounds].double(), expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_pooled_statistics_are_those_of_all_data_together() -> None:
    data = [torch.randn(64, 300) * (1 + i) + 5 * i for i in range(3)]
    values = []
    for batch in data:
        one = torch.zeros(TOTAL)
        one[PIECES["n.running_mean"].bounds] = batch.mean(0)
        one[PIECES["n.running_var"].bounds] = batch.var(0, unbiased=False)
        values.append(one)
    merged, together = pooled(values, [1, 1, 1]), torch.cat(data)
    torch.testing.assert_close(merged[PIECES["n.running_mean"].bounds], together.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        merged[PIECES["n.running_var"].bounds], together.var(0, unbiased=False), rtol=1e-4, atol=1e-4
    )


def test_what_all_have_alike_stays_that_bit_for_bit_and_no_variance_is_negative() -> None:
    alike = values_of(0) / 3
    assert torch.equal(pooled([alike] * 3, [3, 3, 1]), alike)
    lies = [torch.full((TOTAL,), -7.0), torch.full((TOTAL,), -7.0)]
    assert (pooled(lies, [1, 1])[PIECES["n.running_var"].bounds] == 0).all()


def test_neither_the_order_nor_the_slices_decide() -> None:
    values = [values_of(i) for i in range(3)]
    pieces = tuple(PIECES.values())
    one = [make_contribution("abc"[i], -v, pieces=pieces) for i, v in enumerate(values)]
    other = [make_contribution("abc"[i], -v, pieces=pieces, chunk_elements=1024) for i, v in enumerate(values)]
    merged = [torch.cat([part for _, part in pool(some, pieces)]) for some in (one, one[::-1], other)]
    assert torch.equal(merged[0], merged[1])
    assert torch.equal(merged[0], merged[2])
