"""Contributions that come in parts: what each part holds, and when the parts make a whole.

The ranks of a learner push what each of them holds of a fragment. A part names its ranges. Parts wait in the round
until they cover the fragment exactly; then they are one contribution, and before that they are nothing. They live and
die with the round and the generation that it asked. Its parts do not overlap, but each range may bring 255 elements of
padding (part_layout.py). So ranges and padding of all parts together are bounded: half a contribution has at most twice
the elements of a whole one, and PADDING_MAX more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from diloco_common.codec import Payload, PayloadHeader
from diloco_common.codec.parts import Span, num_elements, spans
from diloco_common.errors import BadPayload, ContributionConflict
from diloco_common.wire.bounds import RANGES_OF_ALL_MAX
from diloco_common.wire.manifest import Piece
from diloco_common.wire.messages import PushHeader, Range

FLOAT32_MAX = torch.finfo(torch.float32).max
PADDING_MAX = 1 << 22
"""Elements of padding in all parts of a contribution, beyond as many as the fragment has. One part has at most half."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has pushed of a contribution, still compressed."""

    ranges: tuple[Range, ...]
    payload: Payload

    @property
    def spans(self) -> Iterator[Span]:
        """Where in the payload each range lies."""
        return spans(self.ranges)


@dataclass(frozen=True, slots=True)
class PartedPayload:
    """The payload of a contribution that came in parts: together they are the fragment, each element once."""

    header: PayloadHeader
    """Of the whole; `num_bytes` is the sum over parts, and there is no checksum."""
    parts: tuple[RankPart, ...]

    def has(self, header: PushHeader) -> bool:
        """Whether this very part is one of them. An empty part always is."""
        if not header.ranges:
            return True
        return any((p.payload.header, p.ranges) == (header.payload, header.ranges) for p in self.parts)


class PieceSpan(NamedTuple):
    """A piece of the fragment, or what a part has of it, and where that lies in the payload."""

    piece: int
    """Its index in the fragment."""
    start: int
    stop: int


class HalfContribution:
    """The parts of one contribution that have come so far."""

    def __init__(self, header: PushHeader, fragment_elements: int) -> None:
        self.whole = whole_of(header)
        """Names the contribution; equal for all of its parts."""
        self._elements = fragment_elements
        self.tokens_merged = header.tokens_merged
        """Of a seed: the fewest that a rank knows of."""
        self._parts: dict[int, RankPart] = {}
        self._ranges: list[Range] = []  # of all parts, ascending
        self._padded = 0  # elements of all payloads
        self._squares: list[float] = []  # of each piece of the fragment, summed over the parts
        self._covered = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.payload.header.num_bytes for part in self._parts.values())

    @property
    def is_complete(self) -> bool:
        """The parts do not overlap, so they cover the fragment once there are as many elements."""
        return self._covered == self._elements

    def has(self, header: PushHeader) -> bool:
        """Whether this very part is there. Raises ContributionConflict if it cannot belong to the others.

        Raises BadPayload if all of them together have too many ranges, or too much padding.
        """
        if whole_of(header) != self.whole:
            raise ContributionConflict(
                f"fragment {header.fragment_id}: part {header.part} is of another contribution to round {header.round} "
                "than the parts that came before; all ranks of a learner must take it at the same step boundary"
            )
        held = self._parts.get(header.part)
        if held is not None and (held.payload.header, held.ranges) == (header.payload, header.ranges):
            return True
        if held is not None or _overlap(self._ranges, header.ranges):
            raise ContributionConflict(
                f"fragment {header.fragment_id}: part {header.part} of round {header.round} holds elements that "
                "another part has brought; every element must be in one part"
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
        """A part that `has` was asked about, and that is not there yet.

        `piece_norms`: L2 norm of each piece of the fragment, as far as it is in this part.
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
        """Squares add up over parts."""
        return tuple(map(root, self._squares))


def root(square: float) -> float:
    """L2 norm of a sum of squares; infinite where that is NaN, or overflows float32."""
    return math.sqrt(square) if square <= FLOAT32_MAX else math.inf


def whole_of(header: PushHeader) -> PushHeader:
    """What all parts of a contribution have in common; the header itself of one that comes whole."""
    if header.num_parts == 1:
        return header
    payload = PayloadHeader(header.payload.encoding, 0, 1, 0, 0)
    return replace(header, part=0, ranges=(), payload=payload, not_finite=False, tokens_merged=0)


def is_part(header: PushHeader) -> bool:
    return header.num_parts > 1


def check_ranges(header: PushHeader, fragment_elements: int) -> int:
    """How many elements a payload with these ranges has. Raises BadPayload if they do not lie in the fragment."""
    stop = header.ranges[-1].stop if header.ranges else 0
    if stop > fragment_elements or (header.ranges and not is_part(header)):
        raise BadPayload(
            f"fragment {header.fragment_id}: part {header.part} of {header.num_parts} has ranges up to element {stop}, "
            f"the fragment has {fragment_elements} elements; only parts have ranges, and those of the fragment"
        )
    return num_elements(header.ranges)


def places_of(ranges: Sequence[Range], pieces: Sequence[Piece]) -> list[PieceSpan]:
    """Where pieces lie in a payload with these ranges of the fragment, ascending; no ranges: the whole fragment."""
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
    """Whether two of these ranges, each list ascending and disjoint in itself, have an element in common."""
    for r in more:
        after = bisect_right(held, r)
        if after > 0 and held[after - 1].stop > r.start:
            return True
        if after < len(held) and held[after].start < r.stop:
            return True
    return False
