"""What topk64_2bit promises beyond what all encodings do: which elements are sent, their levels, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_codec_vectors import reference_topk, reference_topk_decode, same_bits
from torch import Tensor

from builders import decoded, random_values
from diloco_common.codec import decode_payload, encode_payload, get_codec, num_payload_bytes
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.codec.topk import _select_among_candidates, _select_dense
from diloco_common.errors import BadEncoding

NAME = "topk64_2bit"
BLOCK, KEPT = 4096, 64
CODEC = get_codec(NAME)


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
        *(
            pytest.param(random_values(size, power).pow(power), id=f"{size}: {what}")
            for size in (1, 64, 65, 100, 4095, 4096, 4097, 9001)
            for power, what in ((1, "gaussian"), (3, "heavy tail"), (12, "sums beyond the last of 46 bits"))
        ),
        *(pytest.param(sparse(share), id=f"zeros but {share}") for share in (0.0, 0.001, 0.01, 0.02, 0.05, 0.1)),
        pytest.param(random_values(BLOCK, 0).mul(2).round().add(0.0), id="many ties"),
        pytest.param(random_values(BLOCK, 0).sign(), id="all of one magnitude"),
        pytest.param(torch.arange(BLOCK).float(), id="ascending"),
        pytest.param(torch.cat([torch.zeros(3000), random_values(600, 0), torch.zeros(496)]), id="in one place"),
    ],
)
def test_blocks_equal_the_reference_bit_for_bit(values: Tensor) -> None:
    """The largest are sent, of equal ones the first, zeros too, and no other border between the levels is as good."""
    for each in (values, values.flip(0).contiguous()):
        payload = encode_payload(each, NAME)
        assert payload.chunks == (reference_topk(each.tolist()),)
        assert same_bits(decoded(payload), torch.tensor(reference_topk_decode(payload.chunks[0], each.numel())))


@pytest.mark.parametrize("spread", [0, 1, 3, 20])
def test_both_ways_of_selecting_find_the_same(spread: int) -> None:
    bits = (random_values(64 * BLOCK, spread) ** spread).view(64, BLOCK).view(torch.int32)
    candidates, dense = torch.empty(64, KEPT, dtype=torch.int64), torch.empty(64, KEPT, dtype=torch.int64)
    _select_among_candidates(bits, candidates)
    _select_dense(bits, dense)
    assert torch.equal(candidates, dense)


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
