"""Contributions -> one pseudo-gradient.

Per piece, with weights w (tokens^2 / steps) and contributions v:

    mean    sum w v / sum w
    rda     (sum w|v| / sum w) * unit(sum w unit(v) / sum w),  unit(0) = 0      (radial-directional averaging)

Outer gradients of different learners are nearly orthogonal, so the mean of M of norm R has only norm R / sqrt(M); RDA
averages directions and lengths apart and keeps R. It falls back to the mean where the directions cancel, and pieces
marked `mean_merge` (embeddings and output heads) always take the mean.

Contributions stay compressed until here: they are decoded chunk by chunk into one scratch buffer and summed in float32,
in sorted learner order, so the result depends on the set alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_chunk
from diloco_common.manifest import Piece
from diloco_server.core.rounds import Contribution

CANCELLED = 1e-6
"""Directions cancel where the norm of their weighted mean is below this."""


class Workspace:
    """Reusable buffers of one compute thread: the merged pseudo-gradient and one decoded chunk, float32."""

    def __init__(self) -> None:
        self._merged = torch.empty(0)
        self._chunk = torch.empty(0)

    def merged(self, num_elements: int) -> Tensor:
        if self._merged.numel() < num_elements:
            self._merged = torch.empty(num_elements)
        return self._merged[:num_elements]

    def decode(self, payload: Payload, index: int) -> tuple[int, Tensor]:
        """Where chunk `index` starts in the fragment, and its values until the next call. Raises BadEncoding."""
        bounds = payload.header.chunk_slice(index)
        num_elements = bounds.stop - bounds.start
        if self._chunk.numel() < num_elements:
            self._chunk = torch.empty(num_elements)
        out = self._chunk[:num_elements]
        decode_chunk(payload.header, index, payload.chunks[index], out)
        return bounds.start, out


def piece_norms(payload: Payload, pieces: Sequence[Piece], workspace: Workspace) -> tuple[float, ...]:
    """L2 norm of each piece; non-finite exactly where an element is, or where the sum of squares overflows.

    Raises BadEncoding.
    """
    squares = [0.0] * len(pieces)
    for index in range(payload.header.num_chunks):
        start, values = workspace.decode(payload, index)
        for i, a, b in _overlaps(pieces, start, start + values.numel()):
            squares[i] += float(torch.linalg.vector_norm(values[a - start : b - start])) ** 2
    return tuple(square**0.5 for square in squares)


def merge(contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str, workspace: Workspace) -> Tensor:
    """The merged pseudo-gradient of a fragment: float32 [num_elements], valid until the workspace is used again."""
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    merged = workspace.merged(sum(p.num_elements for p in pieces))
    use_rda = [rule == "rda" and len(ordered) > 1 and not p.mean_merge for p in pieces]
    total = sum(c.weight for c in ordered)
    shares = [c.weight / total for c in ordered]  # not weights, whose squares could leave the range of float32
    _sum_up(merged, ordered, pieces, workspace, [
        [_over_norm(share, c.piece_norms[i]) if rda else share for i, rda in enumerate(use_rda)]
        for c, share in zip(ordered, shares, strict=True)
    ])  # fmt: skip

    cancelled = [False] * len(pieces)
    for i, piece in enumerate(pieces):
        if not use_rda[i]:
            continue
        direction = merged[piece.offset : piece.offset + piece.num_elements]
        norm = float(torch.linalg.vector_norm(direction))
        radius = sum(share * c.piece_norms[i] for c, share in zip(ordered, shares, strict=True))
        if norm > CANCELLED:
            direction.mul_(radius / norm)
        else:
            cancelled[i] = True
    if any(cancelled):
        only = [p if c else None for p, c in zip(pieces, cancelled, strict=True)]
        _sum_up(merged, ordered, only, workspace, [[share] * len(pieces) for share in shares])
    return merged


def _over_norm(share: float, norm: float) -> float:
    """w / |v|, and 0 for a piece that is all zeros."""
    return share / norm if norm > 0 else 0.0


def _sum_up(
    merged: Tensor,
    contributions: Sequence[Contribution],
    pieces: Sequence[Piece | None],
    workspace: Workspace,
    weights: Sequence[Sequence[float]],
) -> None:
    """merged[piece i] <- sum over contributions c of weights[c][i] * c[piece i]; pieces that are None stay."""
    for piece in pieces:
        if piece is not None:
            merged[piece.offset : piece.offset + piece.num_elements].zero_()
    for c, chunk in _order(contributions):
        start, values = workspace.decode(contributions[c].payload, chunk)
        for i, a, b in _overlaps(pieces, start, start + values.numel()):
            merged[a:b].add_(values[a - start : b - start], alpha=weights[c][i])


def _order(contributions: Sequence[Contribution]) -> Iterator[tuple[int, int]]:
    """(contribution, chunk): chunk by chunk, so that the sum stays in cache where chunks have one size."""
    headers = [c.payload.header for c in contributions]
    for chunk in range(max(h.num_chunks for h in headers)):
        for c, header in enumerate(headers):
            if chunk < header.num_chunks:
                yield c, chunk


def _overlaps(pieces: Sequence[Piece | None], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Pieces that meet elements [start, end) of the fragment, as (index, first, last + 1)."""
    for i, piece in enumerate(pieces):
        if piece is None:
            continue
        a, b = max(start, piece.offset), min(end, piece.offset + piece.num_elements)
        if a < b:
            yield i, a, b
