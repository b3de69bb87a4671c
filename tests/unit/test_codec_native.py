"""The C kernels and the torch code are one encoding: the same bytes, the same values, the same refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from builders import make_contribution, one_piece, random_values
from diloco_common.codec import base, native
from diloco_common.codec.base import BFLOAT16_MAX, ChunkPart, Codec
from diloco_common.codec.blocks import BlockCodec
from diloco_common.codec.registry import PlainCodec, get_codec
from diloco_common.errors import BadPayload, NotFinite
from diloco_common.settings import OuterSettings
from diloco_common.wire.manifest import Fragment
from diloco_server.core.arithmetic import Values, VersionRules, step
from diloco_server.core.outer import make_outer_optimizer

SIZE = 3 * 256 + 77
TOP = 4096
FRAGMENT = Fragment(0, 0, one_piece(TOP))
each_encoding = pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
each_compressed = pytest.mark.parametrize("encoding", ["int8", "int4"])
each_change = pytest.mark.parametrize("encoding", ["int8", "int4"])
SIZES = pytest.mark.parametrize("size", [1, 255, 256, SIZE])
SCALES = pytest.mark.parametrize("scale", [0.0, 2.0**-130, 1.0, 3.3e38])
MANY = 2 * TOP + 65
RANGES = pytest.mark.parametrize(
    ("start", "stop"),
    [(0, MANY), (0, 1), (255, 257), (256, 512), (3, 700), (TOP, 2 * TOP), (256, TOP + 3), (TOP + 512, MANY)],
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    found = native.find()
    if isinstance(found, str):
        assert "cannot be loaded" not in found, found
        pytest.skip(found)


@contextmanager
def by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for codec in (BlockCodec, PlainCodec):
            patched.setattr(codec, "_native", lambda self, data: None)
        patched.setattr(base, "kernels", lambda: None)
        yield


def both_ways(compute: Callable[[], list[torch.Tensor]]) -> None:
    """By the kernels and by torch: the same bits."""
    by_kernels = compute()
    with by_torch():
        without = compute()
    for one, other in zip(by_kernels, without, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def encoded(codec: Codec, values: torch.Tensor, **others: torch.Tensor | None) -> torch.Tensor:
    out = torch.zeros(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out, **others)
    return out


def in_both(codec: Codec, values: torch.Tensor, **others: torch.Tensor) -> None:
    """Encode with error feedback both ways, and compare bytes and loss; in bfloat16 it is that in float32, rounded."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parts = others | {"plus": others["plus"].to(dtype)} if "plus" in others else others

        def encoding(dtype: torch.dtype = dtype, parts: dict[str, torch.Tensor] = parts) -> list[torch.Tensor]:
            found.append(torch.empty_like(values, dtype=dtype))
            return [encoded(codec, values, loss=found[-1], **parts), found[-1]]

        both_ways(encoding)
    if "plus" not in others:
        assert torch.equal(found[0].clamp(-BFLOAT16_MAX, BFLOAT16_MAX).bfloat16(), found[-1])


def verdict(codec: Codec, data: torch.Tensor, size: int) -> str:
    try:
        codec.check(data, size)
    except BadPayload as error:
        return str(error)
    return "good"


@each_compressed
@pytest.mark.parametrize("size", [1, 255, 256, SIZE, TOP + 129])
def test_the_same_chunks_are_refused_for_the_same_reason(encoding: str, size: int) -> None:
    """Each with one byte changed at random, in its scales, its codes or its last byte."""
    codec, generator = get_codec(encoding), torch.Generator().manual_seed(size)
    good = encoded(codec, random_values(size, 0))
    num_scale_bytes = min(8, good.numel() - 1)
    kernels, refused = codec._native(good), 0
    for attempt in range(150):
        bad = good.clone()
        most = (num_scale_bytes, good.numel(), good.numel())[attempt % 3]
        at = int(torch.randint(0, most, (), generator=generator)) if attempt % 3 < 2 else -1
        bad[at] = int(torch.randint(0, 256, (), generator=generator)) if attempt % 2 else 0x80 >> attempt % 16 // 4
        told = verdict(codec, bad, size)
        with by_torch():
            assert verdict(codec, bad, size) == told
        by_kernel = kernels.check(bad, size)
        assert by_kernel == (told == "good")
        refused += not by_kernel
    assert 0 < refused < 150


def _ties(size: int) -> torch.Tensor:
    return random_values(size, 0).mul(2).round()


ADVERSARIAL = {
    "ties": _ties(2 * TOP + 100),
    "one magnitude": random_values(TOP + 64, 0).sign(),
    "zeros of both signs": torch.zeros(TOP + 70).copysign(random_values(TOP + 70, 1)),
    "63 that are not zero": torch.zeros(TOP).index_fill(0, torch.arange(63) * 65, -2.0),
    "65 that are not zero": torch.zeros(TOP).index_fill(0, torch.arange(65) * 63, 2.0**-149),
    "subnormals beside the largest": torch.cat([random_values(TOP, 2).mul(2.0**-140), torch.tensor([-3.4e38] * 64)]),
    "heavy tail": random_values(3 * TOP, 3).pow(9),
    "ascending": torch.arange(TOP + 1).float(),
    "all large ones in one place": torch.cat([random_values(64, 4).mul(1e3), random_values(TOP - 64, 5)]),
    "powers of two": 2.0 ** torch.arange(-126, 127).repeat(20).float(),
    "halves of bfloat16": torch.arange(3000, dtype=torch.int32).mul_(0x8000).add_(0x3F800000).view(torch.float32),
}


@each_encoding
@pytest.mark.parametrize("values", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_values_become_the_same_bytes(encoding: str, values: torch.Tensor) -> None:
    in_both(get_codec(encoding), values)
    in_both(get_codec(encoding), values.flip(0).contiguous(), plus=torch.full_like(values, 2.0**-149))


@each_encoding
@RANGES
def test_any_range_decodes_adds_and_measures_alike(encoding: str, start: int, stop: int) -> None:
    codec = get_codec(encoding)
    data, before = encoded(codec, random_values(MANY, 4)), random_values(stop - start, 5)
    whole, sums, squares = [], [], []
    for way in (nullcontext, by_torch):
        with way():
            whole.append(torch.empty(MANY))
            codec.decode(data, whole[-1])
            out = before.clone()
            codec.accumulate_range(data, MANY, start, out, 0.3)
            sums.append(out)
            squares.append(codec.sum_squares(data, MANY, start, stop))
    assert torch.equal(*whole)
    torch.testing.assert_close(sums[0], before + 0.3 * whole[0][start:stop])
    torch.testing.assert_close(*sums)
    assert squares[0] == pytest.approx(float(whole[0][start:stop].double().square().sum()), rel=1e-6)
    assert squares[1] == pytest.approx(squares[0], rel=1e-5)


@each_encoding
@RANGES
def test_a_weighted_sum_is_the_same_sum(encoding: str, start: int, stop: int) -> None:
    """Also over chunks that do not begin at the same element of the fragment, nor at the same block."""
    codec, weights = get_codec(encoding), [0.3, -2.0, 1e-3]
    sizes = [MANY, MANY + 512, MANY + TOP]
    chunks = [encoded(codec, random_values(size, seed)) for seed, size in enumerate(sizes)]
    parts = [ChunkPart(chunk, size, start + size - MANY) for chunk, size in zip(chunks, sizes, strict=True)]
    by_kernels, without = torch.full((stop - start,), torch.nan), torch.full((stop - start,), torch.nan)
    native = codec.native_sum(parts, weights)
    squares = codec.weighted_sum(parts, weights, by_kernels)
    with by_torch():
        again = codec.weighted_sum(parts, weights, without)
    torch.testing.assert_close(by_kernels, without)
    assert squares == pytest.approx(float(by_kernels.double().square().sum()), rel=1e-6)
    assert squares == pytest.approx(again, rel=1e-5)
    assert native.squares(stop - start) == squares

    theta, velocity = random_values(stop - start, 7), random_values(stop - start, 8).bfloat16()
    one_by_one = theta.clone(), velocity.clone()
    native.nesterov(theta, velocity, 0.5, 0.7)
    make_outer_optimizer(OuterSettings(momentum=0.5, lr=0.7)).step(one_by_one[0], by_kernels, [one_by_one[1]], 1)
    assert torch.equal(theta, one_by_one[0])
    assert torch.equal(velocity, one_by_one[1])


@each_change
@SCALES
@SIZES
def test_a_change_and_its_anchor_become_the_same_bytes(encoding: str, scale: float, size: int) -> None:
    codec = get_codec(encoding)
    values, before = (random_values(size, seed).clamp(-1, 1).mul_(scale) for seed in (1, 2))
    values.clamp_(-1e38, 1e38).add_(before, alpha=0.5)

    def sent() -> list[torch.Tensor]:
        change, anchor = torch.zeros(codec.num_bytes(size), dtype=torch.uint8), torch.zeros(size, dtype=torch.bfloat16)
        codec.encode_change(values, before.bfloat16(), change, anchor)
        return [change, anchor]

    both_ways(sent)


def at_odd_address(values: torch.Tensor) -> torch.Tensor:
    """The same values where a message may have them."""
    data = values.view(torch.uint8)
    room = torch.zeros(data.numel() + 5, dtype=torch.uint8)
    room[5:].copy_(data)
    moved = torch.frombuffer(room.numpy()[5:], dtype=values.dtype)
    assert moved.data_ptr() % 2
    return moved


@each_encoding
@SCALES
@SIZES
def test_a_snapshot_and_a_residual_become_the_same_bytes(encoding: str, scale: float, size: int) -> None:
    codec = get_codec(encoding)
    snapshot, residual = (random_values(size, seed).clamp(-1, 1).mul_(scale / 4) for seed in (1, 2))
    snapshot = at_odd_address(snapshot.bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        kept = residual.to(dtype)

        def contribution(values: torch.Tensor = snapshot, kept: torch.Tensor = kept) -> list[torch.Tensor]:
            loss = torch.empty_like(kept)
            return [encoded(codec, values, plus=kept, loss=loss), loss]

        def in_place(kept: torch.Tensor = kept) -> list[torch.Tensor]:
            loss = kept.clone()
            return [encoded(codec, snapshot, plus=loss, loss=loss), loss]

        both_ways(contribution)
        both_ways(in_place)
        assert all(map(torch.equal, contribution(), contribution(snapshot.float())))
        assert all(map(torch.equal, contribution(), in_place()))


@SCALES
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_is_the_same(scale: float, size: int, dtype: torch.dtype) -> None:
    anchor = at_odd_address((random_values(size, 1).clamp(-1, 1) * (scale / 2)).bfloat16())
    theta = (random_values(size, 2).clamp(-1, 1) * (scale / 2)).to(dtype)

    def snapshot() -> list[torch.Tensor]:
        out = torch.empty(size, dtype=torch.bfloat16)
        third = size // 3
        base.progress_since(anchor, [(third, theta[third:]), (0, theta[:third])], out)
        return [out]

    both_ways(snapshot)
    assert torch.equal(snapshot()[0], (anchor.float() - theta.float()).bfloat16())


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0xFF800000, 0x7F7FFFFF])
def test_a_snapshot_of_what_is_not_finite_is_not_finite(bits: int) -> None:
    """Whatever the bits of a NaN, no rounding makes a number of it; nor of a number that bfloat16 cannot hold."""
    theta = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32).repeat(3)
    out = torch.empty(3, dtype=torch.bfloat16)
    base.progress_since(torch.ones(3, dtype=torch.bfloat16), [(0, theta)], out)
    assert not out.isfinite().any()
    with pytest.raises(NotFinite, match="element 0 of 3"):
        encoded(get_codec("int8"), out)


REFERENCES = pytest.mark.parametrize("reference_of", [
    lambda values, progress: base.Reference(values),
    lambda values, progress: base.Reference(values.bfloat16()),
    lambda values, progress: base.Reference(values.bfloat16(), progress.bfloat16()),
    lambda values, progress: base.Reference(values.bfloat16(), progress),
    lambda values, progress: base.Reference(values, progress),
], ids=["moved", "anchor", "snapshot", "float32-pushed", "float32-both"])  # fmt: skip


@SCALES
@SIZES
@REFERENCES
def test_what_a_version_adds_is_the_same(scale: float, size: int, reference_of: Callable[..., base.Reference]) -> None:
    parts = [random_values(size, seed).clamp(-1, 1) * (scale / 4) for seed in (1, 2, 3)]
    version, reference = at_odd_address(parts[0].bfloat16()), reference_of(*parts[1:])

    def difference() -> list[torch.Tensor]:
        out = torch.empty(size)
        base.subtract(version, reference, out)
        return [out]

    both_ways(difference)
    values, progress = reference
    expected = version.double() - values.double() + (0.0 if progress is None else progress.double())
    torch.testing.assert_close(difference()[0].double(), expected, rtol=1e-6, atol=scale * 1e-6)


@each_encoding
@SCALES
@SIZES
@REFERENCES
def test_what_a_change_adds_is_the_same(encoding, scale, size, reference_of) -> None:
    """And its anchor is that of the shard, bit for bit."""
    codec = get_codec(encoding)
    before = (random_values(size, 1).clamp(-1, 1) * scale).bfloat16()
    change, sent = torch.zeros(codec.num_bytes(size), dtype=torch.uint8), torch.zeros(size, dtype=torch.bfloat16)
    codec.encode_change(before.float() + random_values(size, 2).clamp(-1, 1).mul_(scale / 100), before, change, sent)
    reference = reference_of(random_values(size, 3), random_values(size, 4))

    def version() -> list[torch.Tensor]:
        anchor, out = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size)
        codec.decode_change(change, before, anchor, reference, out)
        return [anchor, out]

    both_ways(version)
    anchor, out = version()
    assert torch.equal(anchor.view(torch.int16), sent.view(torch.int16))
    expected = torch.empty(size)
    base.subtract(anchor, reference, expected)
    assert torch.equal(out, expected)

    alone = torch.zeros(size, dtype=torch.bfloat16)
    codec.decode_change(change, before, alone)
    assert torch.equal(alone.view(torch.int16), sent.view(torch.int16))


@pytest.mark.parametrize("rule", ["rda", "mean", "agreement"])
@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_versions_are_the_same_bytes_among_equals_and_within_rounding_otherwise(rule: str, encoding: str) -> None:
    """P3: with the kernels or without, twice the same; and from one to the other in the last bits."""

    def version() -> torch.Tensor:
        optimizer = make_outer_optimizer(OuterSettings())
        values = Values(random_values(TOP, seed=9), optimizer.new_buffers(TOP))
        for number in range(1, 4):
            contributions = [
                make_contribution(
                    f"l{k}", 0.01 * scale * random_values(TOP, seed=100 * number + k), tokens=1000 * steps,
                    steps=steps, encoding=encoding, round_number=number, chunk_elements=TOP,
                )
                for k, (scale, steps) in enumerate(((1.0, 24), (1.3, 20), (0.2, 3), (2.7, 24)))
            ]  # fmt: skip
            step(values, FRAGMENT, contributions, outer_step=number, rules=VersionRules(rule, optimizer))
        return values.theta

    by_kernels = version()
    with by_torch():
        without = version()
        assert torch.equal(version(), without)
    assert torch.equal(version(), by_kernels)
    # Momentum of about 0.03 is bfloat16: rounded the other way it moves theta by up to 2^-8 of that.
    torch.testing.assert_close(by_kernels, without, rtol=1e-5, atol=1.2e-4)
