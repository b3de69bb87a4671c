"""Contributions that arrive in parts, one from each rank of a learner.

A part names its ranges of the fragment. Parts wait in the round until they cover the fragment exactly; only then do
they become a contribution. They are dropped with the round, or with the generation that it asked. Parts do not overlap,
but each range may add 255 elements of padding (parts.py of the worker). So ranges and padding of all parts together are
bounded: an incomplete contribution holds at most twice the fragment's elements plus PADDING_MAX.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_common.codec import Payload, PayloadHeader
from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.parts import Span, num_elements, spans
from diloco_common.codec.registry import FLOAT32_MAX
from diloco_common.errors import BadPayload, ContributionConflict
from diloco_common.wire.bounds import RANGES_MAX, RANGES_OF_ALL_MAX
from diloco_common.wire.manifest import Piece
from diloco_common.wire.messages import PushHeader, Range

PADDING_MAX = 2 * RANGES_MAX * BLOCK_ELEMENTS
"""Padding elements allowed in all parts of a contribution, beyond the fragment's size: twice what one part may have."""


@dataclass(frozen=True, slots=True)
class RankPart:
    ranges: tuple[Range, ...]
    payload: Payload

    @property
    def spans(self) -> Iterator[Span]:
        return spans(self.ranges)


@dataclass(frozen=True, slots=True)
class PartedPayload:
    """The payload of a complete contribution in parts, which together hold each element of the fragment once."""

    header: PayloadHeader
    """The header of the whole contribution: `num_bytes` is the sum over parts, and there is no checksum."""
    parts: tuple[RankPart, ...]

    def has(self, header: PushHeader) -> bool:
        """Whether this exact part is one of them. An empty part always is."""
        if not header.ranges:
            return True
        return any((p.payload.header, p.ranges) == (header.payload, header.ranges) for p in self.parts)


class PieceSpan(NamedTuple):
    """A piece of the fragment, or a part's share of it, and its position in the payload."""

    piece: int
    start: int
    stop: int


class HalfContribution:
    """The parts of one contribution that have arrived so far."""

    def __init__(self, header: PushHeader, fragment_elements: int) -> None:
        self.whole = whole_of(header)
        """Identifies the contribution; equal for all its parts."""
        self._elements = fragment_elements
        self.tokens_merged = header.tokens_merged
        """For a seed: the smallest count that any rank sent."""
        self._parts: dict[int, RankPart] = {}
        self._ranges: list[Range] = []  # of all parts, ascending
        self._padded = 0  # elements in all payloads
        self._squares: list[float] = []  # of each piece of the fragment, summed over the parts
        self._covered = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.payload.header.num_bytes for part in self._parts.values())

    @property
    def is_complete(self) -> bool:
        """True once the parts have as many elements as the fragment, since parts do not overlap."""
        return self._covered == self._elements

    def has(self, header: PushHeader) -> bool:
        """Whether this exact part has arrived. Raises ContributionConflict if it cannot belong with the others.

        Raises BadPayload if all parts together have too many ranges or too much padding.
        """
        if whole_of(header) != self.whole:
            raise ContributionConflict(
                f"fragment {header.fragment_id}: part {header.part} is of another contribution to round {header.round} "
                "than the earlier parts; all ranks of a learner must take it at the same step boundary"
            )
        held = self._parts.get(header.part)
        if held is not None and (held.payload.header, held.ranges) == (header.payload, header.ranges):
            return True
        if held is not None or _overlap(self._ranges, header.ranges):
            raise ContributionConflict(
                f"fragment {header.fragment_id}: part {header.part} of round {header.round} holds elements that "
                "another part has sent; every element must be in one part"
            )
        self._check_room(header)
        return False

    def _check_room(self, header: PushHeader) -> None:
        ranges = len(self._ranges) + len(header.ranges)
        padded, most = self._padded + num_elements(header.ranges), 2 * self._elements + PADDING_MAX
        if ranges > RANGES_OF_ALL_MAX or padded > most:
            raise BadPayload(
                f"fragment {header.fragment_id}: with part {header.part} of {header.num_parts} the contribution has "
                f"{ranges} ranges (at most {RANGES_OF_ALL_MAX}) and {padded} elements with padding (at most {most}); "
                "give each rank fewer and longer ranges"
            )

    def add(self, header: PushHeader, part: RankPart, piece_norms: Sequence[float]) -> None:
        """Add a part for which `has` returned False.

        `piece_norms`: L2 norm of the part's share of each piece of the fragment.
        """
        squares = [norm * norm for norm in piece_norms]
        self._squares = [a + b for a, b in zip(self._squares, squares, strict=True)] if self._squares else squares
        self._parts[header.part] = part
        self._ranges = sorted([*self._ranges, *part.ranges])
        self._padded += num_elements(part.ranges)
        self.tokens_merged = min(self.tokens_merged, header.tokens_merged)
        self._covered += sum(stop - start for start, stop in part.ranges)

    def payload(self) -> PartedPayload:
        assert self.is_complete
        parts = tuple(self._parts[number] for number in sorted(self._parts))
        first = parts[0].payload.header
        header = replace(first, num_elements=self._elements, num_bytes=self.num_bytes, chunks_crc32c=0)
        return PartedPayload(header, parts)

    def piece_norms(self) -> tuple[float, ...]:
        """L2 norm of each piece; squares add up over parts."""
        return tuple(map(root, self._squares))


def root(square: float) -> float:
    """The root of a sum of squares; infinite where that is NaN or overflows float32."""
    return math.sqrt(square) if square <= FLOAT32_MAX else math.inf


def whole_of(header: PushHeader) -> PushHeader:
    """The header fields that all parts of a contribution share; for a whole contribution, its header."""
    if header.num_parts == 1:
        return header
    payload = PayloadHeader(header.payload.encoding, 0, 1, 0, 0)
    return replace(header, part=0, ranges=(), payload=payload, not_finite=False, tokens_merged=0)


def is_part(header: PushHeader) -> bool:
    return header.num_parts > 1


def check_ranges(header: PushHeader, fragment_elements: int) -> int:
    """The number of elements of a payload with these ranges. Raises BadPayload if they lie outside the fragment."""
    stop = header.ranges[-1].stop if header.ranges else 0
    if stop > fragment_elements or (header.ranges and not is_part(header)):
        raise BadPayload(
            f"fragment {header.fragment_id}: part {header.part} of {header.num_parts} has ranges up to element {stop}, "
            f"the fragment has {fragment_elements} elements; only parts have ranges, and only within the fragment"
        )
    return num_elements(header.ranges)


def places_of(ranges: Sequence[Range], pieces: Sequence[Piece]) -> list[PieceSpan]:
    """The positions of pieces in a payload with these ranges, ascending. No ranges mean the whole fragment."""
    if not ranges:
        return [PieceSpan(i, p.offset, p.offset + p.num_elements) for i, p in enumerate(pieces)]
    found = []
    first = 0  # pieces ascend, and so do ranges
    for span in spans(ranges):
        while pieces[first].offset + pieces[first].num_elements <= span.start:
            first += 1
        for i in range(first, len(pieces)):
            a = max(span.start, pieces[i].offset)
            b = min(span.stop, pieces[i].offset + pieces[i].num_elements)
            if a >= b:
                break
            found.append(PieceSpan(i, a + span.shift, b + span.shift))
    return found


def _overlap(held: Sequence[Range], more: Sequence[Range]) -> bool:
    """Whether a range of one list overlaps a range of the other. Each list is ascending and disjoint."""
    for r in more:
        after = bisect_right(held, r)
        if after > 0 and held[after - 1].stop > r.start:
            return True
        if after < len(held) and held[after].start < r.stop:
            return True
    return False
