"""int8: a byte per element and a scale per 256 elements, 8.125 bits together."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.blocks import FLOAT32_TINY, BlockCodec
from diloco_common.errors import BadEncoding


class Int8(BlockCodec):
    """y = code * scale with codes -127..127, `code = round(x / scale)` to nearest, ties to even.

    Error: |x - y| <= 0.5001 scale, that is absmax / 253. In a block flushed to zeros, |x| < 127 * 2^-126.
    """

    name = "int8"
    code_max = 127.0
    native_bits = 8
    scale_min = FLOAT32_TINY
    scale_max = float.fromhex("0x1.020406p+121")  # the largest float32 whose product with 127 does not overflow

    def num_code_bytes(self, num_elements: int) -> int:
        return num_elements

    def encode_codes(self, scaled: Tensor, out: Tensor) -> None:
        out.view(torch.int8).copy_(scaled.round_())

    def codes_are_valid(self, codes: Tensor, num_elements: int) -> Tensor:
        return codes.view(torch.int8).amin() != -128

    def refuse_codes(self, codes: Tensor, num_elements: int) -> NoReturn:
        block = int((codes.view(torch.int8) == -128).nonzero()[0]) // BLOCK_ELEMENTS
        raise BadEncoding(
            f"int8: block {block} has the code -128, codes are -127..127; the sender's encoder is at fault"
        )

    def decode_codes(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes.view(torch.int8))
