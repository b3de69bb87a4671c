"""What one rank of an island holds of a fragment, and what of that it pushes.

    held    the elements that the rank's own tensors cover: all of them under DDP, rows of each tensor under FSDP2
    own     what of these it pushes: ranks that hold the same elements share them out, in whole blocks

Both are laid out as part_layout.py says, so blocks begin where those of the whole fragment begin. What is own is one
slice of what is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.manifest import Fragment, Piece
from diloco_common.part_layout import num_elements, spans
from diloco_common.ranges import Range


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of one tensor, flattened: elements start to stop - 1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many ranks hold the same elements as this one, itself included, and which of them it is."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class LocalFragment(Fragment):
    """A fragment as one rank has it. Its pieces name elements of the rank's own tensors, and where they are held."""

    size: int
    """Elements that are held, and zeros between them."""
    ranges: tuple[Range, ...]
    """Held, in the fragment; empty: the whole fragment, unless `size` is 0."""
    own: slice
    """Of what is held: what this rank pushes."""
    own_ranges: tuple[Range, ...]
    """The same, in the fragment."""
    part: int
    num_parts: int

    @property
    def num_elements(self) -> int:
        return self.size

    @property
    def has_gaps(self) -> bool:
        """Whether zeros lie between the pieces."""
        return sum(piece.num_elements for piece in self.pieces) < self.size


def local_fragment(
    fragment: Fragment, holdings: Mapping[str, Holding], sharing: Sharing, rank: int, size: int
) -> LocalFragment:
    """What a rank of `size` ranks has of a fragment. `holdings`: by tensor."""
    found = []
    for piece in fragment.pieces:
        held = holdings[piece.tensor]
        start = max(held.start, piece.tensor_offset)
        stop = min(held.stop, piece.tensor_offset + piece.num_elements)
        if start < stop:
            at = piece.offset + start - piece.tensor_offset
            found.append((piece, start - held.start, Range(at, at + stop - start)))
    laid = spans([r for _, _, r in found])
    pieces = tuple(
        Piece(piece.tensor, offset, r.stop - r.start, span.start + span.shift, piece.rule)
        for (piece, offset, r), span in zip(found, laid, strict=True)
    )
    ranges = joined([r for _, _, r in found])
    length = num_elements(ranges)
    own, own_ranges = _share(ranges, length, sharing)
    is_whole = ranges == (Range(0, fragment.num_elements),)
    return LocalFragment(
        fragment.fragment_id,
        fragment.shard_index,
        pieces,
        length,
        () if is_whole else ranges,
        own,
        own_ranges,
        rank,
        size,
        kind=fragment.kind,
    )


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same elements in as few ranges as there can be. `ranges`: ascending and disjoint."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1].stop == start:
            found[-1] = Range(found[-1].start, stop)
        else:
            found.append(Range(start, stop))
    return tuple(found)


def _share(ranges: Sequence[Range], length: int, sharing: Sharing) -> tuple[slice, tuple[Range, ...]]:
    """The slice that one of those takes who hold the same, and its ranges. Whole blocks, so it is laid out as held."""
    blocks = -(-length // BLOCK_ELEMENTS)
    first = blocks * sharing.index // sharing.count * BLOCK_ELEMENTS
    last = min(length, blocks * (sharing.index + 1) // sharing.count * BLOCK_ELEMENTS)
    own = []
    for start, stop, shift in spans(ranges):
        a, b = max(start + shift, first), min(stop + shift, last)
        if a < b:
            own.append(Range(a - shift, b - shift))
    return slice(first, first + num_elements(own)), tuple(own)
