"""The encodings without blocks: float32 and bfloat16, element after element, little-endian.

Encoders never write NaN or infinity. Decoders pass them on, because the shard checks the norm anyway.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from torch import Tensor

from diloco_common.codec.base import BFLOAT16_MAX, Codec, refuse_non_finite
from diloco_common.codec.native import kernels
from diloco_common.codec.scratch import scratch, slices

FLOAT32_MAX = torch.finfo(torch.float32).max

assert sys.byteorder == "little", "payloads are little-endian and viewed in place"


class PlainCodec(Codec):
    """Casts every element to one torch type."""

    dtype: ClassVar[torch.dtype]

    def num_bytes(self, num_elements: int) -> int:
        return self.dtype.itemsize * num_elements

    def encode_values(self, values: Tensor, out: Tensor) -> None:
        self._check_size(out, values.numel())
        if self._encode_natively(values, out):
            return
        # On a CPU slice by slice, so each is still in the cache when it is cast; elsewhere at once, to wait only once.
        parts = slices(values.numel()) if values.device.type == "cpu" else [slice(0, values.numel())]
        for part in parts:
            least, greatest = torch.aminmax(values[part])
            absmax = torch.maximum(least.neg_(), greatest).item()  # waits for the device; NaN if there is one
            if not absmax <= FLOAT32_MAX:
                refuse_non_finite(values)
            self._cast(values[part], out.view(self.dtype)[part], absmax)

    def _encode_natively(self, values: Tensor, out: Tensor) -> bool:
        """Encode with a kernel; False if there is none. Raises NotFinite."""
        return False

    def check(self, data: Tensor, num_elements: int) -> None:
        self._check_size(data, num_elements)

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        out.copy_(data.view(self.dtype)[start : start + out.numel()])

    def _cast(self, values: Tensor, out: Tensor, absmax: float) -> None:
        out.copy_(values)


class Float32(PlainCodec):
    """4 bytes per element. Loses nothing."""

    name = "float32"
    dtype = torch.float32


class Bfloat16(PlainCodec):
    """2 bytes per element, rounded to nearest, ties to even, and clamped to the largest bfloat16.

    Error: |x - y| <= max(2^-8 |x|, 2^-134).
    """

    name = "bfloat16"
    dtype = torch.bfloat16

    def _encode_natively(self, values: Tensor, out: Tensor) -> bool:
        native = kernels() if values.device.type == "cpu" else None
        if native is None:
            return False
        if not native.encode_bfloat16(values, BFLOAT16_MAX, out):
            refuse_non_finite(values)
        return True

    def _cast(self, values: Tensor, out: Tensor, absmax: float) -> None:
        if absmax <= BFLOAT16_MAX:
            out.copy_(values)
            return
        for part in slices(values.numel()):
            clamped = scratch("scaled", torch.float32, part.stop - part.start, values.device)
            torch.clamp(values[part], -BFLOAT16_MAX, BFLOAT16_MAX, out=clamped)
            out[part].copy_(clamped)
