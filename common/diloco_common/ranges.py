"""Ranges of a flat fragment: what a part of a contribution holds, and what a pull asks for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from diloco_common.errors import BadRequest


class Range(NamedTuple):
    """Elements start to stop - 1 of a flat fragment. A tuple, because callers send many."""

    start: int
    stop: int


def check_ranges(what: str, ranges: Sequence[Range]) -> None:
    """They ascend, are disjoint, and none is empty; they may touch. Raises BadRequest."""
    for start, stop in ranges:
        if start >= stop:
            raise BadRequest(f"{what} has a range from {start} to {stop}, which is empty; leave it out")
    for before, after in itertools.pairwise(ranges):
        if before.stop > after.start:
            raise BadRequest(
                f"{what} has a range from {after.start} after one that ends at {before.stop}; "
                "ranges must ascend and be disjoint"
            )
