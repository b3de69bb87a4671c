"""Radial-directional averaging and the mean: their formulas, their limits, and that order changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from builders import make_contribution, merge, one_piece, random_values
from diloco_common.codec import encode_payload
from diloco_common.manifest import Piece
from diloco_server.core.merge import piece_norms
from diloco_server.core.round import Contribution

LEARNERS = "abcdefgh"
SIZE = 700
"""Of a fragment: three chunks of 256, the last with fewer."""


def contributions(
    vectors: Sequence[Tensor], weights: Sequence[tuple[int, int]] | None = None, pieces: tuple[Piece, ...] | None = None
) -> list[Contribution]:
    """One per vector; `weights` are (tokens, steps)."""
    weights = weights or [(1, 1)] * len(vectors)
    return [
        make_contribution(LEARNERS[i], v, tokens=tokens, steps=steps, pieces=pieces)
        for i, (v, (tokens, steps)) in enumerate(zip(vectors, weights, strict=True))
    ]


def merged(
    vectors: Sequence[Tensor],
    rule: str = "rda",
    weights: Sequence[tuple[int, int]] | None = None,
    pieces: tuple[Piece, ...] | None = None,
) -> Tensor:
    pieces = pieces or one_piece(vectors[0].numel())
    return merge(contributions(vectors, weights, pieces), pieces, rule)


def rda_by_formula(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """(sum w|v| / sum w) * unit(sum w unit(v) / sum w), in float64."""
    doubles = [v.double() for v in vectors]
    radius = sum(w * v.norm() for w, v in zip(weights, doubles, strict=True)) / sum(weights)
    direction = sum(w * v / v.norm() for w, v in zip(weights, doubles, strict=True))
    assert isinstance(direction, Tensor)
    return (radius * direction / direction.norm()).float()


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def randoms(count: int) -> list[Tensor]:
    return [random_values(SIZE, seed) * (seed + 1) for seed in range(count)]


# ------------------------------------------------------------------ formulas


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rda_is_its_formula(count: int) -> None:
    weights = [(10 * (i + 1), i + 1) for i in range(count)]
    by_formula = rda_by_formula(randoms(count), [tokens**2 / steps for tokens, steps in weights])
    assert_close(merged(randoms(count), "rda", weights), by_formula)


def test_the_mean_is_weighted_by_tokens_squared_over_steps() -> None:
    a, b = randoms(2)
    # 20^2 / 4 = 100 and 60^2 / 12 = 300
    assert_close(merged([a, b], "mean", [(20, 4), (60, 12)]), 0.25 * a + 0.75 * b)


def test_a_contribution_weighs_tokens_squared_over_steps() -> None:
    assert make_contribution("a", torch.ones(3), tokens=30, steps=4).weight == 225.0


# ------------------------------------------------------------------ properties of RDA


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_one_contribution_comes_back_as_it_is(rule: str) -> None:
    v = random_values(SIZE, 0)
    assert torch.equal(merged([v], rule, [(123, 7)]), v)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_equal_contributions_come_back_as_they_are(rule: str) -> None:
    v = random_values(SIZE, 0)
    assert_close(merged([v, v, v], rule, [(1, 1), (50, 3), (7, 2)]), v)


def test_rda_of_equal_norms_has_that_norm_and_the_mean_has_less() -> None:
    vectors = [v / v.norm() * 5.0 for v in randoms(8)]
    assert float(merged(vectors, "rda").norm()) == pytest.approx(5.0, rel=1e-5)
    assert float(merged(vectors, "mean").norm()) == pytest.approx(5.0 / 8**0.5, rel=0.1)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_scaling_all_weights_changes_nothing(rule: str) -> None:
    weights = [(3, 2), (5, 1), (9, 4)]
    scaled = [(100 * tokens, steps) for tokens, steps in weights]
    assert_close(merged(randoms(3), rule, scaled), merged(randoms(3), rule, weights))


def test_directions_that_cancel_fall_back_to_the_mean() -> None:
    v = random_values(SIZE, 0)
    assert_close(merged([v, -3 * v], "rda"), -v)  # the mean; RDA would divide by zero


def test_only_the_piece_whose_directions_cancel_falls_back() -> None:
    pieces = (Piece("a", 0, 300, 0, False), Piece("b", 0, 400, 300, False))
    a, b, c = random_values(300, 0), random_values(400, 1), 2 * random_values(400, 2)
    result = merged([torch.cat([a, b]), torch.cat([-3 * a, c])], "rda", pieces=pieces)
    assert_close(result[:300], -a)
    assert_close(result[300:], rda_by_formula([b, c], [1.0, 1.0]))


def test_a_contribution_of_zeros_shortens_the_result_and_does_not_turn_it() -> None:
    v = random_values(SIZE, 0)
    assert_close(merged([v, torch.zeros(SIZE)], "rda"), v / 2)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_zeros_merge_to_zeros(rule: str) -> None:
    assert torch.equal(merged([torch.zeros(SIZE)] * 3, rule), torch.zeros(SIZE))


def test_pieces_marked_for_it_take_the_mean_and_the_others_rda_each_on_its_own() -> None:
    pieces = (
        Piece("embedding", 0, 300, 0, True), Piece("w", 0, 150, 300, False), Piece("x", 0, 250, 450, False)
    )  # fmt: skip
    vectors = randoms(2)
    result = merged(vectors, "rda", [(1, 1), (2, 1)], pieces)
    assert_close(result[:300], (vectors[0] + 4 * vectors[1])[:300] / 5)
    for part in (slice(300, 450), slice(450, 700)):
        assert_close(result[part], rda_by_formula([v[part] for v in vectors], [1.0, 4.0]))


FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


@given(vectors=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=4), tokens=st.integers(1, 10**9))
def test_what_was_finite_stays_finite(vectors: list[list[float]], tokens: int) -> None:
    tensors = [torch.tensor(v) for v in vectors]
    norms = [float(v.norm()) for v in tensors]
    assume(all(n < 1e18 for n in norms))
    result = merged(tensors, "rda", [(tokens, 1)] * len(tensors))
    assert bool(result.isfinite().all())
    underflow = 1e-18  # squares of smaller values are 0 in float32, and so is their norm
    assert float(result.double().norm()) <= max(norms) * 1.0001 + underflow


@pytest.mark.parametrize("tokens", [1, 10**6, 10**10, 2**63])
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e-22, 1e-38, 1e-44])
def test_neither_tiny_values_nor_huge_weights_leave_the_range_of_float32(scale: float, tokens: int) -> None:
    """w / |v| may overflow neither as a factor nor in the squares of the sum: an exception, or nothing merged."""
    v = random_values(SIZE, 0)
    result = merged([v, scale * random_values(SIZE, 1)], "rda", [(tokens, 1)] * 2)
    assert bool(result.isfinite().all())
    assert 0.4 * float(v.norm()) <= float(result.norm()) <= 1.1 * float(v.norm())


# ------------------------------------------------------------------ order, chunks, buffers


@pytest.mark.parametrize("rule", ["rda", "mean"])
@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_the_order_of_contributions_changes_no_bit(rule: str, encoding: str) -> None:
    weights = [(3, 2), (50, 1), (9, 4), (1000, 7)]
    four = [
        make_contribution(LEARNERS[i], v, tokens=t, steps=s, encoding=encoding)
        for i, (v, (t, s)) in enumerate(zip(randoms(4), weights, strict=True))
    ]
    results = [merge(p, one_piece(SIZE), rule) for p in itertools.permutations(four)]
    assert len(results) == 24
    assert all(torch.equal(r, results[0]) for r in results)
    assert bool(results[0].abs().sum() > 0)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_contributions_may_be_chunked_differently(rule: str) -> None:
    pieces = (Piece("a", 0, 333, 0, False), Piece("b", 0, 367, 333, False))
    a, b = randoms(2)
    mixed = [
        make_contribution("a", a, pieces=pieces, chunk_elements=256),
        make_contribution("b", b, pieces=pieces, chunk_elements=512),
    ]
    assert_close(merge(mixed, pieces, rule), merged([a, b], rule, pieces=pieces))


def test_norms_are_those_of_the_pieces_across_chunks() -> None:
    pieces = (Piece("a", 0, 250, 0, False), Piece("b", 0, 300, 250, False), Piece("c", 0, 150, 550, False))
    v = random_values(SIZE, 0)
    norms = piece_norms(encode_payload(v.clone(), "float32", chunk_elements=256), pieces)
    assert norms == pytest.approx([float(v[s].norm()) for s in (slice(0, 250), slice(250, 550), slice(550, 700))])
