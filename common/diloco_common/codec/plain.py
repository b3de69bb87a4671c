"""The encodings without blocks: float32 and bfloat16, element after element, little-endian.

Encoders never write NaN or infinity. Decoders pass them on, because the shard checks the norm anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from diloco_common.codec.base import BFLOAT16_MAX, Codec, Part, refuse_non_finite
from diloco_common.codec.memory import scratch, slices, slices_of
from diloco_common.codec.native import Kernels, WeightedSum, kernels

FLOAT32_MAX = torch.finfo(torch.float32).max

assert sys.byteorder == "little", "payloads are little-endian and viewed in place"


class PlainCodec(Codec):
    """Casts every element to one torch type."""

    residual_dtype = torch.bfloat16
    dtype: ClassVar[torch.dtype]
    value_max: ClassVar[float]
    """The largest magnitude that it can say."""

    def num_bytes(self, num_elements: int) -> int:
        return self.dtype.itemsize * num_elements

    def encode_values(self, values: Tensor, out: Tensor) -> None:
        self._check_size(out, values.numel())
        for part in slices_of(values):  # on a device at once, so it waits only once
            least, greatest = torch.aminmax(values[part])
            absmax = torch.maximum(least.neg_(), greatest).item()  # waits for the device; NaN if there is one
            if not absmax <= FLOAT32_MAX:
                refuse_non_finite(values)
            self._cast(values[part], out.view(self.dtype)[part], absmax)

    def check(self, data: Tensor, num_elements: int) -> None:
        self._check_size(data, num_elements)

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        out.copy_(data.view(self.dtype)[start : start + out.numel()])

    def native_sum(self, parts: Sequence[Part], weights: Sequence[float]) -> WeightedSum | None:
        native = self._native(parts[0].data)
        return native.weighted_sum_plain(self._bits, parts, weights) if native else None

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        native = self._native(data)
        if native is None:
            return super().sum_squares(data, num_elements, start, stop)
        return native.sum_squares_plain(self._bits, data, start, stop)

    def _cast(self, values: Tensor, out: Tensor, absmax: float) -> None:
        out.copy_(values)

    @property
    def _bits(self) -> int:
        return 8 * self.dtype.itemsize

    def _encode_natively(self, values: Tensor, plus: Tensor | None, loss: Tensor | None, out: Tensor) -> bool | None:
        native = self._native(out)
        return None if native is None else native.encode_plain(self._bits, values, plus, loss, self.value_max, out)

    def _native(self, data: Tensor) -> Kernels | None:
        return kernels() if data.device.type == "cpu" else None


class Float32(PlainCodec):
    """4 bytes per element. Loses nothing."""

    name = "float32"
    dtype = torch.float32
    value_max = FLOAT32_MAX


class Bfloat16(PlainCodec):
    """2 bytes per element, rounded to nearest, ties to even, and clamped to the largest bfloat16.

    Error: |x - y| <= max(2^-8 |x|, 2^-134).
    """

    name = "bfloat16"
    dtype = progress_dtype = torch.bfloat16
    value_max = BFLOAT16_MAX

    def _cast(self, values: Tensor, out: Tensor, absmax: float) -> None:
        if absmax <= BFLOAT16_MAX:
            out.copy_(values)
            return
        for part in slices(values.numel()):
            clamped = scratch("scaled", torch.float32, part.stop - part.start, values.device)
            torch.clamp(values[part], -BFLOAT16_MAX, BFLOAT16_MAX, out=clamped)
            out[part].copy_(clamped)
