"""How an arm is tuned: a search along its axes, with a number of trials that is the same for every arm. Pure.

It begins in the middle of every axis, and tries the neighbours of the best so far, axis by axis. An optimum is one
whose neighbours were all tried and are worse. A best value at the end of its axis is none, and neither is one whose
neighbours the budget did not reach: both are said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Axes = Mapping[str, Sequence[Any]]
"""Setting -> the values that it may take: numbers in their order, or names."""
Point = tuple[int, ...]
"""An index into each axis."""


def proposals(axes: Axes, tried: Mapping[Point, float], trials: int) -> list[Point]:
    """What to try next, all at once; none: the search is over. `tried`: point -> loss to select by."""
    if not tried:
        return [tuple((len(values) - 1) // 2 for values in axes.values())]
    best = min(tried, key=lambda point: (tried[point], point))
    for axis in range(len(axes)):
        untried = [point for point in neighbours(axes, best, axis) if point not in tried]
        if untried:
            return untried[: max(0, trials - len(tried))]
    return []


def neighbours(axes: Axes, point: Point, axis: int) -> list[Point]:
    """Along one axis: the next number on either side, or every other name."""
    values = list(axes.values())[axis]
    others = range(len(values)) if _are_names(values) else (point[axis] + 1, point[axis] - 1)
    return [
        (*point[:axis], other, *point[axis + 1 :])
        for other in others
        if 0 <= other < len(values) and other != point[axis]
    ]


def doubts(axes: Axes, tried: Mapping[Point, float]) -> list[str]:
    """Why the best of a search may be no optimum, in words; none: it is one."""
    best = min(tried, key=lambda point: (tried[point], point))
    said = []
    for axis, (setting, values) in enumerate(axes.items()):
        if len(values) > 1 and not _are_names(values) and best[axis] in (0, len(values) - 1):
            said.append(f"{setting} = {values[best[axis]]} lies at the edge of its axis")
        elif any(point not in tried for point in neighbours(axes, best, axis)):
            said.append(f"not all neighbours of {setting} = {values[best[axis]]} were tried")
    return said


def _are_names(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values)
