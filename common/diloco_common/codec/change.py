"""Versions as changes: a learner adds the change to its anchor, so every learner holds the same anchor.

In the encodings of `VALUES` (`sync.pull`), a shard sends every version by itself. In any other encoding it sends the
change since the version before, and keeps the anchor that learners hold. The anchor is always representable in
bfloat16. Both sides compute the next anchor by one rule, in float32, bit for bit:

    change = encode(theta - anchor)
    anchor <- bfloat16(anchor + decode(change))         to nearest, ties to even; saturating

The losses of encoding and rounding stay in `theta - anchor`, and so enter the next change. This is error feedback
without extra memory. A learner without an anchor, or with an older one, gets the anchor itself as bfloat16, which is
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_common.codec.base import add_rounded
from diloco_common.codec.payload import (
    ChunkWriter,
    Payload,
    as_tensor,
    check_chunk_sizes,
    check_layout,
    decode_chunk,
    decode_payload,
)
from diloco_common.codec.registry import get_codec
from diloco_common.codec.scratch import scratch, slices
from diloco_common.errors import BadSize, NotFinite

ANCHOR = "bfloat16"
"""Encoding of anchors."""
VALUES = ("float32", ANCHOR)
"""In these encodings every version is sent by itself; in all others it is sent as a change."""


def pull_encodings(pull: str) -> tuple[str, ...]:
    """The encodings that a learner takes, best first; the last one is for values. `pull` is the run's pull encoding."""
    return (pull,) if pull in VALUES else (pull, ANCHOR)


@torch.no_grad()
def encode_change(values: Tensor, base: Payload, encoding: str) -> tuple[Payload, Payload]:
    """The change from an anchor to `values` (n,) float32, and the resulting anchor.

    `base` is the anchor as bfloat16. Both results have the chunks of `base`. Raises UnknownEncoding, BadSize if `base`
    has another number of elements, and NotFinite.
    """
    header, codec = base.header, get_codec(encoding)
    if header.encoding != ANCHOR or header.num_elements != values.numel():
        raise BadSize(
            f"there are {values.numel()} values, but the anchor has {header.num_elements}, as {header.encoding}"
        )
    changes = ChunkWriter(encoding, header.num_elements, header.chunk_elements)
    anchors = ChunkWriter(ANCHOR, header.num_elements, header.chunk_elements)
    for bound, chunk in zip(changes.bounds, base.chunks, strict=True):
        device = values.device
        before = as_tensor(chunk, device).view(torch.bfloat16)
        change, after = changes.next(device), anchors.next(device)
        try:
            codec.encode_change(values[bound], before, change, after.view(torch.bfloat16))
        except NotFinite as error:
            raise NotFinite(f"the change of elements from {bound.start}: {error}") from None
        changes.written(change)
        anchors.written(after)
    return changes.payload(), anchors.payload()


@torch.no_grad()
def decode_version(payload: Payload, base: Tensor | None, out: Tensor) -> None:
    """Decode the version in a payload into `out` (n,) float32 on any device.

    If the payload is a change, `base` is the anchor to add it to: float32 (n,) on the same device, only read. Without
    `base`, the payload holds the values themselves. Raises as `decode_payload`.
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
            add_rounded(before[part], chunk[part], rounded)
            chunk[part].copy_(rounded)
