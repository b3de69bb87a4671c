"""The example of an encoding, topk64_2bit: which elements are sent, their levels, what is refused."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import pytest
import torch
from test_codec_vectors import same_bits, to_float32
from torch import Tensor

from builders import decoded, random_values
from diloco_common.codec import Payload, encode_payload, registry

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from topk64_2bit import BLOCK, CODEC

NAME = CODEC.name


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package named it."""
    monkeypatch.setitem(registry._CODECS, NAME, CODEC)


def reference_topk_block(block: list[float]) -> tuple[list[float], list[int], list[int]]:
    """Levels, indices and codes; a group's sum is exact, as the page has it."""
    order = sorted(range(len(block)), key=lambda i: (-abs(block[i]), i))[: -(-len(block) // 64)]
    unit = max(2.0 ** (math.frexp(block[order[0]])[1] - 1), 2.0**-126) * 2.0**-46 if any(block) else 2.0**-172
    parts = [math.floor(abs(block[i]) / unit) for i in order]
    best, best_sum = 1, -1.0
    for count in range(1, len(parts) + 1):
        high, low = float(sum(parts[:count])), float(sum(parts[count:]))
        captured = high * high / count + low * low / max(len(parts) - count, 1)
        if captured > best_sum:
            best, best_sum = count, captured
    high_mean = sum(parts[:best]) / best * unit
    low_mean = sum(parts[best:]) / (len(parts) - best) * unit if best < len(parts) else high_mean
    levels = [to_float32(mean) if mean >= 2.0**-126 else 0.0 for mean in (low_mean, high_mean)]
    indices = sorted(order)
    codes = [(math.copysign(1.0, block[i]) < 0) << 1 | (i in order[:best]) for i in indices]
    return levels, indices, codes


def reference_topk(values: list[float]) -> bytes:
    blocks = [reference_topk_block(values[i : i + 4096]) for i in range(0, len(values), 4096)]
    bits_of_indices = sum(index << 12 * i for i, index in enumerate(i for _, indices, _ in blocks for i in indices))
    bits_of_codes = sum(code << 2 * i for i, code in enumerate(c for _, _, codes in blocks for c in codes))
    num_kept = sum(len(codes) for _, _, codes in blocks)
    return (
        b"".join(struct.pack("<2f", *levels) for levels, _, _ in blocks)
        + bits_of_indices.to_bytes(-(-12 * num_kept // 8), "little")
        + bits_of_codes.to_bytes(-(-2 * num_kept // 8), "little")
    )


def reference_topk_decode(data: bytes, num_elements: int) -> list[float]:
    num_blocks, num_kept = -(-num_elements // 4096), -(-num_elements // 64)
    levels = struct.unpack(f"<{2 * num_blocks}f", data[: 8 * num_blocks])
    num_index_bytes = -(-12 * num_kept // 8)
    indices = int.from_bytes(data[8 * num_blocks : 8 * num_blocks + num_index_bytes], "little")
    codes = int.from_bytes(data[8 * num_blocks + num_index_bytes :], "little")
    values = [0.0] * num_elements
    for i in range(num_kept):
        block, index, code = i // 64, indices >> 12 * i & 0xFFF, codes >> 2 * i & 3
        level = levels[2 * block + (code & 1)]
        values[4096 * block + index] = -level if code & 2 else level
    return values


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


NUM_ELEMENTS = BLOCK + 129  # 64 and 3 entries: 16 + 101 + 17 bytes, with unused bits in both


def good() -> Payload:
    return encode_payload(random_values(NUM_ELEMENTS, 7), NAME)
