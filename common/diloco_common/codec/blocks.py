"""The block encodings, int8 and int4: a chunk is the scales of all its blocks, then the codes.

A block is 256 elements (the last of a chunk may have fewer). Its scale follows from its largest magnitude:
`scale = absmax / code_max`, in float32. If the scale would be below `scale_min`, the block is written as zeros with
scale 1, and the error goes to the error-feedback residual. So every written scale lies in scale_min..scale_max, and
each decoded value is finite, and either 0 or normal, on any machine. A decoder refuses all other scales: 0, negative
numbers, NaN and infinity.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from diloco_common.codec.base import BFLOAT16_MAX, BLOCK_ELEMENTS, Codec, Reference, refuse_non_finite
from diloco_common.codec.memory import scratch, slices
from diloco_common.codec.native import BlockLoops, kernels
from diloco_common.errors import BadPayload

FLOAT32_TINY = torch.finfo(torch.float32).tiny  # 2^-126, the smallest normal number


class BlockCodec(Codec):
    """Scales, then codes. A subclass defines how a scaled value becomes a code."""

    residual_dtype = progress_dtype = torch.bfloat16
    code_max: ClassVar[float]
    """`absmax` divided by the scale: the largest code."""
    scale_min: ClassVar[float]
    scale_max: ClassVar[float]
    native_bits: ClassVar[int] = 0
    """The number of these codes in kernels/common.h; 0: the encoding has no kernels."""

    @abstractmethod
    def num_code_bytes(self, num_elements: int) -> int:
        """The size in bytes of the codes of that many elements."""

    @abstractmethod
    def encode_codes(self, scaled: Tensor, out: Tensor) -> None:
        """Encode `scaled` (m,) float32, which may be overwritten, into `out` (num_code_bytes(m),) uint8."""

    @abstractmethod
    def codes_are_valid(self, codes: Tensor, num_elements: int) -> Tensor:
        """Whether an encoder could have written all codes of a chunk; a bool on the device, shape ()."""

    @abstractmethod
    def refuse_codes(self, codes: Tensor, num_elements: int) -> NoReturn:
        """Raise BadPayload for the first code that is not valid."""

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
        if not native.encode_change(values, base, BFLOAT16_MAX, out, anchor):
            refuse_non_finite(torch.sub(values, base))

    def decode_change(
        self, data: Tensor, base: Tensor, anchor: Tensor, reference: Reference | None = None, out: Tensor | None = None
    ) -> None:
        native = self._native(data)
        if native is None or (reference is not None and not reference.is_for_kernels):
            super().decode_change(data, base, anchor, reference, out)
            return
        self.check(data, base.numel())
        native.decode_change(data, base, BFLOAT16_MAX, anchor, reference, out)

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
        if native is not None and native.check(data, num_elements):
            return
        scales, codes = _split(data, num_elements)
        scales_valid = (scales >= self.scale_min) & (scales <= self.scale_max)  # False for NaN
        if scales_valid.all() & self.codes_are_valid(codes, num_elements):  # waits for the device
            return
        bad_blocks = scales_valid.logical_not_().nonzero()
        if not bad_blocks.numel():
            self.refuse_codes(codes, num_elements)
        block = int(bad_blocks[0])
        raise BadPayload(
            f"{self.name}: block {block} has scale {scales[block].item():g}, "
            f"not in {self.scale_min:g}..{self.scale_max:g}; the sender's encoder is at fault"
        )

    def _native(self, data: Tensor) -> BlockLoops | None:
        found = kernels() if self.native_bits and data.device.type == "cpu" else None
        limits = self.code_max, self.scale_min, self.scale_max
        return BlockLoops(found.library, (self.native_bits,), limits) if found else None

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        native = self._native(data)
        if native is not None:
            native.decode(data, num_elements, start, out)
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
    """Whole blocks as a view (blocks, 256) with their scales (blocks, 1), then the partial block."""
    whole, rest = divmod(values.numel(), BLOCK_ELEMENTS)
    if whole:
        yield values[: whole * BLOCK_ELEMENTS].view(whole, BLOCK_ELEMENTS), scales[:whole].view(-1, 1)
    if rest:
        yield values[whole * BLOCK_ELEMENTS :].view(1, rest), scales[whole:].view(-1, 1)


def _split(data: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    num_scale_bytes = 4 * num_blocks(num_elements)
    return data[:num_scale_bytes].view(torch.float32), data[num_scale_bytes:]


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK_ELEMENTS, num_blocks(part.stop))


def _absmax(blocks: Tensor, out: Tensor) -> None:
    """Largest magnitude of each row, or NaN. torch's infinity norm takes 20 times as long on a CPU."""
    least = scratch("least", torch.float32, blocks.shape[0], blocks.device)
    torch.amin(blocks, dim=1, out=least)
    torch.amax(blocks, dim=1, out=out)
    torch.maximum(out, least.neg_(), out=out)


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
        raise BadPayload(
            f"int8: block {block} has the code -128, codes are -127..127; the sender's encoder is at fault"
        )

    def decode_codes(self, codes: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes.view(torch.int8))


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
        """Encode `scaled` (m,) float32, which may be overwritten, into `out` (m,) int8: only the low nibbles count."""
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
        # Shifted to the top of a byte, only the nibble 1000 is -128.
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
        raise BadPayload(f"{self.name}: block {block} has {why}; the sender's encoder is at fault")

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
