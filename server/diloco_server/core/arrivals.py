"""When a learner that was asked will have contributed: what a round goes by when it decides whom to wait for.

`Reports` holds what a process has said of its steps, and `Arrivals` how long its contributions take.

A learner answers at its next step boundary. So it is expected there, plus the lag that its pushes had so far, plus its
bytes over the link that was measured. All of this is by the shard's own clock; the step time that a learner reports has
no say. Whoever is expected in time may be late for once: the round waits for it as long as its patience lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_common.wire.messages import Progress

ALPHA = 0.1
"""Weight of the newest report or contribution in the averages."""
STEP_TIME_FACTOR = 2.0
"""A reported step time is taken up to so many times what passes between the reports."""
OPTIMISM = 0.9
"""A link counts for so much slower after each contribution whose bytes were not taken: nothing else would measure it
again."""


@dataclass
class Reports:
    """What one process of a learner has reported of its steps. Begins with its first report."""

    first: Progress
    last: Progress
    grown_at: float
    """When the last report of a new step came."""
    step_s: float = 0.0
    """Moving average of what passes per step, between reports; 0: no step yet."""
    scatter_s: float = 0.0
    """Moving average: by how much that differs from its own average."""
    merged_until: dict[int, Progress] = field(default_factory=dict)
    """Fragment -> what was reported when the round opened that merged its last contribution. That holds all before."""

    @classmethod
    def begin(cls, first: Progress, now: float) -> Reports:
        return cls(first, first, now)

    def go_on(self, progress: Progress, now: float) -> None:
        """Another report."""
        grown = progress.inner_step - self.last.inner_step
        if grown > 0:
            took_s = max(0.0, now - self.grown_at) / grown
            self.scatter_s += ALPHA * (abs(took_s - (self.step_s or took_s)) - self.scatter_s)
            self.step_s += (ALPHA if self.step_s else 1.0) * (took_s - self.step_s)
            self.grown_at = now
        self.last = progress

    @property
    def step_time_s(self) -> float:
        """Of one inner step, as it is reported and as far as the reports bear it out; 0: not known."""
        return min(self.last.step_time_s, STEP_TIME_FACTOR * self.step_s)


@dataclass(slots=True)
class Expected:
    boundary_at: float
    """The step boundary at which the learner was expected to take it; inf: it seemed to hang."""
    begun_at: float | None = None
    """When its header came; inf: its bytes are not wanted."""
    is_measured: bool = False
    """Whether its bytes have come, or are not wanted."""


@dataclass(slots=True)
class Call:
    """What the last round of a fragment has asked for. It outlives that round: who answers late is measured, too."""

    round: int
    boundaries: Mapping[Arrivals, float]
    """The step boundary at which each is expected to take its contribution; inf: it seemed to hang. One for all rounds
    that ask the same learners at the same time: there may be a million contributions that nobody has heard of yet."""
    apart: dict[Arrivals, Expected] = field(default_factory=dict)
    """Those that have answered, or were asked again."""

    def of(self, arrivals: Arrivals) -> Expected | None:
        """What is expected of a process; None: it was not asked."""
        if arrivals in self.apart:
            return self.apart[arrivals]
        return Expected(self.boundaries[arrivals]) if arrivals in self.boundaries else None


@dataclass(eq=False)
class Arrivals:
    """How long the contributions of one process of a learner take."""

    lag_s: float | None = None
    """Moving average: from the expected boundary until the header. May be negative."""
    s_per_element: float = 0.0
    """Moving average: what the bytes of an element take."""
    pull_s: float | None = None
    """Moving average: what a version takes, from its announcement or from the end of the pull before, if that was
    later, until its last byte is handed over. None: it has pulled none."""
    pulled_at: float = 0.0
    """When the last pull ended."""

    def header(self, call: Call, now: float, *, wanted: bool) -> None:
        """The header of a push that answers this has come. `wanted`: its bytes are to follow."""
        expected = call.of(self)
        if expected is None or expected.begun_at is not None:
            return
        if math.isfinite(expected.boundary_at):
            lag_s = now - expected.boundary_at
            self.lag_s = lag_s if self.lag_s is None else self.lag_s + ALPHA * (lag_s - self.lag_s)
        if not wanted:
            self.s_per_element *= OPTIMISM
        call.apart[self] = Expected(expected.boundary_at, now if wanted else math.inf, is_measured=not wanted)

    def bytes_came(self, call: Call, num_elements: int, now: float) -> None:
        """All bytes of a push are there. Once per contribution: more may follow, if it comes in parts."""
        expected = call.of(self)
        if expected is None or expected.begun_at is None or expected.is_measured:
            return
        expected.is_measured = True
        if num_elements > 0:
            measured = max(0.0, now - expected.begun_at) / num_elements
            self.s_per_element += (ALPHA if self.s_per_element else 1.0) * (measured - self.s_per_element)

    def pulled(self, announced_at: float, now: float) -> None:
        """It has pulled a version."""
        took_s, self.pulled_at = now - max(announced_at, self.pulled_at), now
        self.pull_s = took_s if self.pull_s is None else self.pull_s + ALPHA * (took_s - self.pull_s)

    def expected_at(self, call: Call, num_elements: int) -> float:
        """When the contribution should be there; inf: not to be expected. `num_elements`: of the fragment."""
        expected = call.of(self)
        if expected is None:
            return math.inf
        begins_at = expected.boundary_at + (self.lag_s or 0.0) if expected.begun_at is None else expected.begun_at
        return begins_at + num_elements * self.s_per_element


def next_boundary(reports: Reports | None, patience_s: float, now: float) -> float:
    """When the learner's present step should end; inf where that is overdue for longer than `patience_s`."""
    if reports is None:
        return now
    ends_at = reports.grown_at + reports.step_s
    if ends_at + patience_s < now:
        return math.inf
    return max(ends_at, now)
