"""An encoding of your own: 4-bit floating point, a sign and 3 bits of exponent. Its package has the entry point

[project.entry-points."diloco.codec"]
e3m0 = "e3m0:CODEC"

and is installed on every machine of the run. Then: diloco up --set sync.push=plugin:e3m0
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_common.codec.blocks import FLOAT32_TINY, Int4


class E3M0(Int4):
    """y = +-2^(e - 7) * scale for e = 1..7, and 0 for e = 0; scale = absmax. Rounded to the nearest of these
    values, ties away from zero. The nibble is `sign << 3 | e`; zero has no sign.

    Error: |x - y| <= 1.0001 max(|x| / 3, absmax / 128). In a block flushed to zeros, |x| < 2^-120.
    """

    name = "plugin:e3m0"
    code_max = 1.0
    native_bits = 0  # torch does it all
    scale_min = 64 * FLOAT32_TINY  # so that the smallest level is a normal number
    scale_max = torch.finfo(torch.float32).max
    levels = tuple((-1.0 if nibble > 7 else 1.0) * 2.0 ** (nibble % 8 - 7) * (nibble % 8 > 0) for nibble in range(16))

    def encode_nibbles(self, scaled: Tensor, out: Tensor) -> None:
        negative = scaled <= -(2.0**-7)
        at_least_one = scaled.abs_() >= 2.0**-7
        # Adding half of the mantissa's range to the bits carries into the exponent from 1.5 * 2^k on, where
        # 2^(k+1) is as near as 2^k. Between 2^-7 and 1.5 * 2^-7 this gives 0 or less, but 2^-6 is as near as 0.
        exponent = (scaled.view(torch.int32) + 0x0040_0000 >> 23) - (127 - 7)
        out.copy_(torch.maximum(exponent, at_least_one.int()) | negative.int() << 3)


CODEC = E3M0()
