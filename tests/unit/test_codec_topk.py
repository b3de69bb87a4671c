"""What topk64_2bit promises beyond what all encodings do: which elements are sent, their levels, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import decoded, random_values
from diloco_common.codec import decode_payload, encode_payload, get_codec, num_payload_bytes
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.codec.topk import _select_among_candidates, _select_dense
from diloco_common.errors import BadEncoding

NAME = "topk64_2bit"
BLOCK, KEPT = 4096, 64
CODEC = get_codec(NAME)


def sent_positions(values: Tensor) -> list[int]:
    payload = encode_payload(values, NAME, chunk_elements=8192)
    return [int(i) for i in decoded(payload).nonzero()[:, 0]]


def by_stable_sort(values: Tensor) -> list[int]:
    order = values.abs().sort(descending=True, stable=True).indices[: -(-values.numel() // 64)]
    return sorted(int(i) for i in order)


def test_a_parameter_takes_less_than_0_03_bytes() -> None:
    assert num_payload_bytes(NAME, BLOCK) == 8 + 96 + 16
    assert num_payload_bytes(NAME, 100_000_000) < 0.0293 * 100_000_000


def sparse(share: float) -> Tensor:
    return torch.where(
        torch.rand(BLOCK, generator=torch.Generator().manual_seed(1)) < share, random_values(BLOCK, 2), 0
    )


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(random_values(BLOCK, 0), id="gaussian"),
        pytest.param(random_values(BLOCK, 0).pow(9), id="heavy tail"),
        pytest.param(random_values(BLOCK, 0).mul(2).round().add(0.0), id="many ties"),
        pytest.param(random_values(BLOCK, 0).sign(), id="all of one magnitude"),
        pytest.param(torch.arange(BLOCK).float(), id="ascending"),
        pytest.param(torch.cat([torch.zeros(3000), random_values(600, 0), torch.zeros(496)]), id="in one place"),
        pytest.param(sparse(0.1), id="mostly zeros"),
        pytest.param(random_values(100, 0), id="100 elements: 2"),
        pytest.param(random_values(64, 0), id="64 elements: 1"),
        pytest.param(random_values(1, 0), id="1 element: 1"),
    ],
)
def test_the_largest_are_sent_and_of_equal_ones_the_first(values: Tensor) -> None:
    assert sent_positions(values) == by_stable_sort(values)
    reversed_values = values.flip(0).contiguous()
    assert sent_positions(reversed_values) == by_stable_sort(reversed_values)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.02, 0.05])
def test_what_does_not_fill_a_block_is_filled_up_with_its_first_zeros(share: float) -> None:
    """They decode to the low level, which is where the error is least, and the residual takes it back."""
    values = sparse(share)
    (chunk,) = encode_payload(values, NAME).chunks
    packed = int.from_bytes(chunk[8:104], "little")
    assert [packed >> 12 * i & 0xFFF for i in range(KEPT)] == by_stable_sort(values)


@pytest.mark.parametrize("spread", [0, 1, 3, 20])
def test_both_ways_of_selecting_find_the_same(spread: int) -> None:
    bits = (random_values(64 * BLOCK, spread) ** spread).view(64, BLOCK).view(torch.int32)
    candidates, dense = torch.empty(64, KEPT, dtype=torch.int64), torch.empty(64, KEPT, dtype=torch.int64)
    _select_among_candidates(bits, candidates)
    _select_dense(bits, dense)
    assert torch.equal(candidates, dense)


@pytest.mark.parametrize("power", [1, 3])
def test_no_other_border_between_two_levels_has_a_smaller_error(power: int) -> None:
    values = random_values(BLOCK, 4) ** power
    sent = values.double().abs().sort(descending=True).values[:KEPT]
    least = min(
        float(sum(((group - group.mean()) ** 2).sum() for group in (sent[:border], sent[border:]) if group.numel()))
        for border in range(1, KEPT + 1)
    )
    y = decoded(encode_payload(values, NAME)).double()
    error = float(((values.double() - y)[y != 0] ** 2).sum())
    assert error == pytest.approx(least, rel=1e-5)


def test_two_magnitudes_come_back_exactly() -> None:
    values = torch.zeros(BLOCK)
    values[100:132], values[1000:1032] = 0.3, -0.7
    assert torch.equal(decoded(encode_payload(values, NAME)), values)


def test_levels_too_small_for_a_normal_number_are_written_as_zero_and_stay_residual() -> None:
    values = torch.tensor([1.0] + [2.0**-130] * 127)
    meant = values.clone()
    payload = encode_payload(values, NAME, loss=values)
    assert struct.unpack("<2f", payload.chunks[0][:8]) == (0.0, 1.0)
    assert decoded(payload).tolist() == [1.0] + [0.0] * 127
    assert torch.equal(values[1:], meant[1:])


@pytest.mark.parametrize("num_elements", [5000, SLICE_ELEMENTS + 5000])
@pytest.mark.parametrize(("start", "stop"), [(256, 512), (0, 4352), (3840, 4352), (4096, 5000), (4864, 5000)])
def test_a_range_may_begin_and_end_within_a_block(num_elements: int, start: int, stop: int) -> None:
    payload = encode_payload(random_values(num_elements, 5), NAME)
    data = torch.frombuffer(bytearray(payload.chunks[0]), dtype=torch.uint8)
    out = torch.full((stop - start,), torch.nan)
    CODEC.decode_range(data, num_elements, start, out)
    assert torch.equal(out, decoded(payload)[start:stop])


# ------------------------------------------------------------------ refusals

NUM_ELEMENTS = BLOCK + 129  # 64 and 3 entries: 16 + 101 + 17 bytes, with unused bits in both
GOOD = encode_payload(random_values(NUM_ELEMENTS, 7), NAME)
BAD_LEVELS = [
    (1.0, torch.nan), (torch.nan, 1.0), (1.0, torch.inf), (-1.0, 1.0), (-0.0, 1.0), (2.0, 1.0), (2.0**-127, 1.0),
    (0.0, 2.0**-149),
]  # fmt: skip


def with_levels(block: int, low: float, high: float) -> Callable[[bytearray], None]:
    def damage(chunk: bytearray) -> None:
        chunk[8 * block : 8 * block + 8] = struct.pack("<2f", low, high)

    return damage


def with_index(entry: int, index: int) -> Callable[[bytearray], None]:
    def damage(chunk: bytearray) -> None:
        packed = int.from_bytes(chunk[16:117], "little")
        packed = packed & ~(0xFFF << 12 * entry) | index << 12 * entry
        chunk[16:117] = packed.to_bytes(101, "little")

    return damage


def index_of(entry: int) -> int:
    return int.from_bytes(GOOD.chunks[0][16:117], "little") >> 12 * entry & 0xFFF


def with_bits(byte: int, bits: int) -> Callable[[bytearray], None]:
    def damage(chunk: bytearray) -> None:
        chunk[byte] |= bits

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        *((with_levels(1, low, high), "block 1 has levels") for low, high in BAD_LEVELS),
        (with_index(0, 4095), "block 0 has indices that do not ascend"),
        (with_index(63, 0), "block 0 has indices that do not ascend"),
        (with_index(66, 0), "block 1 has indices that do not ascend"),
        (with_index(66, 129), "block 1 has the index 129, but 129 elements"),
        (with_index(11, index_of(10)), "block 0 has indices that do not ascend"),
        (with_index(66, 4095), "block 1 has the index 4095, but 129 elements"),
        (with_bits(116, 0x10), "block 1 has unused last bits"),
        (with_bits(133, 0x40), "block 1 has unused last bits"),
    ],
)
def test_a_decoder_refuses_what_no_encoder_writes(damage: Callable[[bytearray], None], says: str) -> None:
    chunk = bytearray(GOOD.chunks[0])
    damage(chunk)
    out = torch.zeros(NUM_ELEMENTS)
    with pytest.raises(BadEncoding, match=f"chunk 0: {NAME}: {says}"):
        decode_payload(replace(GOOD, chunks=(bytes(chunk),)), out)
    with pytest.raises(BadEncoding, match=says):
        CODEC.accumulate(torch.frombuffer(chunk, dtype=torch.uint8), out, 1.0)
    assert not out.any()
