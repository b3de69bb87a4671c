"""When a learner that was asked will have contributed: what a round goes by when it decides whom to wait for.

A learner answers at its next step boundary. So it is expected there, plus the lag that its pushes had so far, plus its
bytes over the link that was measured. All of this is by the shard's own clock; the step time that a learner reports has
no say. Whoever is expected in time may be late for once: the round waits for it as long as its patience lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_server.core.pace import Trail

ALPHA = 0.1
"""Weight of the newest contribution in the averages."""
OPTIMISM = 0.9
"""A link counts for so much slower after each contribution whose bytes were not taken: nothing else would measure it
again."""


@dataclass(slots=True)
class Expected:
    """One contribution that was asked for."""

    round: int
    boundary_at: float
    """The step boundary at which the learner was expected to take it; inf: it seemed to hang."""
    begun_at: float | None = None
    """When its header came, if its bytes were wanted."""
    is_measured: bool = False
    """Whether its bytes have come."""


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A round that has asked, and not heard of yet: one for all that it has asked at the same time."""

    round: int
    boundaries: Mapping[Arrivals, float]
    """The step boundary at which each is expected to take its contribution; inf: it seemed to hang."""


@dataclass(eq=False)
class Arrivals:
    """What a shard knows of the contributions of one process of a learner."""

    lag_s: float | None = None
    """Moving average: from the expected boundary until the header. May be negative."""
    s_per_element: float = 0.0
    """Moving average: what the bytes of an element take."""
    _expected: dict[int, Expected | Called] = field(default_factory=dict)  # fragment -> what was asked for last

    def asked(self, fragment_id: int, round_number: int, trail: Trail | None, patience_s: float, now: float) -> None:
        """A round has asked. `patience_s`: a step that is overdue for longer does not end soon."""
        boundary_at = now if trail is None else next_boundary(trail, patience_s, now)
        self._expected[fragment_id] = Expected(round_number, boundary_at)

    def called(self, fragment_id: int, call: Called) -> None:
        """As `asked`, together with others."""
        self._expected[fragment_id] = call

    def _expected_of(self, fragment_id: int, round_number: int) -> Expected | None:
        found = self._expected.get(fragment_id)
        if found is None or found.round != round_number:
            return None
        if isinstance(found, Called):
            found = self._expected[fragment_id] = Expected(round_number, found.boundaries[self])
        return found

    def header(self, fragment_id: int, round_number: int, now: float, *, wanted: bool) -> None:
        """The header of a push has come. `wanted`: its bytes are to follow."""
        expected = self._expected_of(fragment_id, round_number)
        if expected is None or expected.begun_at is not None:
            return
        if math.isfinite(expected.boundary_at):
            lag_s = now - expected.boundary_at
            self.lag_s = lag_s if self.lag_s is None else self.lag_s + ALPHA * (lag_s - self.lag_s)
        if wanted:
            expected.begun_at = now
        else:
            del self._expected[fragment_id]
            self.s_per_element *= OPTIMISM

    def bytes_came(self, fragment_id: int, round_number: int, num_elements: int, now: float) -> None:
        """All bytes of a push are there. Once per contribution: more may follow, if it comes in parts."""
        expected = self._expected_of(fragment_id, round_number)
        if expected is None or expected.begun_at is None or expected.is_measured:
            return
        expected.is_measured = True
        if num_elements > 0:
            measured = max(0.0, now - expected.begun_at) / num_elements
            self.s_per_element += (ALPHA if self.s_per_element else 1.0) * (measured - self.s_per_element)

    def expected_at(self, fragment_id: int, round_number: int, num_elements: int) -> float:
        """When the contribution should be there; inf: not to be expected. `num_elements`: of the fragment."""
        expected = self._expected_of(fragment_id, round_number)
        if expected is None:
            return math.inf
        begins_at = expected.boundary_at + (self.lag_s or 0.0) if expected.begun_at is None else expected.begun_at
        return begins_at + num_elements * self.s_per_element


def next_boundary(trail: Trail, patience_s: float, now: float) -> float:
    """When the learner's present step should end; inf where that is overdue for longer than `patience_s`."""
    ends_at = trail.reported_at + trail.step_s
    if ends_at + patience_s < now:
        return math.inf
    return max(ends_at, now)
