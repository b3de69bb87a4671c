"""Predicts when an asked learner's contribution will arrive, so that a round knows which learners to wait for.

`Reports` holds the steps that a process has reported, and `Arrivals` the time that its contributions take.

A learner answers at its next step boundary. So its contribution is expected then, plus the usual lag of its pushes,
plus the time for its bytes on the measured link. All times are by the shard's own clock; a prediction ignores the step
time that a learner reports. A learner expected in time may be late once: the round waits as long as its patience lasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diloco_common.wire.messages import Progress

ALPHA = 0.1
"""Weight of the newest report or contribution in the averages."""


@dataclass
class Reports:
    """The steps that one process of a learner has reported, from its first report on."""

    first: Progress
    last: Progress
    grown_at: float
    """When the last report of a new step arrived."""
    step_s: float = 0.0
    """Moving average of the time per step, measured between reports; 0: no step yet."""
    scatter_s: float = 0.0
    """Moving average of the deviation of that time from its average."""
    merged_until: dict[int, Progress] = field(default_factory=dict)
    """Fragment -> its report when the round opened that merged its last contribution. Work up to then is merged."""

    @classmethod
    def begin(cls, first: Progress, now: float) -> Reports:
        return cls(first, first, now)

    def go_on(self, progress: Progress, now: float) -> None:
        grown = progress.inner_step - self.last.inner_step
        if grown > 0:
            took_s = max(0.0, now - self.grown_at) / grown
            self.scatter_s += ALPHA * (abs(took_s - (self.step_s or took_s)) - self.scatter_s)
            self.step_s += (ALPHA if self.step_s else 1.0) * (took_s - self.step_s)
            self.grown_at = now
        self.last = progress

    @property
    def step_time_s(self) -> float:
        """Seconds per inner step as reported, at most twice the time between reports; 0: unknown."""
        return min(self.last.step_time_s, 2 * self.step_s)


@dataclass(slots=True)
class Expected:
    boundary_at: float
    """When the step boundary was expected at which the learner takes its snapshot; inf: it seemed to hang."""
    begun_at: float | None = None
    """When its header arrived; inf: its bytes are not wanted."""
    is_measured: bool = False
    """Whether its bytes have arrived, or are not wanted."""


@dataclass(slots=True)
class RoundRequest:
    """The request of a fragment's last round. It outlives the round, so that late answers are measured too."""

    round: int
    expected: dict[Arrivals, Expected]
    """The expectation for each process that was asked."""


@dataclass(eq=False)
class Arrivals:
    """How long the contributions of one process of a learner take."""

    lag_s: float | None = None
    """Moving average of the time from the expected boundary to the header. May be negative."""
    s_per_element: float = 0.0
    """Moving average of the transfer time per element."""
    pull_s: float | None = None
    """Moving average of the time for a version: from its announcement, or the end of the previous pull if that was
    later, until its last byte is handed over. None: it has pulled no version."""
    pulled_at: float = 0.0

    def header(self, request: RoundRequest, now: float, *, wanted: bool) -> None:
        """The header of a push that answers this request arrived. `wanted`: its bytes will follow."""
        expected = request.expected.get(self)
        if expected is None or expected.begun_at is not None:
            return
        if math.isfinite(expected.boundary_at):
            lag_s = now - expected.boundary_at
            self.lag_s = lag_s if self.lag_s is None else self.lag_s + ALPHA * (lag_s - self.lag_s)
        if not wanted:
            self.s_per_element *= 0.9  # a guess: unless it is asked again, nothing measures the link
        expected.begun_at, expected.is_measured = now if wanted else math.inf, not wanted

    def bytes_came(self, request: RoundRequest, num_elements: int, now: float) -> None:
        """All bytes of a push arrived. Measured once per contribution: more may follow if it comes in parts."""
        expected = request.expected.get(self)
        if expected is None or expected.begun_at is None or expected.is_measured:
            return
        expected.is_measured = True
        if num_elements > 0:
            measured = max(0.0, now - expected.begun_at) / num_elements
            self.s_per_element += (ALPHA if self.s_per_element else 1.0) * (measured - self.s_per_element)

    def pulled(self, announced_at: float, now: float) -> None:
        took_s, self.pulled_at = now - max(announced_at, self.pulled_at), now
        self.pull_s = took_s if self.pull_s is None else self.pull_s + ALPHA * (took_s - self.pull_s)

    def expected_at(self, request: RoundRequest, num_elements: int) -> float:
        """When the contribution should arrive; inf: it is not expected. `num_elements`: the size of the fragment."""
        expected = request.expected.get(self)
        if expected is None:
            return math.inf
        begins_at = expected.boundary_at + (self.lag_s or 0.0) if expected.begun_at is None else expected.begun_at
        return begins_at + num_elements * self.s_per_element


def next_boundary(reports: Reports | None, patience_s: float, now: float) -> float:
    """When the learner's current step should end; inf if that is overdue by more than `patience_s`."""
    if reports is None:
        return now
    ends_at = reports.grown_at + reports.step_s
    if ends_at + patience_s < now:
        return math.inf
    return max(ends_at, now)
