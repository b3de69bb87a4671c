"""Radial-directional averaging and the mean: their formulas, their limits, and that order changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import dumb_merge
import pytest
import torch
from examples.centered_clip import centered_clip
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from builders import make_contribution, merge, one_piece, random_values
from diloco_common.codec import encode_payload
from diloco_common.wire.manifest import Piece
from diloco_server.core.influence import Influence
from diloco_server.core.merge import MergeRule, piece_norms
from diloco_server.core.round import Contribution
from diloco_simulator.verify.published import FORMULAS

LEARNERS = "abcdefgh"
SIZE = 700
"""Of a fragment: three chunks of 256, the last with fewer."""


def contributions(
    vectors: Sequence[Tensor], weights: Sequence[tuple[int, int]] | None = None,
    pieces: tuple[Piece, ...] | None = None, *, strange: bool = False,
) -> list[Contribution]:  # fmt: skip
    """One per vector; `weights` are (tokens, steps). `strange`: bounded as among strangers."""
    weights = weights or [(1, 1)] * len(vectors)
    sent = [
        make_contribution(LEARNERS[i], v, tokens=tokens, steps=steps, pieces=pieces)
        for i, (v, (tokens, steps)) in enumerate(zip(vectors, weights, strict=True))
    ]
    return [*Influence(strangers=True).bound(0, sent, None)[0].values()] if strange else sent


def merged(
    vectors: Sequence[Tensor],
    rule: str | MergeRule = "rda",
    weights: Sequence[tuple[int, int]] | None = None,
    pieces: tuple[Piece, ...] | None = None,
    *,
    strange: bool = False,
) -> Tensor:
    pieces = pieces or one_piece(vectors[0].numel())
    return merge(contributions(vectors, weights, pieces, strange=strange), pieces, rule)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def randoms(count: int) -> list[Tensor]:
    return [random_values(SIZE, seed) * (seed + 1) for seed in range(count)]


# ------------------------------------------------------------------ formulas


WEIGHTS = {
    "equal": lambda i: (10, 1),
    "of equal batches, unequal speeds": lambda i: (10 * (i + 1), i + 1),
    "wild": lambda i: (10**i, 1 + 7 * i % 5),
}


@pytest.mark.parametrize("rule", FORMULAS)
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("liar", [1.0, 1e-3, -500.0])
def test_every_rule_is_its_formula(rule: str, count: int, weights: str, liar: float) -> None:
    vectors = [*randoms(count - 1), liar * random_values(SIZE, 99)]
    pairs = [WEIGHTS[weights](i) for i in range(count)]
    by_formula = dumb_merge.published(rule, [(v, *pair) for v, pair in zip(vectors, pairs, strict=True)]).float()
    result, scale = merged(vectors, rule, pairs), max(1.0, float(by_formula.abs().max()))
    near = 3e-4 if rule == "agreement" else 1e-5  # of a cosine, where one is 5,000 times as long
    torch.testing.assert_close(result / scale, by_formula / scale, rtol=near, atol=near / 10)


@pytest.mark.parametrize(("rule", "by_hand"), [("mean", 3.5), ("agreement", 0.52 * 3.5), ("rda", 5 / 2**0.5)])
def test_the_formulas_give_what_a_hand_computes(rule: str, by_hand: float) -> None:
    """(3, 4) and (4, 3): lengths 5, cosine 0.96."""
    vectors = [torch.tensor(v, dtype=torch.float64) for v in ([3.0, 4.0], [4.0, 3.0])]
    assert FORMULAS[rule](vectors, [0.5, 0.5]).tolist() == pytest.approx([by_hand, by_hand])


@pytest.mark.parametrize("liar", [1.0, 1e-3, -500.0])
def test_centered_clipping_from_the_examples_is_its_formula(liar: float) -> None:
    vectors = [*randoms(4), liar * random_values(SIZE, 99)]
    by_formula = dumb_merge.centered_clip([(v, 10, 1) for v in vectors]).float()
    assert_close(merged(vectors, centered_clip, [(10, 1)] * 5), by_formula)


# ------------------------------------------------------------------ properties of RDA


@pytest.mark.parametrize(
    "other", [lambda v, w: w, lambda v, w: -v / 2, lambda v, w: 0 * v], ids=["apart", "against", "0"]
)
def test_contributions_that_do_not_agree_are_not_shortened(other: Callable[[Tensor, Tensor], Tensor]) -> None:
    v, w = randoms(2)
    w -= (v @ w) / (v @ v) * v  # at right angles, but for rounding
    vectors = [v, other(v, w)]
    assert_close(merged(vectors, "agreement"), merged(vectors, "mean"))


def test_pieces_marked_for_it_take_the_mean_and_the_others_rda_each_on_its_own() -> None:
    pieces = (
        Piece("embedding", 0, 300, 0, "mean"), Piece("w", 0, 150, 300), Piece("x", 0, 250, 450)
    )  # fmt: skip
    vectors = randoms(2)
    result = merged(vectors, "rda", [(4, 4), (6, 6)], pieces)
    for part, rule in ((slice(300), "mean"), (slice(300, 450), "rda"), (slice(450, 700), "rda")):
        sent = [(v[part], n, n) for v, n in zip(vectors, (4, 6), strict=True)]
        assert_close(result[part], dumb_merge.published(rule, sent).float())


# ------------------------------------------------------------------ one liar


def signal(count: int, agreement: float = 0.25) -> tuple[Tensor, list[Tensor]]:
    """A direction, and vectors of norm about 1 whose cosine with each other is `agreement`."""
    common = random_values(SIZE, 1000) / SIZE**0.5
    own = [random_values(SIZE, i) / SIZE**0.5 for i in range(count)]
    return common / common.norm(), [agreement**0.5 * common + (1 - agreement) ** 0.5 * v for v in own]


LIES = {
    "sign flip x10": lambda own, others: -10 * own,
    "sign flip x500": lambda own, others: -500 * own,
    "largest that passes as finite": lambda own, others: -1e16 * own,
    "opposite of the others": lambda own, others: -10 * torch.stack(others).mean(0),
    "nearly nothing": lambda own, others: 1e-12 * own,
    "nothing": lambda own, others: 0 * own,
}


@pytest.mark.parametrize("rule", FORMULAS)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("tokens", "steps"), [(10, 1), (2**40, 1), (2**60, 2**30), (1, 2**30)])
def test_one_liar_of_eight_strangers_neither_turns_a_merge_nor_lengthens_it(
    rule: str, lie: str, tokens: int, steps: int
) -> None:
    direction, honest = signal(7)
    clean = merged(honest, rule)
    liar = LIES[lie](random_values(SIZE, 7) / SIZE**0.5, honest)
    result = merged([*honest, liar], rule, [(10, 1)] * 7 + [(tokens, steps)], strange=True)
    assert float(result.norm()) <= 1.25 * float(clean.norm())
    assert float(result @ direction) >= 0.3 * float(clean @ direction)


def test_what_few_learners_have_met_is_not_erased() -> None:
    """Rows of an embedding that six of eight learners have not met: their zeros are no vote on its length."""
    v, w = randoms(2)
    nothing = [torch.zeros(SIZE)] * 6
    for rule in ("rda", "mean"):
        result = merged([v, *nothing, w / 2], rule, strange=True)
        assert float(result @ v) >= float(v @ v) / 8 * 0.9
    assert_close(merged([v, *nothing], "mean", strange=True), v / 7)


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_a_stranger_does_not_hide_a_lie_where_the_others_have_zeros(rule: str) -> None:
    """A piece that nobody else has met is no place for more than a whole contribution has as a rule."""
    pieces = (Piece("rare", 0, 300, 0), Piece("w", 0, 400, 300))
    honest = [torch.cat([torch.zeros(300), random_values(400, seed)]) for seed in range(3)]
    lie = torch.cat([1000 * random_values(300, 4), random_values(400, 5)])
    result = merged([*honest, lie], rule, pieces=pieces, strange=True)
    assert float(result.norm()) <= 1.5 * max(float(v.norm()) for v in honest)


@pytest.mark.parametrize("rule", ["rda", centered_clip])
def test_three_colluding_liars_of_eight_are_withstood(rule: str | MergeRule) -> None:
    direction, honest = signal(5)
    lie = -10 * torch.stack(honest).mean(0)
    pairs = [(10, 1)] * 5 + [(2**40, 2)] * 3
    result = merged([*honest, lie, lie, lie], rule, pairs, strange=True)
    assert float(result.norm()) <= 1.5 * float(merged(honest, rule).norm())
    assert float(result @ direction) > 0


FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


@given(vectors=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=4), tokens=st.integers(1, 10**9))
@example(vectors=[[0.0, 0.0, 1e7], [0.0, 0.0, 1e7], [0.0, 0.0, 2.0**-107]], tokens=1)
@example(vectors=[[0.0, 0.0, 2.0**-140]] * 2, tokens=1)
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
    v, w = random_values(SIZE, 0), random_values(SIZE, 2)
    result = merged([v, scale * random_values(SIZE, 1), w], "rda", [(tokens, 1)] * 3)
    assert bool(result.isfinite().all())
    assert 0.4 * float(v.norm()) <= float(result.norm()) <= 1.1 * float(v.norm())


# ------------------------------------------------------------------ order, chunks, buffers


@pytest.mark.parametrize("rule", FORMULAS)
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


def test_norms_are_those_of_the_pieces_across_chunks() -> None:
    pieces = (Piece("a", 0, 250, 0), Piece("b", 0, 300, 250), Piece("c", 0, 150, 550))
    v = random_values(SIZE, 0)
    norms = piece_norms(encode_payload(v.clone(), "float32", chunk_elements=256), pieces)
    assert norms == pytest.approx([float(v[s].norm()) for s in (slice(0, 250), slice(250, 550), slice(550, 700))])
