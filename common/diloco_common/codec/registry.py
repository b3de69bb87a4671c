"""The encodings by name, and the two without blocks: float32 and bfloat16, element after element, little-endian.

New ones are added only here. Plain encoders never write NaN or infinity. Decoders pass them on, since the shard checks
the norm anyway.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from diloco_common.codec.base import BFLOAT16_MAX, Codec, refuse_non_finite
from diloco_common.codec.blocks import Int4, Int8
from diloco_common.codec.memory import scratch, slices, slices_of
from diloco_common.codec.native import PlainLoops, kernels
from diloco_common.errors import ConfigError, UnknownEncoding
from diloco_common.extensions import find, plugin_names

FLOAT32_MAX = torch.finfo(torch.float32).max

assert sys.byteorder == "little", "payloads are little-endian and viewed in place"


class PlainCodec(Codec):
    residual_dtype = torch.bfloat16
    dtype: ClassVar[torch.dtype]
    value_max: ClassVar[float]
    """The largest magnitude that it can represent."""

    def num_bytes(self, num_elements: int) -> int:
        return self.dtype.itemsize * num_elements

    def encode_values(self, values: Tensor, out: Tensor) -> None:
        self._check_size(out, values.numel())
        for part in slices_of(values):  # on a device there is one slice, so it waits only once
            least, greatest = torch.aminmax(values[part])
            absmax = torch.maximum(least.neg_(), greatest).item()  # waits for the device; NaN if there is one
            if not absmax <= FLOAT32_MAX:
                refuse_non_finite(values)
            self._cast(values[part], out.view(self.dtype)[part], absmax)

    def check(self, data: Tensor, num_elements: int) -> None:
        self._check_size(data, num_elements)

    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        out.copy_(data.view(self.dtype)[start : start + out.numel()])

    def _cast(self, values: Tensor, out: Tensor, absmax: float) -> None:
        out.copy_(values)

    def _native(self, data: Tensor) -> PlainLoops | None:
        found = kernels() if data.device.type == "cpu" else None
        return PlainLoops(found.library, (8 * self.dtype.itemsize,), (self.value_max,)) if found else None


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


GROUP = "diloco.codec"
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Bfloat16(), Int8(), Int4())}


def encoding_names() -> tuple[str, ...]:
    """Names of all encodings: ours from most to fewest bits per element, then installed plugins."""
    return (*_CODECS, *plugin_names(GROUP))


def offered_names() -> tuple[str, ...]:
    """The names that a learner offers when it joins: all encodings, and NAME@DIGEST of each plugin, so that a shard
    with a different source can refuse. The digest is that of `diloco_common.extensions.find`."""
    return (*encoding_names(), *(f"{name}@{source}" for name in plugin_names(GROUP) if (source := _source_of(name))))


def _source_of(name: str) -> str:
    try:
        return find(GROUP, name).source
    except ConfigError:  # broken, but perhaps not needed; if it is needed, using it reports why
        return ""


def get_codec(name: str) -> Codec:
    codec = _CODECS.get(name)
    return _plugin(name) if codec is None else codec


@cache
def _plugin(name: str) -> Codec:
    """An installed plugin. A name may come from others, so only entry points are loaded."""
    if name not in plugin_names(GROUP):
        raise UnknownEncoding(f"there is no encoding {name!r}; choose one of {', '.join(encoding_names())}")
    codec: Codec = find(GROUP, name).thing
    if codec.name != name:
        raise UnknownEncoding(f"the codec that is installed as {name!r} calls itself {codec.name!r}")
    return codec
