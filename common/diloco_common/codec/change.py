"""Versions as changes: what a learner adds to the anchor that it has, so that every learner holds the same anchor.

The encodings of one or two bytes per element that keep every value are those of `VALUES`. In any other (`sync.pull`)
a shard sends the change since the version before, and keeps what the learners hold: the anchor, which is always
representable in bfloat16. Both sides compute the next anchor by one rule, in float32, bit for bit:

    change = encode(theta - anchor)
    anchor <- bfloat16(anchor + decode(change))         to nearest, ties to even; saturating

What the encoding lost, and the rounding, stay in `theta - anchor`, and so are in the next change: error feedback that
needs no memory. Who has no anchor, or an older one, gets the anchor itself as bfloat16, which is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_common.codec.payload import (
    Payload,
    PayloadHeader,
    check_chunk_sizes,
    check_layout,
    decode_chunk,
    decode_payload,
)
from diloco_common.codec.plain import BFLOAT16_MAX
from diloco_common.codec.receiver import Checksum
from diloco_common.codec.registry import get_codec
from diloco_common.codec.scratch import scratch, slices
from diloco_common.errors import BadSize, NotFinite

ANCHOR = "bfloat16"
"""Encoding of an anchor that changes lead to."""
VALUES = ("float32", ANCHOR)
"""Encodings in which every version is sent by itself; in all others it is sent as a change."""


def pull_encodings(pull: str) -> tuple[str, ...]:
    """What a learner takes where a run's pull encoding is `pull`, best first; the last one is that of the values."""
    return (pull,) if pull in VALUES else (pull, ANCHOR)


@torch.no_grad()
def encode_change(values: Tensor, base: Payload, encoding: str) -> tuple[Payload, Payload]:
    """The change from an anchor to `values` (n,) float32, and the anchor that it leads to.

    `base` is the anchor as bfloat16; both results are cut into chunks as it is. Raises UnknownEncoding, BadSize if
    `base` has another number of elements, and NotFinite.
    """
    header, codec = base.header, get_codec(encoding)
    if header.encoding != ANCHOR or header.num_elements != values.numel():
        raise BadSize(f"{values.numel()} values, and {header.num_elements} of the anchor as {header.encoding}")
    changes, anchors = _Chunks(encoding, header), _Chunks(ANCHOR, header)
    for index, chunk in enumerate(base.chunks):
        bound = header.chunk_slice(index)
        size, device = bound.stop - bound.start, values.device
        before = scratch("change: before", torch.float32, size, device)
        change = scratch("change: change", torch.float32, size, device)
        after = scratch("change: after", torch.bfloat16, size, device)
        encoded = scratch("change: encoded", torch.uint8, codec.num_bytes(size), device)
        decode_chunk(header, index, chunk, before)
        torch.sub(values[bound], before, out=change)
        try:
            codec.encode(change, encoded)
        except NotFinite as error:
            raise NotFinite(f"the change of elements from {bound.start}: {error}") from None
        for part in slices(size):
            codec.decode_range(encoded, size, part.start, change[part])
            _add_rounded(before[part], change[part], after[part])
        changes.add(encoded)
        anchors.add(after.view(torch.uint8))
    return changes.payload(), anchors.payload()


@torch.no_grad()
def decode_version(payload: Payload, base: Tensor | None, out: Tensor) -> None:
    """The version that a payload holds, into `out` (n,) float32 on any device.

    `base` is the anchor that the payload is a change of: float32 (n,) on the same device, only read. Without one, the
    payload holds the values themselves. Raises as `decode_payload`.
    """
    if base is None:
        decode_payload(payload, out)
        return
    header = payload.header
    if not base.numel() == out.numel() == header.num_elements:
        raise BadSize(f"the change has {header.num_elements} elements, the anchor {base.numel()}, `out` {out.numel()}")
    check_layout(header)
    check_chunk_sizes(payload)
    for index, data in enumerate(payload.chunks):  # a chunk is still in the cache when the anchor is added to it
        bound = header.chunk_slice(index)
        before, chunk = base[bound], out[bound]
        decode_chunk(header, index, data, chunk)
        for part in slices(chunk.numel()):
            rounded = scratch("change: after", torch.bfloat16, part.stop - part.start, out.device)
            _add_rounded(before[part], chunk[part], rounded)
            chunk[part].copy_(rounded)


def _add_rounded(base: Tensor, decoded: Tensor, out: Tensor) -> None:
    """out <- bfloat16(base + decoded); base and decoded (m,) float32, out (m,) bfloat16. Overwrites `decoded`."""
    out.copy_(decoded.add_(base).clamp_(-BFLOAT16_MAX, BFLOAT16_MAX))


class _Chunks:
    """A payload that is made chunk by chunk."""

    def __init__(self, encoding: str, like: PayloadHeader) -> None:
        self._encoding, self._like = encoding, like
        self._chunks: list[bytes] = []
        self._checksum = Checksum()

    def add(self, data: Tensor) -> None:
        chunk = data.cpu().numpy().tobytes()
        self._checksum.update(chunk)
        self._chunks.append(chunk)

    def payload(self) -> Payload:
        like, num_bytes = self._like, sum(map(len, self._chunks))
        header = PayloadHeader(self._encoding, like.num_elements, like.chunk_elements, num_bytes, self._checksum.value)
        return Payload(header, tuple(self._chunks))
