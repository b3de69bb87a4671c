"""How ranges of a fragment lie in the payload of a part.

Blocks of elements share a scale. Blocks of all contributions must begin at the same elements, or the kernels that sum
them up could not go through them block by block. So a range that begins in the middle of a block does so in the payload
too: element e of the fragment lies at a position that differs from e by a multiple of 256. Between two ranges lie
zeros, as few as that takes, and before the first one. They are at most 255 for each range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.ranges import Range


class Span(NamedTuple):
    """A range of the fragment, and where it lies in the payload."""

    start: int
    stop: int
    shift: int
    """Position in the payload minus element of the fragment: a multiple of BLOCK_ELEMENTS."""


def spans(ranges: Sequence[Range]) -> Iterator[Span]:
    """Ranges in ascending order, disjoint, none empty."""
    end = 0
    for start, stop in ranges:
        at = end + (start - end) % BLOCK_ELEMENTS
        yield Span(start, stop, at - start)
        end = at + stop - start


def num_elements(ranges: Sequence[Range]) -> int:
    """Of a payload with these ranges, zeros included."""
    end = 0
    for span in spans(ranges):
        end = span.stop + span.shift
    return end
