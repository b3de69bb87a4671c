"""The base of the block encodings: a chunk is the scales of all its blocks, then the codes.

A block is 256 elements (the last of a chunk may have fewer). Its scale follows from its largest magnitude:
`scale = absmax / code_max`, in float32. If the scale would be below `scale_min`, the block is written as zeros with
scale 1, and the loss goes to the error-feedback residual. Every written scale lies in scale_min..scale_max. So each
decoded value is finite, and either 0 or normal, on any machine. A decoder refuses other scales, and so refuses 0,
negative numbers, NaN and infinity.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from diloco_common.codec.base import BFLOAT16_MAX, BLOCK_ELEMENTS, Codec, Part, Reference, refuse_non_finite
from diloco_common.codec.native import Kernels, WeightedSum, kernels
from diloco_common.codec.scratch import scratch, slices
from diloco_common.errors import BadEncoding

FLOAT32_TINY = torch.finfo(torch.float32).tiny  # 2^-126, the smallest normal number


class BlockCodec(Codec):
    """Scales, then codes. A subclass says how a scaled value becomes a code."""

    residual_dtype = progress_dtype = torch.bfloat16
    code_max: ClassVar[float]
    """`absmax` divided by the scale: the largest code."""
    scale_min: ClassVar[float]
    scale_max: ClassVar[float]
    native_bits: ClassVar[int] = 0
    """What kernels/common.h calls the codes, if it has the encoding; 0: it has not."""

    @abstractmethod
    def num_code_bytes(self, num_elements: int) -> int:
        """Bytes of the codes of that many elements."""

    @abstractmethod
    def encode_codes(self, scaled: Tensor, out: Tensor) -> None:
        """Encode `scaled` (m,) float32, which may be overwritten, into `out` (num_code_bytes(m),) uint8."""

    @abstractmethod
    def codes_are_valid(self, codes: Tensor, num_elements: int) -> Tensor:
        """Whether an encoder could have written all codes of a chunk; a bool on the device, shape ()."""

    @abstractmethod
    def refuse_codes(self, codes: Tensor, num_elements: int) -> NoReturn:
        """Raise BadEncoding for the first code that is not valid."""

    @abstractmethod
    def decode_codes(self, codes: Tensor, out: Tensor) -> Tensor:
        """Turn `codes` (num_code_bytes(m),) uint8 into unscaled values (m,), in `out` or in scratch."""

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_blocks(num_elements) + self.num_code_bytes(num_elements)

    def encode_change(self, values: Tensor, base: Tensor, out: Tensor, anchor: Tensor) -> None:
        native = self._native(out)
        if native is None:
            super().encode_change(values, base, out, anchor)
            return
        self._check_size(out, values.numel())
        if not native.encode_change(self.native_bits, values, base, self._limits, BFLOAT16_MAX, out, anchor):
            refuse_non_finite(torch.sub(values, base))

    def decode_change(
        self, data: Tensor, base: Tensor, anchor: Tensor, reference: Reference | None = None, out: Tensor | None = None
    ) -> None:
        native = self._native(data)
        if native is None or (reference is not None and not reference.is_for_kernels):
            super().decode_change(data, base, anchor, reference, out)
            return
        self.check(data, base.numel())
        native.decode_change(self.native_bits, data, base, BFLOAT16_MAX, anchor, reference, out)

    @property
    def _limits(self) -> tuple[float, float, float]:
        return self.code_max, self.scale_min, self.scale_max

    def encode_values(self, values: Tensor, out: Tensor) -> None:
        num_elements, device = values.numel(), values.device
        self._check_size(out, num_elements)
        scales, codes = _split(out, num_elements)
        for part in slices(num_elements):
            for block_values, block_scales in by_block(values[part], scales[_blocks_of(part)]):
                _absmax(block_values, out=block_scales[:, 0])
        if not torch.isfinite(scales).all():  # waits for the device
            refuse_non_finite(values)

        # Divide by a tensor on the device: CUDA would multiply by the reciprocal of a Python number.
        scales.div_(torch.full((), self.code_max, device=device)).clamp_(max=self.scale_max)
        scales.masked_fill_(scales < self.scale_min, 1.0)
        for part in slices(num_elements):
            scaled = scratch("scaled", torch.float32, part.stop - part.start, device)
            for (into, block_scales), (block_values, _) in zip(
                by_block(scaled, scales[_blocks_of(part)]),
                by_block(values[part], scales[_blocks_of(part)]),
                strict=True,
            ):
                torch.div(block_values, block_scales, out=into)
            self.encode_codes(scaled, codes[self.num_code_bytes(part.start) : self.num_code_bytes(part.stop)])

    def check(self, data: Tensor, num_elements: int) -> None:
        self._check_size(data, num_elements)
        native = self._native(data)
        if native is not None and native.check(self.native_bits, data, num_elements, self.scale_min, self.scale_max):
            return
        scales, codes = _split(data, num_elements)
        scales_valid = (scales >= self.scale_min) & (scales <= self.scale_max)  # False for NaN
        if scales_valid.all() & self.codes_are_valid(codes, num_elements):  # waits for the device
            return
        bad_blocks = scales_valid.logical_not_().nonzero()
        if not bad_blocks.numel():
            self.refuse_codes(codes, num_elements)
        block = int(bad_blocks[0])
        raise BadEncoding(
            f"{self.name}: block {block} has scale {scales[block].item():g}, "
            f"not in {self.scale_min:g}..{self.scale_max:g}; the sender's encoder is at fault"
        )

    def accumulate_range(self, data: Tensor, num_elements: int, start: int, out: Tensor, weight: float) -> None:
        native = self._native(data)
        if native is None:
            super().accumulate_range(data, num_elements, start, out, weight)
        else:
            native.accumulate(self.native_bits, data, num_elements, start, out, weight)

    def native_sum(self, parts: Sequence[Part], weights: Sequence[float]) -> WeightedSum | None:
        native = self._native(parts[0].data)
        return native.weighted_sum(self.native_bits, parts, weights) if native else None

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        native = self._native(data)
        if native is None:
            return super().sum_squares(data, num_elements, start, stop)
        return native.sum_squares(self.native_bits, data, num_elements, start, stop)

    def _encode_natively(self, values: Tensor, plus: Tensor | None, loss: Tensor | None, out: Tensor) -> bool | None:
        native = self._native(out)
        return None if native is None else native.encode(self.native_bits, values, plus, loss, self._limits, out)

    def _native(self, data: Tensor) -> Kernels | None:
        return kernels() if self.native_bits and data.device.type == "cpu" else None

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        native = self._native(data)
        if native is not None:
            native.decode(self.native_bits, data, num_elements, start, out)
            return
        scales, codes = _split(data, num_elements)
        stop = start + out.numel()
        unscaled = self.decode_codes(codes[self.num_code_bytes(start) : self.num_code_bytes(stop)], out)
        range_scales = scales[_blocks_of(slice(start, stop))]
        for (into, block_scales), (block, _) in zip(
            by_block(out, range_scales), by_block(unscaled, range_scales), strict=True
        ):
            torch.mul(block, block_scales, out=into)


def num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK_ELEMENTS)


def by_block(values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole blocks as a view (blocks, 256) with their scales (blocks, 1), then the partial one."""
    whole, rest = divmod(values.numel(), BLOCK_ELEMENTS)
    if whole:
        yield values[: whole * BLOCK_ELEMENTS].view(whole, BLOCK_ELEMENTS), scales[:whole].view(-1, 1)
    if rest:
        yield values[whole * BLOCK_ELEMENTS :].view(1, rest), scales[whole:].view(-1, 1)


def _split(data: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """The scales (blocks,) float32 and the codes uint8 of a chunk, as views."""
    num_scale_bytes = 4 * num_blocks(num_elements)
    return data[:num_scale_bytes].view(torch.float32), data[num_scale_bytes:]


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK_ELEMENTS, num_blocks(part.stop))


def _absmax(blocks: Tensor, out: Tensor) -> None:
    """Largest magnitude of each row, or NaN. On a CPU torch's infinity norm takes 20 times as long."""
    least = scratch("least", torch.float32, blocks.shape[0], blocks.device)
    torch.amin(blocks, dim=1, out=least)
    torch.amax(blocks, dim=1, out=out)
    torch.maximum(out, least.neg_(), out=out)
