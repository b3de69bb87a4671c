"""Versions as changes: a learner adds the change to its anchor, so every learner holds the same anchor.

In the encodings of `VALUES` (`sync.pull`), a shard sends every version as values. In any other encoding it sends the
change since the previous version, and keeps the anchor that learners hold. The anchor is always representable in
bfloat16. Both sides compute the next anchor by one rule, in float32, bit for bit:

    change = encode(theta - anchor)
    anchor <- bfloat16(anchor + decode(change))         to nearest, ties to even; saturating

The errors of encoding and rounding stay in `theta - anchor`, so the next change includes them. This is error feedback
without extra memory. A learner without an anchor, or with an older one, gets the anchor itself as bfloat16, which is
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_common.codec import memory
from diloco_common.codec.base import Reference, subtract
from diloco_common.codec.payload import ChunkWriter, Payload, as_tensor, check_chunk_sizes, check_layout, of_chunk
from diloco_common.codec.registry import PlainCodec, get_codec
from diloco_common.errors import BadPayload, NotFinite

ANCHOR = "bfloat16"
VALUES = ("float32", ANCHOR)
"""In these encodings every version is sent as values; in all others as a change."""


def pull_encodings(pull: str) -> tuple[str, ...]:
    """The encodings that a learner accepts, best first; the last is for values. `pull` is the run's pull encoding."""
    return (pull,) if pull in VALUES else (pull, ANCHOR)


@torch.no_grad()
def encode_change(values: Tensor, base: Payload, encoding: str) -> tuple[Payload, Payload]:
    """The change from an anchor to `values` (n,) float32, and the resulting anchor.

    `base` is the anchor as bfloat16. Both results have the chunks of `base`. Raises UnknownEncoding, BadPayload if
    `base` has another number of elements, and NotFinite.
    """
    header, codec = base.header, get_codec(encoding)
    if header.encoding != ANCHOR or header.num_elements != values.numel():
        raise BadPayload(
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
def decode_version(
    payload: Payload, base: Tensor | None, device: torch.device | str = "cpu", reference: Reference | None = None
) -> tuple[Tensor, Tensor | None]:
    """The version in a payload, on a device, and its difference from `reference`: (n,) float32, in the same pass.

    If the payload is a change, `base` is the bfloat16 anchor to add it to; it is only read. Without `base`, the payload
    holds values. The version is the learner's next anchor: (n,) bfloat16 if the run pulls bfloat16 or changes (bfloat16
    is then exact), else float32. It is a copy in the pool of large tensors: received bytes lie in malloc's heap, and
    would fragment it while they are the anchor. Raises what `decode_payload` raises.
    """
    header = payload.header
    for other in (base, reference and reference.values):
        if other is not None and other.numel() != header.num_elements:
            raise BadPayload(f"the version has {header.num_elements} elements, what it is added to {other.numel()}")
    check_layout(header)
    check_chunk_sizes(payload)
    codec = get_codec(header.encoding)
    dtype = torch.bfloat16 if base is not None else codec.dtype if isinstance(codec, PlainCodec) else torch.float32
    anchor = memory.empty(header.num_elements, dtype, device)
    difference = None if reference is None else memory.empty(header.num_elements, device=device)
    for index, chunk in enumerate(payload.chunks):
        bound, data = header.chunk_slice(index), as_tensor(chunk, device)
        minus = None if reference is None else reference.part(bound)
        out = None if difference is None else difference[bound]
        with of_chunk(index):
            if base is not None:
                codec.decode_change(data, base[bound].bfloat16(), anchor[bound], minus, out)
                continue
            if isinstance(codec, PlainCodec):
                anchor[bound].view(torch.uint8).copy_(data)
            else:
                codec.decode(data, anchor[bound])
        if minus is not None and out is not None:
            subtract(anchor[bound], minus, out)
    return anchor, difference
