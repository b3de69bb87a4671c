"""Contributions -> one pseudo-gradient.

Per piece, with weights w (tokens^2 / steps) and contributions v:

    mean    sum w v / sum w
    rda     (sum w|v| / sum w) * unit(sum w unit(v) / sum w),  unit(0) = 0      (radial-directional averaging)

Outer gradients of different learners are nearly orthogonal, so the mean of M of norm R has only norm R / sqrt(M); RDA
averages directions and lengths apart and keeps R. It falls back to the mean where the directions cancel, and pieces
marked `mean_merge` (embeddings and output heads) always take the mean.

Either is a weighted sum of the contributions, once the norm of the mean direction is known, for which they are read
twice. They stay compressed until here: they are summed in float32, slice by slice and in sorted learner order, so the
result depends on the set alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_common.codec import Codec, Payload, PayloadHeader, as_tensor, check_chunk, get_codec
from diloco_common.codec.base import Part
from diloco_common.codec.native import WeightedSum
from diloco_common.codec.scratch import scratch
from diloco_common.errors import BadEncoding
from diloco_common.manifest import Piece
from diloco_server.core.round import Contribution

SLICE = 1 << 18
"""Elements that are worked on at a time: 1 MiB of float32, which stays in the cache from one operation to the next."""
FLOAT32_MAX = torch.finfo(torch.float32).max
CANCELLED = 1e-6
"""Directions cancel where the norm of their weighted mean is below this."""


class PieceNorms:
    """L2 norm of each piece of a contribution, summed up chunk by chunk while the bytes come in.

    Checks the bytes, once for all. An error is raised at the end, as a wrong checksum says more.
    """

    def __init__(self, header: PayloadHeader, pieces: Sequence[Piece]) -> None:
        self._header = header
        self._codec = get_codec(header.encoding)
        self._pieces = pieces
        self._squares = [0.0] * len(pieces)
        self._index = 0
        self._error: BadEncoding | None = None

    def add(self, chunk: bytes) -> None:
        """The next chunk; its size was checked."""
        if self._error is not None:
            return
        data, bounds = as_tensor(chunk), self._header.chunk_slice(self._index)
        num_elements = bounds.stop - bounds.start
        try:
            check_chunk(self._header, self._index, data)
        except BadEncoding as error:
            self._error = error
            return
        for i, a, b in _overlaps(self._pieces, bounds.start, bounds.stop):
            self._squares[i] += self._codec.sum_squares(data, num_elements, a - bounds.start, b - bounds.start)
        self._index += 1

    def finish(self) -> tuple[float, ...]:
        """Non-finite exactly where an element is, or where the sum of squares overflows float32. Raises BadEncoding."""
        if self._error is not None:
            raise self._error
        return tuple(square**0.5 if square <= FLOAT32_MAX else math.inf for square in self._squares)


def piece_norms(payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]:
    """The same of a payload that is there already. Raises BadEncoding."""
    norms = PieceNorms(payload.header, pieces)
    for chunk in payload.chunks:
        norms.add(chunk)
    return norms.finish()


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """A slice of the merged pseudo-gradient, as the weighted sum that it is: whoever needs it adds it up."""

    start: int
    """Its first element, in the fragment."""
    num_elements: int
    """At most SLICE, all of one piece."""
    codec: Codec
    parts: Sequence[Part]
    weights: Sequence[float]

    @property
    def bounds(self) -> slice:
        """Its elements, in the fragment."""
        return slice(self.start, self.start + self.num_elements)

    def tensor(self) -> Tensor:
        """The values, float32 (num_elements,), in scratch: valid until the next call."""
        out = scratch("merged", torch.float32, self.num_elements, torch.device("cpu"))
        self.codec.weighted_sum(self.parts, self.weights, out)
        return out

    def sum_squares(self) -> float:
        """Of the values."""
        native = self.native()
        if native is not None:
            return native.squares(self.num_elements)
        return float(torch.linalg.vector_norm(self.tensor())) ** 2

    def native(self) -> WeightedSum | None:
        """For a kernel that adds up and goes on with the sum; None where there are no kernels."""
        return self.codec.native_sum(self.parts, self.weights)


def merge(contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str) -> Iterator[MergedSlice]:
    """The merged pseudo-gradient of a fragment, slice by slice in order.

    All contributions have one encoding (`guards.check_sizes`), and their bytes were checked (`piece_norms`).
    """
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    sources = [_Source(c.payload) for c in ordered]
    total = sum(c.weight for c in ordered)
    shares = [c.weight / total for c in ordered]  # not weights, whose squares could leave the range of float32
    for i, piece in enumerate(pieces):
        weights: Sequence[float] = shares
        if rule == "rda" and len(ordered) > 1 and not piece.mean_merge:
            weights = _rda_weights(sources, piece, shares, [c.piece_norms[i] for c in ordered])
        yield from _slices(sources, piece, weights)


def chunk_tensors(payload: Payload) -> list[Tensor]:
    """The chunks as uint8 tensors, in place."""
    return [as_tensor(chunk) for chunk in payload.chunks]


def _rda_weights(
    sources: Sequence[_Source], piece: Piece, shares: Sequence[float], norms: Sequence[float]
) -> Sequence[float]:
    """What to multiply the contributions to a piece with. Reads them once, for the length of their mean direction."""
    weights = [share / norm if norm > 0 else 0.0 for share, norm in zip(shares, norms, strict=True)]
    norm = math.sqrt(sum(part.sum_squares() for part in _slices(sources, piece, weights)))
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    return [weight * (radius / norm) for weight in weights] if norm > CANCELLED else shares


class _Source:
    """One contribution, ready to be added."""

    def __init__(self, payload: Payload) -> None:
        header = payload.header
        self.codec = get_codec(header.encoding)
        self._bounds = header.chunk_bounds()
        self._chunk_elements = header.chunk_elements
        self._chunks = chunk_tensors(payload)

    def part(self, start: int) -> tuple[Part, int]:
        """Elements from `start` of the fragment on, and the end of their chunk."""
        index = start // self._chunk_elements
        bounds = self._bounds[index]
        return Part(self._chunks[index], bounds.stop - bounds.start, start - bounds.start), bounds.stop


def _slices(sources: Sequence[_Source], piece: Piece, weights: Sequence[float]) -> Iterator[MergedSlice]:
    """The weighted sum over a piece; no slice reaches over the end of a chunk."""
    start, end = piece.offset, piece.offset + piece.num_elements
    while start < end:
        parts, stops = zip(*(source.part(start) for source in sources), strict=True)
        stop = min(end, start + SLICE, *stops)
        yield MergedSlice(start, stop - start, sources[0].codec, parts, weights)
        start = stop


def _overlaps(pieces: Sequence[Piece], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Pieces that meet elements [start, end) of the fragment, as (index, first, last + 1)."""
    for i, piece in enumerate(pieces):
        a, b = max(start, piece.offset), min(end, piece.offset + piece.num_elements)
        if a < b:
            yield i, a, b
