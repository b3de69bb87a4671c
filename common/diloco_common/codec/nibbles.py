"""The 4-bit encodings, int4 and e3m0: two elements per byte, the earlier one in the low nibble.

With a scale per 256 elements they take 4.125 bits per element. In both, the nibble 1000 is not a code: it would be -8
in int4 and a negative zero in e3m0. After an odd number of elements the last high nibble is 0. A decoder refuses
anything else.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.blocks import FLOAT32_TINY, BlockCodec
from diloco_common.codec.scratch import scratch
from diloco_common.errors import BadEncoding


class NibbleCodec(BlockCodec):
    """Packs nibbles. A subclass turns a scaled value into a nibble, and gives the value of each nibble."""

    levels: ClassVar[tuple[float, ...]]
    """Unscaled value of each nibble 0..15."""

    @abstractmethod
    def encode_nibbles(self, scaled: Tensor, out: Tensor) -> None:
        """Encode `scaled` (m,) float32, which may be overwritten, into `out` (m,) int8: low nibbles count."""

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


class Int4(NibbleCodec):
    """y = code * scale with codes -7..7 in two's complement, `code = round(x / scale)` to nearest, ties to even.

    Error: |x - y| <= 0.5001 scale, that is absmax / 13.9. In a block flushed to zeros, |x| < 7 * 2^-126.
    """

    name = "int4"
    code_max = 7.0
    native_bits = 4
    scale_min = FLOAT32_TINY
    scale_max = float.fromhex("0x1.249248p+125")  # the largest float32 whose product with 7 does not overflow
    levels = tuple(float(nibble - 16 if nibble > 7 else nibble) for nibble in range(16))

    def encode_nibbles(self, scaled: Tensor, out: Tensor) -> None:
        out.copy_(scaled.round_())


class E3M0(NibbleCodec):
    """y = +-2^(e - 7) * scale for e = 1..7, and 0 for e = 0; scale = absmax. Rounded to the nearest of these
    values, ties away from zero. The nibble is `sign << 3 | e`; zero has no sign.

    Error: |x - y| <= 1.0001 max(|x| / 3, absmax / 128). In a block flushed to zeros, |x| < 2^-120.
    """

    name = "e3m0"
    code_max = 1.0
    native_bits = 3
    scale_min = 64 * FLOAT32_TINY  # so that the smallest level is a normal number
    scale_max = torch.finfo(torch.float32).max
    levels = tuple((-1.0 if nibble > 7 else 1.0) * 2.0 ** (nibble % 8 - 7) * (nibble % 8 > 0) for nibble in range(16))

    def encode_nibbles(self, scaled: Tensor, out: Tensor) -> None:
        at_least_one = scratch("at_least_one", torch.int8, out.numel(), out.device)
        negative = scratch("negative", torch.int8, out.numel(), out.device)
        torch.le(scaled, -(2.0**-7), out=negative)
        torch.ge(scaled.abs_(), 2.0**-7, out=at_least_one)
        # Adding half of the mantissa's range to the bits carries into the exponent from 1.5 * 2^k on, where
        # 2^(k+1) is as near as 2^k. Between 2^-7 and 1.5 * 2^-7 this gives 0 or less, but 2^-6 is as near as 0.
        exponent = scaled.view(torch.int32).add_(0x0040_0000).bitwise_right_shift_(23).sub_(127 - 7)
        torch.maximum(out.copy_(exponent), at_least_one, out=out)
        out.bitwise_or_(negative.bitwise_left_shift_(3))


@lru_cache(maxsize=64)
def _pair_table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """The two unscaled values of each byte, as the 64 bits of two float32: (256,) int64."""
    with torch.inference_mode(False):
        pairs = [(levels[byte & 0x0F], levels[byte >> 4]) for byte in range(256)]
        return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).view(256)
