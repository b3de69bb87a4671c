"""Contributions -> one pseudo-gradient.

Per piece, with weights w (tokens^2 / steps) and contributions v:

    mean    sum w v / sum w
    rda     (sum w|v| / sum w) * unit(sum w unit(v) / sum w),  unit(0) = 0      (radial-directional averaging)

Outer gradients of different learners are nearly orthogonal, so the mean of M of norm R has only norm R / sqrt(M); RDA
averages directions and lengths apart and keeps R. It falls back to the mean where the directions cancel, and pieces
marked `mean_merge` (embeddings and output heads) always take the mean.

Contributions stay compressed until here: they are summed in float32, slice by slice and in sorted learner order, so the
result depends on the set alone, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco_common.codec import Payload, as_tensor, check_chunk, get_codec
from diloco_common.manifest import Piece
from diloco_server.core.rounds import Contribution

SLICE = 1 << 17
"""Elements that are summed over all contributions at a time: 512 KiB of float32, which stay in the cache."""
FLOAT32_MAX = torch.finfo(torch.float32).max
CANCELLED = 1e-6
"""Directions cancel where the norm of their weighted mean is below this."""


class Workspace:
    """A reusable buffer of one compute thread: the merged pseudo-gradient of one piece, float32."""

    def __init__(self) -> None:
        self._merged = torch.empty(0)

    def merged(self, num_elements: int) -> Tensor:
        """(num_elements,), valid until the next call."""
        if self._merged.numel() < num_elements:
            self._merged = torch.empty(num_elements)
        return self._merged[:num_elements]


def piece_norms(payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]:
    """L2 norm of each piece; non-finite exactly where an element is, or where the sum of squares overflows float32.

    Checks the bytes, once for all: raises BadEncoding.
    """
    header = payload.header
    squares = [0.0] * len(pieces)
    for index, chunk in enumerate(chunk_tensors(payload)):
        bounds = header.chunk_slice(index)
        num_elements = bounds.stop - bounds.start
        check_chunk(header, index, chunk)
        codec = get_codec(header.encoding)
        for i, a, b in _overlaps(pieces, bounds.start, bounds.stop):
            squares[i] += codec.sum_squares(chunk, num_elements, a - bounds.start, b - bounds.start)
    return tuple(square**0.5 if square <= FLOAT32_MAX else math.inf for square in squares)


def merge_pieces(
    contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str, workspace: Workspace
) -> Iterator[tuple[Piece, Tensor]]:
    """The merged pseudo-gradient, piece by piece: float32 (num_elements of the piece,), valid until the next one.

    The bytes were checked (`piece_norms`).
    """
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    sources = [_Source(c) for c in ordered]
    total = sum(c.weight for c in ordered)
    shares = [c.weight / total for c in ordered]  # not weights, whose squares could leave the range of float32
    for i, piece in enumerate(pieces):
        norms = [c.piece_norms[i] for c in ordered]
        merged = workspace.merged(piece.num_elements)
        if rule != "rda" or len(ordered) == 1 or piece.mean_merge:
            _sum_up(merged, sources, piece, shares)
        else:
            squares = _sum_up(merged, sources, piece, list(map(_over_norm, shares, norms)))
            norm, radius = squares**0.5, sum(share * norm for share, norm in zip(shares, norms, strict=True))
            if norm > CANCELLED:
                merged.mul_(radius / norm)
            else:
                _sum_up(merged, sources, piece, shares)
        yield piece, merged


def chunk_tensors(payload: Payload) -> list[Tensor]:
    """The chunks as uint8 tensors, in place."""
    return [as_tensor(chunk) for chunk in payload.chunks]


def _over_norm(share: float, norm: float) -> float:
    """w / |v|, and 0 for a piece that is all zeros."""
    return share / norm if norm > 0 else 0.0


class _Source:
    """One contribution, ready to be added."""

    def __init__(self, contribution: Contribution) -> None:
        payload = contribution.payload
        self._codec = get_codec(payload.header.encoding)
        self._chunk_elements = payload.header.chunk_elements
        self._num_elements = payload.header.num_elements
        self._chunks = chunk_tensors(payload)

    def add_to(self, out: Tensor, start: int, weight: float) -> None:
        """out += weight * elements from `start` on."""
        index, at = divmod(start, self._chunk_elements)
        held = min(self._chunk_elements, self._num_elements - start + at)
        if at + out.numel() <= held:
            self._codec.accumulate_range(self._chunks[index], held, at, out, weight)
        else:  # reaches over the end of a chunk
            self.add_to(out[: held - at], start, weight)
            self.add_to(out[held - at :], start + held - at, weight)


def _sum_up(merged: Tensor, sources: Sequence[_Source], piece: Piece, weights: Sequence[float]) -> float:
    """merged <- sum over contributions c of weights[c] * c[piece]; returns the sum of squares of the result.

    In slices that stay in the cache while all contributions are added.
    """
    squares = 0.0
    for start in range(0, piece.num_elements, SLICE):
        part = merged[start : start + SLICE].zero_()
        for source, weight in zip(sources, weights, strict=True):
            source.add_to(part, piece.offset + start, weight)
        squares += float(torch.linalg.vector_norm(part)) ** 2
    return squares


def _overlaps(pieces: Sequence[Piece], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Pieces that meet elements [start, end) of the fragment, as (index, first, last + 1)."""
    for i, piece in enumerate(pieces):
        a, b = max(start, piece.offset), min(end, piece.offset + piece.num_elements)
        if a < b:
            yield i, a, b
