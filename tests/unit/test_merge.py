"""How contributions are read for a merge: chunks, pieces, norms, damaged bytes. tests/numerics proves the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from builders import decoded, make_contribution, merge, one_piece, random_values
from diloco_common.codec import Payload, encode_payload
from diloco_common.wire.manifest import Piece
from diloco_server.core.merge import piece_norms

SIZE = 1000


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rule", ["rda", "mean", "agreement"])
def test_contributions_stay_compressed_until_they_are_merged(encoding: str, rule: str) -> None:
    vectors = [random_values(SIZE, seed) for seed in range(3)]
    compressed = [make_contribution(i, v, encoding=encoding) for i, v in zip("abc", vectors, strict=True)]
    plain = [make_contribution(i, v) for i, v in zip("abc", vectors, strict=True)]
    got = merge(compressed, one_piece(SIZE), rule)
    expected = merge(plain, one_piece(SIZE), rule)
    limit = {"float32": 0.0, "bfloat16": 0.01, "int8": 0.02, "int4": 0.3}[encoding]
    assert float((got - expected).norm() / expected.norm()) <= limit

    received = [make_contribution(c.learner_id, decoded(c.payload)) for c in compressed]
    torch.testing.assert_close(got, merge(received, one_piece(SIZE), rule), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("values", "finite"), [([1.0, 2.0], True), ([1.0, math.nan], False), ([math.inf, 0.0], False)])
def test_a_norm_is_finite_exactly_where_its_piece_is(values: list[float], finite: bool) -> None:
    pieces = (Piece("a", 0, 2, 0), Piece("b", 0, 2, 2))
    data = torch.tensor([0.5, 0.5, *values]).numpy().tobytes()
    header = encode_payload(torch.zeros(4), "float32").header
    first, second = piece_norms(Payload(header, (data,)), pieces)
    assert first == pytest.approx(0.5**0.5)
    assert math.isfinite(second) is finite


def test_values_whose_squares_overflow_count_as_infinite() -> None:
    (norm,) = piece_norms(encode_payload(torch.full((4,), 1e30), "float32"), one_piece(4))
    assert norm == math.inf
