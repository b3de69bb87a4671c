"""The course of a run: loss, tokens and learners over time, in a bounded number of points. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, variance

POINTS_MAX = 720
FIRST_EVERY_S = 1.0
SPANS_S = (60.0, 600.0, 7200.0)
"""Where the loss goes is said of the shortest of these spans in which it can be told from its scatter."""


@dataclass(frozen=True)
class Point:
    """The run at one moment."""

    seq: int
    at: float
    """Seconds since 1970."""
    tokens_merged: int
    loss: float | None
    """Mean over the learners that are there and report one; None also while no shard answers: a gap."""
    loss_min: float | None = None
    loss_max: float | None = None
    learners: int = 0
    """With a lease."""
    tokens_per_s: float = 0.0

    def row(self) -> list[float | None]:
        """JSON. `static/course.js` reads it."""
        return [
            self.at, self.tokens_merged, self.loss, self.loss_min, self.loss_max, self.learners, self.tokens_per_s,
        ]  # fmt: skip


@dataclass(frozen=True)
class Trend:
    """How the loss has moved."""

    change: float
    noise: float
    """Standard error of the change, from how the points scatter."""
    over_s: float


class Course:
    """Points at a steady pace. When there are too many, every second one goes, and the pace halves."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thinned_seq = 0
        """Number of the change in which points went: whoever knows less gets the whole course."""
        self._every_s = FIRST_EVERY_S

    def is_due(self, now: float) -> bool:
        return not self.points or now - self.points[-1].at >= 0.95 * self._every_s

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > POINTS_MAX:
            self.points = self.points[::2]
            self._every_s *= 2
            self.thinned_seq = point.seq

    def since(self, seq: int) -> tuple[bool, list[Point]]:
        """Whether the points are the whole course, and the points that came after a change."""
        if seq < self.thinned_seq:
            return True, self.points
        newer = []
        for point in reversed(self.points):
            if point.seq <= seq:
                break
            newer.append(point)
        return seq == 0, newer[::-1]

    def trends(self, spans_s: Iterable[float]) -> list[Trend]:
        """Of the spans of which the course holds enough."""
        return [trend for over_s in spans_s if (trend := self.trend(over_s)) is not None]

    def trend(self, over_s: float) -> Trend | None:
        """How the loss has moved: the newest third of a span against its oldest third.

        None: the course holds too little to say.
        """
        if not self.points:
            return None
        begin = self.points[-1].at - over_s
        known = [(p.at, p.loss) for p in self.points if p.loss is not None and p.at >= begin]
        third = len(known) // 3
        if third < 3:
            return None
        old, new = ([loss for _, loss in part] for part in (known[:third], known[-third:]))
        noise = math.sqrt((variance(old) + variance(new)) / third)
        return Trend(fmean(new) - fmean(old), noise, known[-1][0] - known[0][0])
