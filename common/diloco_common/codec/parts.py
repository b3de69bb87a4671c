"""How ranges of a fragment are laid out in the payload of a part.

Blocks of elements share a scale. Blocks of all contributions must begin at the same elements, so that kernels can sum
them block by block. So a range that begins in the middle of a block does so in the payload too: the position of element
e of the fragment differs from e by a multiple of 256. Before each range come the fewest zeros that achieve this, at
most 255.

`cut_header` and `cut_chunks` cut ranges of a fragment out of a payload of values, as the payload of a part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.frames import chunks_crc32c
from diloco_common.codec.payload import Payload, PayloadHeader
from diloco_common.wire.messages import Range


class Span(NamedTuple):
    start: int
    stop: int
    shift: int
    """Position in the payload minus position in the fragment: a multiple of BLOCK_ELEMENTS."""


def spans(ranges: Sequence[Range]) -> Iterator[Span]:
    """The places of ranges, which must be ascending, disjoint and not empty."""
    end = 0
    for start, stop in ranges:
        at = end + (start - end) % BLOCK_ELEMENTS
        yield Span(start, stop, at - start)
        end = at + stop - start


def num_elements(ranges: Sequence[Range]) -> int:
    """Elements of a payload with these ranges, including zeros."""
    end = 0
    for span in spans(ranges):
        end = span.stop + span.shift
    return end


Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Encodings that keep every element by itself; others have scales, and cannot be cut."""


def sha256(payload: Payload) -> bytes:
    """A digest that nobody can forge, of the encoding, the size, the chunk size if it matters, and all chunks."""
    header = payload.header
    chunk_elements = 0 if header.encoding in ITEM_BYTES else header.chunk_elements
    digest = hashlib.sha256(f"{header.encoding} {header.num_elements} {chunk_elements}\n".encode())
    for chunk in payload.chunks:
        digest.update(chunk)
    return digest.digest()


def cut_header(whole: Payload, ranges: Sequence[Range], chunk_elements: int | None = None) -> PayloadHeader:
    """The header of a payload of these ranges. Cuts everything once, chunk by chunk, to get the checksum.

    `chunk_elements`: if None, that of `whole`. Raises KeyError for an encoding that cannot be cut.
    """
    header, size = whole.header, num_elements(ranges)
    num_bytes = size * ITEM_BYTES[header.encoding]
    chunk_elements = chunk_elements or header.chunk_elements
    checksum = chunks_crc32c(cut_chunks(whole, ranges, chunk_elements))
    return PayloadHeader(header.encoding, size, chunk_elements, num_bytes, checksum)


def cut_chunks(whole: Payload, ranges: Sequence[Range], chunk_elements: int | None = None) -> Iterator[bytes]:
    """The chunks of that payload. Each is cut on demand, so at most one is held here."""
    item, size = ITEM_BYTES[whole.header.encoding], num_elements(ranges)
    step, chunk_bytes = chunk_elements or whole.header.chunk_elements, whole.header.chunk_elements * item
    chunks = [np.frombuffer(chunk, np.uint8) for chunk in whole.chunks]
    rest = spans(ranges)
    span = next(rest, None)
    for at in range(0, size, step):
        end = min(at + step, size)
        out = np.zeros((end - at) * item, np.uint8)
        while span is not None and span.start + span.shift < end:
            first, stop = max(span.start, at - span.shift), min(span.stop, end - span.shift)
            _copy(out, (first + span.shift - at) * item, chunks, first * item, stop * item, chunk_bytes)
            if span.stop > stop:
                break  # the rest is in the next chunk
            span = next(rest, None)
        yield out.tobytes()


def _copy(out: Bytes, at: int, chunks: Sequence[Bytes], start: int, stop: int, chunk_bytes: int) -> None:
    """Copy bytes `start` to `stop` of all chunks, each but the last `chunk_bytes` long, to `out` from `at` on."""
    while start < stop:
        index, first = divmod(start, chunk_bytes)
        some = chunks[index][first : first + stop - start]
        out[at : at + len(some)] = some
        start, at = start + len(some), at + len(some)
