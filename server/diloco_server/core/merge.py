"""Merges contributions into one pseudo-gradient.

For each piece, with contributions v, weights w = tokens^2 / steps, and shares s = w / sum w:

    mean    sum s v
    rda     (sum s|v|) unit(sum s unit(v)),  unit(0) = 0        radial-directional averaging
    agreement   (1 - c / 2) sum s v,   c: mean cosine of two contributions, at least 0

Outer gradients of different learners are nearly orthogonal, so the mean of M of norm R has only norm R / sqrt(M). RDA
averages directions and lengths separately and keeps R. If the directions cancel, it falls back to the mean. Pieces
whose rule is the mean (embeddings and output heads) never use RDA.

Where contributions agree, an outer step of eta / (1 - mu) > 1 overshoots. They agree most at the beginning of a run and
where H is small. There the agreement rule shortens the mean, by half at most.

v is a contribution after `influence.py` has bounded its length (`Contribution.kept`) and, among strangers, its weight.

Each rule is a weighted sum of the contributions. The weights need only the norms, which are known, and either the norm
of the mean direction (rda) or all dot products (user rules); for these the contributions are read again. They stay
compressed until here. They are summed in float32, slice by slice in sorted learner order, so the result depends only on
the set, bit for bit.

Contributions to buffers become the next values of the buffers, by each buffer's own rule.

A learner pushes a whole buffer, as its difference from zero. So the values depend on no base version, and the formulas
are exact even if learners have different ones. A learner's last contribution counts as long as it has its lease, even
in rounds without it; otherwise a slow learner's data would be only in every fourth version. With the learners' values
x, the weights for one round, and shares s = w / sum w:

    mean       sum s x
    variance   sum s x + sum s (m - mean)^2,   m: the values of the running mean beside it
    most       max x
    one        x of the learner with the largest weight, the first of these by id

Values that are equal on all learners stay equal, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diloco_common.codec import Chunk, Codec, Payload, PayloadHeader, as_tensor, check_chunk, get_codec
from diloco_common.codec.base import ChunkPart
from diloco_common.codec.blocks import FLOAT32_TINY
from diloco_common.codec.memory import SLICE_ELEMENTS, scratch
from diloco_common.codec.native import WeightedSum
from diloco_common.errors import BadPayload
from diloco_common.wire.manifest import Piece, mean_of
from diloco_server.core.parts import PartedPayload, PieceSpan, places_of, root
from diloco_server.core.round import Contribution

DOT_SLICE = SLICE_ELEMENTS // 8
"""Elements of each contribution decoded at a time for dot products."""
NEGLIGIBLE = FLOAT32_TINY**0.5
"""A contribution shorter than this share of the radius has no direction: scaled up, it would overflow float32."""
AGREED = 0.5
"""The share by which the mean is shortened if contributions agree fully."""
CANCELLED = 1e-6
"""Directions cancel if the norm of their weighted mean is below this."""


class PieceNorms:
    """The L2 norm of each piece of a contribution, summed chunk by chunk while the bytes arrive.

    It also checks the bytes. Only `finish` raises an error, since a wrong checksum tells more.
    """

    def __init__(self, header: PayloadHeader, num_pieces: int, places: Sequence[PieceSpan]) -> None:
        """`places`: positions of the pieces in the payload (`parts.places_of`)."""
        self._header = header
        self._codec = get_codec(header.encoding)
        self._places = places
        self._first = 0  # the first place that ends after the start of the next chunk
        self._squares = [0.0] * num_pieces
        self._index = 0
        self._error: BadPayload | None = None

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk, whose size was checked."""
        if self._error is not None:
            return
        data, bounds = as_tensor(chunk), self._header.chunk_slice(self._index)
        num_elements = bounds.stop - bounds.start
        try:
            check_chunk(self._header, self._index, data)
        except BadPayload as error:
            self._error = error
            return
        for i, a, b in self._places_in(bounds.start, bounds.stop):
            self._squares[i] += self._codec.sum_squares(data, num_elements, a - bounds.start, b - bounds.start)
        self._index += 1

    def _places_in(self, start: int, end: int) -> Iterator[PieceSpan]:
        """The parts of the places within elements [start, end) of the payload. Places ascend, and so do chunks."""
        while self._first < len(self._places):
            i, first, stop = self._places[self._first]
            a, b = max(start, first), min(end, stop)
            if a < b:
                yield PieceSpan(i, a, b)
            if stop > end:
                return
            self._first += 1

    def finish(self) -> tuple[float, ...]:
        """The norms. A norm is not finite if and only if an element is not, or the sum of squares overflows float32.
        Raises BadPayload."""
        if self._error is not None:
            raise self._error
        return tuple(map(root, self._squares))


def piece_norms(payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]:
    """The norms of a complete payload. Raises BadPayload."""
    norms = PieceNorms(payload.header, len(pieces), places_of((), pieces))
    for chunk in payload.chunks:
        norms.add(chunk)
    return norms.finish()


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """A slice of the merged pseudo-gradient, as a weighted sum that is not computed yet."""

    start: int
    """Index of its first element in the fragment."""
    num_elements: int
    """At most SLICE_ELEMENTS, all of one piece."""
    codec: Codec
    parts: Sequence[ChunkPart]
    weights: Sequence[float]

    @property
    def bounds(self) -> slice:
        return slice(self.start, self.start + self.num_elements)

    def tensor(self) -> Tensor:
        """The values, float32 (num_elements,), in scratch: valid until the next call."""
        out = scratch("merged", torch.float32, self.num_elements, torch.device("cpu"))
        self.codec.weighted_sum(self.parts, self.weights, out)
        return out

    def sum_squares(self) -> float:
        native = self.native()
        if native is not None:
            return native.squares(self.num_elements)
        return float(torch.linalg.vector_norm(self.tensor())) ** 2

    def native(self) -> WeightedSum | None:
        """The sum as input for a fused kernel; None if there are no kernels."""
        return self.codec.native_sum(self.parts, self.weights)


MergeRule = Callable[[Sequence[float], Sequence[float], Callable[[], Tensor]], Sequence[float]]
"""A user's merge rule. It gets the norms of the contributions to a piece, their shares (which add up to 1), and a
function that reads them once and returns their dot products, float64 (M, M). It returns their factors. Contributions
are sorted by learner id. The mean still merges embeddings and output heads."""


def merge(
    contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str | MergeRule
) -> Iterator[MergedSlice]:
    """The merged pseudo-gradient of a fragment, slice by slice in order. `rule`: a built-in rule's name, or a user's.

    All contributions have one encoding (`admission.check_sizes`), and their bytes were checked (`piece_norms`).
    """
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    sources, shares, kept = [_source(c.payload) for c in ordered], shares_of(ordered), [c.kept for c in ordered]
    for i, piece in enumerate(pieces):
        norms = [c.kept * c.piece_norms[i] for c in ordered]
        weights = _weights(sources, piece, rule, shares, norms, kept)
        yield from _slices(sources, piece.bounds, weights)


def shares_of(ordered: Sequence[Contribution]) -> list[float]:
    weights = [c.weight for c in ordered]
    total = sum(weights)
    return [weight / total for weight in weights]  # shares, because squares of weights could leave the range of float32


def rows(ordered: Sequence[Contribution], bounds: slice) -> Iterator[tuple[slice, Tensor]]:
    """Decoded elements of all contributions, at most `DOT_SLICE` at a time: their position, and float32 (M, n)."""
    yield from _rows([_source(c.payload) for c in ordered], bounds)


def chunk_tensors(payload: Payload) -> list[Tensor]:
    return [as_tensor(chunk) for chunk in payload.chunks]


def _weights(
    sources: Sequence[_Addend],
    piece: Piece,
    rule: str | MergeRule,
    shares: Sequence[float],
    norms: Sequence[float],
    kept: Sequence[float],
) -> Sequence[float]:
    """The factors of the contributions to a piece. `norms`: after scaling by `kept`."""
    clipped = [share * part for share, part in zip(shares, kept, strict=True)]
    if len(sources) == 1 or "mean" in (rule, piece.rule):
        return clipped
    if not isinstance(rule, str):
        given = _checked(rule(norms, shares, partial(_dot_products, sources, piece, kept)), len(sources))
        return [weight * part for weight, part in zip(given, kept, strict=True)]
    if rule == "agreement":
        lengths = [share * norm for share, norm in zip(shares, norms, strict=True)]
        shortened = 1 - AGREED * _agreement(sources, piece, clipped, lengths)
        return [share * shortened for share in clipped]
    return _rda_weights(sources, piece, shares, norms, kept) or clipped


def _checked(weights: Sequence[float], num_sources: int) -> Sequence[float]:
    if len(weights) != num_sources or not all(map(math.isfinite, weights)):
        raise ValueError(
            f"the rule in sync.merge gave {weights} for {num_sources} contributions: return one finite number for each"
        )
    return weights


def _agreement(sources: Sequence[_Addend], piece: Piece, weights: Sequence[float], lengths: Sequence[float]) -> float:
    """Weighted mean cosine of two contributions, in [0, 1]. Reads them once, for the norm of their sum. `lengths`: the
    norm times the weight of each."""
    alone, pairs = sum(x * x for x in lengths), 2 * sum(x * y for x, y in itertools.combinations(lengths, 2))
    together = sum(part.sum_squares() for part in _slices(sources, piece.bounds, weights))
    return min(1.0, max(0.0, (together - alone) / pairs)) if pairs > 0 else 0.0


def _rda_weights(
    sources: Sequence[_Addend], piece: Piece, shares: Sequence[float], norms: Sequence[float], kept: Sequence[float]
) -> Sequence[float] | None:
    """The factors for RDA. Reads the contributions once, for the length of their mean direction. None: they cancel."""
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    shortest = max(radius * NEGLIGIBLE, FLOAT32_TINY)
    weights = [
        share * part / norm if norm >= shortest else 0.0 for share, norm, part in zip(shares, norms, kept, strict=True)
    ]
    norm = math.sqrt(sum(part.sum_squares() for part in _slices(sources, piece.bounds, weights)))
    return [weight * (radius / norm) for weight in weights] if norm > CANCELLED else None


def _dot_products(sources: Sequence[_Addend], piece: Piece, kept: Sequence[float]) -> Tensor:
    """Dot products of all pairs, scaled by `kept`: float64 (M, M). Reads them once; holds 12 M DOT_SLICE bytes."""
    parts = torch.tensor(kept, dtype=torch.float64)
    products = torch.zeros(len(sources), len(sources), dtype=torch.float64)
    for _, values in _rows(sources, piece.bounds):
        doubles = values.double()
        products += doubles @ doubles.T
    return products * torch.outer(parts, parts)


def _rows(sources: Sequence[_Addend], bounds: slice) -> Iterator[tuple[slice, Tensor]]:
    for some in _slices(sources, bounds, [0.0] * len(sources), DOT_SLICE):
        values = torch.empty(len(sources), some.num_elements)
        for row, part in zip(values, some.parts, strict=True):
            some.codec.weighted_sum([part], [1.0], row)
        yield some.bounds, values


class _Addend(Protocol):
    codec: Codec

    def part(self, start: int) -> tuple[ChunkPart, int]:
        """Elements of the fragment from `start` on, and where they end."""


def _source(payload: Payload | PartedPayload) -> _Addend:
    return _Parted(payload) if isinstance(payload, PartedPayload) else _WholePayload(payload)


class _WholePayload:
    def __init__(self, payload: Payload) -> None:
        header = payload.header
        self.codec = get_codec(header.encoding)
        self._bounds = header.chunk_bounds()
        self._chunk_elements = header.chunk_elements
        self._chunks = chunk_tensors(payload)

    def part(self, start: int) -> tuple[ChunkPart, int]:
        """Elements of the payload from `start` on, and the end of their chunk."""
        index = start // self._chunk_elements
        bounds = self._bounds[index]
        return ChunkPart(self._chunks[index], bounds.stop - bounds.start, start - bounds.start), bounds.stop


class _Parted:
    def __init__(self, payload: PartedPayload) -> None:
        sources = [(_WholePayload(part.payload), part) for part in payload.parts]
        self._spans = sorted(((span, source) for source, part in sources for span in part.spans), key=lambda s: s[0])
        self._starts = [span.start for span, _ in self._spans]
        self.codec = sources[0][0].codec

    def part(self, start: int) -> tuple[ChunkPart, int]:
        span, source = self._spans[bisect_right(self._starts, start) - 1]
        part, stop = source.part(start + span.shift)
        return part, min(span.stop, stop - span.shift)


def _slices(
    sources: Sequence[_Addend], bounds: slice, weights: Sequence[float], size: int = SLICE_ELEMENTS
) -> Iterator[MergedSlice]:
    """The weighted sum over these elements, in slices of at most `size` that end with their chunk at the latest."""
    start, end = bounds.start, bounds.stop
    while start < end:
        parts, stops = zip(*(source.part(start) for source in sources), strict=True)
        stop = min(end, start + size, *stops)
        assert start < stop, "parts of a contribution leave a hole"
        yield MergedSlice(start, stop - start, sources[0].codec, parts, weights)
        start = stop


class Latest:
    """Each learner's last contribution to one fragment of buffers."""

    def __init__(self) -> None:
        self._of: dict[str, Contribution] = {}

    def take(
        self, merging: Sequence[Contribution], live: Collection[str]
    ) -> tuple[list[Contribution], list[Contribution]]:
        """The contributions of a closed round, and those of earlier rounds that also count, each sorted by learner.

        `live`: learners with a lease that are not left out.
        """
        mine = {c.learner_id: self._over_its_rounds(c) for c in merging}
        self._of = {i: c for i, c in self._of.items() if i in live} | mine
        return [mine[i] for i in sorted(mine)], [self._of[i] for i in sorted(self._of.keys() - mine.keys())]

    def _over_its_rounds(self, contribution: Contribution) -> Contribution:
        before = self._of.get(contribution.learner_id)
        return replace(contribution, rounds=max(1, contribution.round - before.round) if before is not None else 1)


def pool(contributions: Sequence[Contribution], pieces: Sequence[Piece]) -> Iterator[tuple[slice, Tensor]]:
    """The merged values of buffers, float32, slice by slice in order."""
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    weights = shares_of(ordered)
    shares = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
    by_name = {piece.tensor: piece for piece in pieces}
    for piece in pieces:
        means = by_name.get(mean_of(piece.tensor)) if piece.rule == "variance" else None
        spread = None if means is None else _spread(ordered, means, shares)
        for bounds, deltas in rows(ordered, piece.bounds):
            values = -deltas.double()
            match piece.rule:
                case "most":
                    merged = values.amax(0)
                case "one":
                    merged = values[weights.index(max(weights))]
                case _:
                    merged = _mean(values, shares)
            if spread is not None:
                merged = (merged + spread[bounds.start - piece.offset : bounds.stop - piece.offset]).clamp_(min=0.0)
            yield bounds, merged.float()


def _spread(ordered: Sequence[Contribution], means: Piece, shares: Tensor) -> Tensor:
    """The variance of running means among learners: float64 [num_elements]."""
    values = -torch.cat([deltas for _, deltas in rows(ordered, means.bounds)], dim=1).double()
    return ((values - _mean(values, shares)).square() * shares).sum(0)


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    first = values[0]
    return first + ((values - first) * shares).sum(0)
