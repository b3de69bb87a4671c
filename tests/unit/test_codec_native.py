"""The C kernels and the torch code are one encoding: the same bytes, the same values, the same refusals.

What the other codec tests prove of whichever runs, holds for both by this.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import random_values
from diloco_common.codec import native
from diloco_common.codec.base import Codec, Part
from diloco_common.codec.blocks import BlockCodec
from diloco_common.codec.plain import Bfloat16, PlainCodec
from diloco_common.codec.registry import get_codec
from diloco_common.errors import NotFinite
from diloco_common.settings import OuterSettings
from diloco_server.core.outer import make_outer_optimizer

SIZE = 3 * 256 + 77
each_encoding = pytest.mark.parametrize("encoding", ["int8", "int4"])
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if native.kernels() is None:
        pytest.skip("this machine has no C compiler, or DILOCO_NATIVE=0")


def encoded(codec: Codec, values: torch.Tensor, **others: torch.Tensor | None) -> torch.Tensor:
    out = torch.zeros(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out, **others)
    return out


def in_both(monkeypatch: pytest.MonkeyPatch, codec: Codec, values: torch.Tensor, **others: torch.Tensor) -> None:
    """Encode with error feedback both ways, and compare bytes and loss."""
    losses = torch.empty_like(values), torch.empty_like(values)
    by_kernels = encoded(codec, values, loss=losses[0], **others)
    with monkeypatch.context() as patched:
        patched.setattr(BlockCodec, "_native", lambda self, data: None)
        by_torch = encoded(codec, values, loss=losses[1], **others)
    assert torch.equal(by_kernels, by_torch)
    assert torch.equal(*losses)


@each_encoding
@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=600))
def test_any_values_become_the_same_bytes(encoding: str, values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_both(monkeypatch, get_codec(encoding), torch.tensor(values))


@each_encoding
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-130, 2.0**-126, 1e-3, 1.0, 1e30, 3.4e38])
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, SIZE])
def test_any_size_and_magnitude_become_the_same_bytes(
    encoding: str, scale: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_both(monkeypatch, get_codec(encoding), random_values(size, 1).clamp(-1, 1).mul_(scale))


@each_encoding
def test_a_difference_and_its_residual_become_the_same_bytes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, minus, plus = (random_values(SIZE, seed) for seed in range(3))
    in_both(monkeypatch, get_codec(encoding), values, minus=minus, plus=plus)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-134, 1e-3, 1.0, 1.004, 3.39e38, 3.4e38])
@pytest.mark.parametrize("size", [1, 31, 256, SIZE])
def test_values_become_the_same_bfloat16(scale: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, the largest magnitudes, numbers below the smallest normal one, and zeros with their signs."""
    values = random_values(size, 1).clamp(-1, 1).mul_(scale)
    values[0] = -0.0
    ties = torch.arange(size, dtype=torch.int32).mul_(0x8000).add_(0x3F800000).view(torch.float32)
    for case in (values, ties):
        by_kernels = encoded(get_codec("bfloat16"), case)
        with monkeypatch.context() as patched:
            patched.setattr(Bfloat16, "_encode_natively", PlainCodec._encode_natively)
            assert torch.equal(encoded(get_codec("bfloat16"), case), by_kernels)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_no_bfloat16(value: float) -> None:
    values = random_values(SIZE, 0)
    values[700] = value
    with pytest.raises(NotFinite, match=f"element 700 of {SIZE}"):
        encoded(get_codec("bfloat16"), values)


@each_encoding
def test_the_loss_may_take_the_place_of_the_values(encoding: str) -> None:
    codec, values, loss = get_codec(encoding), random_values(SIZE, 0), torch.empty(SIZE)
    apart = encoded(codec, values, loss=loss)
    assert torch.equal(encoded(codec, values, loss=values), apart)
    assert torch.equal(values, loss)


@each_encoding
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["values", "minus", "plus"])
def test_what_is_not_finite_is_refused_by_its_index(encoding: str, value: float, where: str) -> None:
    parts = {name: random_values(SIZE, seed) for seed, name in enumerate(("values", "minus", "plus"))}
    parts[where][700] = value
    with pytest.raises(NotFinite, match=f"element 700 of {SIZE}"):
        encoded(get_codec(encoding), parts["values"], minus=parts["minus"], plus=parts["plus"])


@each_encoding
@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (0, 1), (255, 257), (256, 512), (3, 700), (769, SIZE)])
def test_any_range_decodes_adds_and_measures_alike(
    encoding: str, start: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = get_codec(encoding)
    data, before = encoded(codec, random_values(SIZE, 4)), random_values(stop - start, 5)
    whole = torch.empty(SIZE)
    codec.decode(data, whole)
    sums, squares = [], []
    for by_torch in (False, True):
        with monkeypatch.context() as patched:
            if by_torch:
                patched.setattr(BlockCodec, "_native", lambda self, data: None)
                again = torch.empty(SIZE)
                codec.decode(data, again)
                assert torch.equal(again, whole)
            out = before.clone()
            codec.accumulate_range(data, SIZE, start, out, 0.3)
            sums.append(out)
            squares.append(codec.sum_squares(data, SIZE, start, stop))
    torch.testing.assert_close(sums[0], before + 0.3 * whole[start:stop])
    torch.testing.assert_close(sums[0], sums[1])
    assert squares[0] == pytest.approx(float(whole[start:stop].double().square().sum()), rel=1e-6)
    assert squares[1] == pytest.approx(squares[0], rel=1e-5)


@each_encoding
@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (0, 1), (255, 257), (256, 512), (3, 700), (769, SIZE)])
def test_a_weighted_sum_is_the_same_sum(encoding: str, start: int, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over chunks that do not begin at the same element of the fragment."""
    codec, weights, shift = get_codec(encoding), [0.3, -2.0, 1e-3], 512
    sizes = [SIZE, SIZE + shift, SIZE]
    chunks = [encoded(codec, random_values(size, seed)) for seed, size in enumerate(sizes)]
    firsts = [start + size - SIZE for size in sizes]
    parts = [Part(*part) for part in zip(chunks, sizes, firsts, strict=True)]
    by_kernels, by_torch = torch.full((stop - start,), torch.nan), torch.full((stop - start,), torch.nan)
    native = codec.native_sum(parts, weights)
    assert native is not None
    squares = codec.weighted_sum(parts, weights, by_kernels)
    with monkeypatch.context() as patched:
        patched.setattr(BlockCodec, "_native", lambda self, data: None)
        again = codec.weighted_sum(parts, weights, by_torch)
    torch.testing.assert_close(by_kernels, by_torch)
    assert squares == pytest.approx(float(by_kernels.double().square().sum()), rel=1e-6)
    assert squares == pytest.approx(again, rel=1e-5)
    assert native.squares(stop - start) == squares

    theta, velocity = random_values(stop - start, 7), random_values(stop - start, 8)
    one_by_one = theta.clone(), velocity.clone()
    native.nesterov(theta, velocity, 0.5, 0.7)
    make_outer_optimizer(OuterSettings(momentum=0.5, lr=0.7)).step(one_by_one[0], by_kernels, [one_by_one[1]], 1)
    assert torch.equal(theta, one_by_one[0])
    assert torch.equal(velocity, one_by_one[1])


@each_encoding
@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 1e-3, 1.0, 3.3e38])
@pytest.mark.parametrize("size", [1, 255, 256, SIZE])
def test_a_change_and_its_anchor_become_the_same_bytes(
    encoding: str, scale: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = get_codec(encoding)
    values, base = random_values(size, 1).clamp(-1, 1).mul_(scale), random_values(size, 2).clamp(-1, 1).mul_(scale)
    values.clamp_(-1e38, 1e38).add_(base, alpha=0.5)
    results = []
    for by_torch in (False, True):
        change, anchor = torch.zeros(codec.num_bytes(size), dtype=torch.uint8), torch.zeros(size, dtype=torch.bfloat16)
        with monkeypatch.context() as patched:
            if by_torch:
                patched.setattr(BlockCodec, "_native", lambda self, data: None)
            codec.encode_change(values, base.bfloat16(), change, anchor)
        results.append((change, anchor))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].view(torch.int16), results[1][1].view(torch.int16))


@each_encoding
def test_a_change_that_is_not_finite_is_refused_by_its_index(encoding: str) -> None:
    codec, values = get_codec(encoding), random_values(SIZE, 0)
    values[700] = torch.nan
    change, anchor = torch.zeros(codec.num_bytes(SIZE), dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.bfloat16)
    with pytest.raises(NotFinite, match=f"element 700 of {SIZE}"):
        codec.encode_change(values, torch.zeros(SIZE, dtype=torch.bfloat16), change, anchor)
