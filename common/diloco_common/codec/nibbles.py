"""The 4-bit encoding int4: two elements per byte, the earlier one in the low nibble.

With a scale per 256 elements it takes 4.125 bits per element. The nibble 1000 is not a code: it would be -8. After an
odd number of elements the last high nibble is 0. A decoder refuses anything else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.blocks import FLOAT32_TINY, BlockCodec
from diloco_common.codec.scratch import scratch
from diloco_common.errors import BadEncoding


class Int4(BlockCodec):
    """y = code * scale with codes -7..7 in two's complement, `code = round(x / scale)` to nearest, ties to even.

    Error: |x - y| <= 0.5001 scale, that is absmax / 13.9. In a block flushed to zeros, |x| < 7 * 2^-126.

    Another 4-bit encoding is a subclass with its own `levels` and `encode_nibbles` (examples/e3m0.py).
    """

    name = "int4"
    code_max = 7.0
    native_bits = 4
    scale_min = FLOAT32_TINY
    scale_max = float.fromhex("0x1.249248p+125")  # the largest float32 whose product with 7 does not overflow
    levels: ClassVar[tuple[float, ...]] = tuple(float(nibble - 16 if nibble > 7 else nibble) for nibble in range(16))
    """Unscaled value of each nibble 0..15."""

    def encode_nibbles(self, scaled: Tensor, out: Tensor) -> None:
        """Encode `scaled` (m,) float32, which may be overwritten, into `out` (m,) int8: low nibbles count."""
        out.copy_(scaled.round_())

    def num_code_bytes(self, num_elements: int) -> int:
        return (num_elements + 1) // 2

    def encode_codes(self, scaled: Tensor, out: Tensor) -> None:
        num_elements, num_pairs, device = scaled.numel(), out.numel(), scaled.device
        nibbles = scratch("nibbles", torch.int8, 2 * num_pairs, device)
        nibbles[num_elements:] = 0
        self.encode_nibbles(scaled, nibbles[:num_elements])
        # A pair is the two bytes of a little-endian int16: the earlier nibble in the low byte.
        pairs = nibbles.view(torch.int16)
        high = scratch("high", torch.int16, num_pairs, device)
        torch.bitwise_right_shift(pairs, 4, out=high)
        out.copy_(pairs.bitwise_and_(0x0F).bitwise_or_(high.bitwise_and_(0xF0)))

    def codes_are_valid(self, codes: Tensor, num_elements: int) -> Tensor:
        # Moved to the top of a byte, the nibble 1000 is -128 and no other is.
        signed = codes.view(torch.int8)
        top = scratch("top", torch.int8, codes.numel(), codes.device)
        valid = torch.bitwise_left_shift(signed, 4, out=top).amin() != -128
        valid &= torch.bitwise_and(signed, -16, out=top).amin() != -128
        if num_elements % 2:
            valid &= codes[-1] < 16
        return valid

    def refuse_codes(self, codes: Tensor, num_elements: int) -> NoReturn:
        bad_bytes = (((codes & 0x0F) == 0x08) | ((codes & 0xF0) == 0x80)).nonzero()
        if bad_bytes.numel():
            block, why = 2 * int(bad_bytes[0]) // BLOCK_ELEMENTS, "the nibble 1000, which is no code"
        else:
            block, why = (num_elements - 1) // BLOCK_ELEMENTS, "an unused last nibble that is not 0"
        raise BadEncoding(f"{self.name}: block {block} has {why}; the sender's encoder is at fault")

    def decode_codes(self, codes: Tensor, out: Tensor) -> Tensor:
        num_pairs, device = codes.numel(), codes.device
        index = scratch("index", torch.int32, num_pairs, device).copy_(codes)
        unscaled = scratch("unscaled", torch.float32, 2 * num_pairs, device)
        torch.index_select(_pair_table(self.levels, device), 0, index, out=unscaled.view(torch.int64))
        return unscaled[: out.numel()]


@lru_cache(maxsize=64)
def _pair_table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """The two unscaled values of each byte, as the 64 bits of two float32: (256,) int64."""
    with torch.inference_mode(False):
        pairs = [(levels[byte & 0x0F], levels[byte >> 4]) for byte in range(256)]
        return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).view(256)
