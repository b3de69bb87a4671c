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
from diloco_common.codec import decode_payload, encode_payload, get_codec
from diloco_common.errors import BadEncoding

NAME = "topk64_2bit"
BLOCK = 4096
CODEC = get_codec(NAME)


def sparse(share: float) -> Tensor:
    return torch.where(
        torch.rand(BLOCK, generator=torch.Generator().manual_seed(1)) < share, random_values(BLOCK, 2), 0
    )


@pytest.mark.parametrize(
    "values",
    [
        *(
            pytest.param(random_values(size, power).pow(power), id=f"{size}: {what}")
            for size in (1, 65, 4096, 9001)
            for power, what in ((1, "gaussian"), (12, "sums beyond the last of 46 bits"))
        ),
        *(pytest.param(sparse(share), id=f"zeros but {share}") for share in (0.0, 0.01, 0.05)),
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
        (with_index(63, 0), "block 0 has indices that do not ascend"),
        (with_index(66, 0), "block 1 has indices that do not ascend"),
        (with_index(66, 129), "block 1 has the index 129, but 129 elements"),
        (with_index(11, index_of(10)), "block 0 has indices that do not ascend"),
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
