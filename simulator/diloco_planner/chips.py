"""Chips that fail: when an island computes, and with how much of itself.

An island trains in lockstep, so each loss stops all of it for a while. Then it goes on without the slice (elastic),
with a spare in its place, or, without either, from its last checkpoint. Failures of all chips together are one Poisson
process, whose clock runs while the island computes: a million chips cost as much as one.

Slices that were repaired join together, and stop the island once more. Repairs take a time from an exponentiated
Weibull distribution (k 1.5, a 2).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S
SHAPE, POWER = 1.5, 2.0
"""Of repair times. With scale 1 their mean is `_UNIT_MEAN`."""
_UNIT_MEAN = math.gamma(1 + 1 / SHAPE) * (2 - 2 ** (-1 / SHAPE))


@dataclass(frozen=True)
class Failures:
    """How chips fail, and what it costs an island."""

    mtbi_s: float = YEAR_S
    """Mean time between two interruptions of one chip."""
    repair_s: float = 1200.0
    """Mean time until a slice is back."""
    loss_s: float = 10.0
    """An elastic island, or one with a spare, stands still for so long when a slice is lost."""
    join_s: float = 16.0
    """And so long when slices come back."""
    restart_s: float = 80.0
    """An island that cannot go on without a slice stands still for so long."""
    checkpoint_s: float = 1.0
    """It loses what it has trained since its last checkpoint: they are so far apart."""
    slow_every_s: float = math.inf
    """Mean time between two moments at which one chip turns slow, and its island with it."""
    slow_pace: float = 0.7
    slow_for_s: float = 600.0
    """Until it is found, and treated as lost."""
    preempt_every_s: float = math.inf
    """Mean time between two preemptions of a whole island."""
    preempt_for_s: float = 1800.0
    notice_s: float = 30.0
    """It is told so long before. Below 30 s it cannot say goodbye, and what it has not contributed is lost."""


PRESETS = {
    "paper": Failures(),
    "fleet": Failures(mtbi_s=5.5 * YEAR_S, repair_s=4 * 3600.0, loss_s=60.0, join_s=60.0, restart_s=900.0,
                      checkpoint_s=900.0),
    "poor-cloud": Failures(mtbi_s=300 * DAY_S, repair_s=6 * 3600.0, loss_s=120.0, join_s=120.0, restart_s=1200.0,
                           checkpoint_s=1800.0),
}  # fmt: skip
"""One interruption per chip and year, as the paper assumes; what large fleets report, 3.4 to 9.4 GPU-years (the middle
of the logarithms); a poor cloud, under 400 GPU-days. Pauses of the last two are assumed."""


@dataclass(frozen=True)
class Island:
    """One learner's chips."""

    chips: float
    slice_chips: float = 256.0
    """What is lost together with one chip."""
    spares: int = 0
    """Slices that wait to take the place of a lost one. An island that is not elastic has to wait without."""
    elastic: bool = True
    """Whether it goes on with fewer slices."""

    @property
    def slices(self) -> int:
        return max(1, round(self.chips / self.slice_chips))


@dataclass
class Timeline:
    """From each moment on until the next, how much of an island computes and how fast. Begins at 0."""

    until: float
    at: list[float] = field(default_factory=lambda: [0.0])
    share: list[float] = field(default_factory=lambda: [1.0])
    """Of its chips. 0: it stands still."""
    pace: list[float] = field(default_factory=lambda: [1.0])
    """Steps per usual step time; 0: it stands still."""
    away: list[tuple[float, float, bool]] = field(default_factory=list)
    """The learner is gone: from, until, and whether it could say goodbye."""
    lost_s: float = 0.0
    """Of computing, that a restart threw away."""
    interruptions: int = 0

    def change(self, at: float, share: float, pace: float = 1.0) -> None:
        """From this moment on."""
        if at >= self.until:
            return
        if self.at[-1] == at:
            self.at.pop(), self.share.pop(), self.pace.pop()
        self.at.append(at)
        self.share.append(share)
        self.pace.append(pace if share else 0.0)

    spent: list[float] = field(default_factory=list)
    """By piece, in seconds; and what was done before each: steps, and steps times share."""
    worked: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)

    def freeze(self) -> None:
        """It is whole: make it quick to look at."""
        ends = [*self.at[1:], self.until]
        self.spent = [end - begin for begin, end in zip(self.at, ends, strict=True)]
        worked = [p * s for p, s in zip(self.pace, self.spent, strict=True)]
        self.worked = [0.0, *accumulate(worked)]
        tokens = [w * share for w, share in zip(worked, self.share, strict=True)]
        self.trained = [0.0, *accumulate(tokens)]

    def at_work(self, work: float) -> float:
        """When so many seconds of steps are done; inf: never."""
        index = max(0, bisect_right(self.worked, work) - 1)
        while index < len(self.at) and not self.pace[index]:
            index += 1
        if index >= len(self.at):
            return math.inf
        return self.at[index] + (work - self.worked[index]) / self.pace[index]

    def work_at(self, when: float) -> float:
        """Seconds of steps that are done by then."""
        index = max(0, bisect_right(self.at, when) - 1)
        return self.worked[index] + (when - self.at[index]) * self.pace[index]

    def trained_at(self, work: float) -> float:
        """What was trained in so many seconds of steps, in those of a whole island."""
        index = min(bisect_right(self.worked, work), len(self.at)) - 1
        return self.trained[index] + (work - self.worked[index]) * self.share[index]

    @property
    def goodput(self) -> float:
        """What was trained, as a share of what unfailing chips would have."""
        return (self.trained[-1] - self.lost_s) / self.until

    @property
    def computing_s(self) -> float:
        return sum(s for s, share in zip(self.spent, self.share, strict=True) if share)


def island_timeline(island: Island, failures: Failures, until: float, chance: random.Random) -> Timeline:
    """Draw one."""
    line = Timeline(until)
    total, out, spares = island.slices, 0, island.spares
    """`out`: slices that are missed; `repairs`: when those in repair are ready."""
    repairs: list[float] = []
    per_slice = island.chips / total / failures.mtbi_s
    slow_rate = island.chips / failures.slow_every_s
    now = began = 0.0  # `began`: to compute, without a pause since
    preempted_at = _after(chance, 1 / failures.preempt_every_s)

    def stand_still(seconds: float) -> None:
        nonlocal now, began
        line.change(now, 0.0)
        now += seconds
        began = now

    def join(seconds: float) -> None:
        """Slices that are ready, now or once they have begun to."""
        nonlocal out
        if not repairs or repairs[0] > now:
            return
        stand_still(seconds)
        while out and repairs and repairs[0] <= now:
            heapq.heappop(repairs)
            out -= 1

    while now < until:
        line.change(now, (total - out) / total)
        fails_at = now + _after(chance, (total - out) * per_slice)
        slows_at = now + _after(chance, slow_rate)
        ready_at = repairs[0] if repairs else math.inf
        first = min(fails_at, slows_at, ready_at, preempted_at)
        if first >= until:
            break
        now = max(now, first)
        if first == preempted_at:
            line.interruptions += 1
            line.away.append((now, now + failures.preempt_for_s, failures.notice_s >= 30.0))
            stand_still(failures.preempt_for_s)
            preempted_at = now + _after(chance, 1 / failures.preempt_every_s)
        elif first == ready_at:
            if out:
                join(failures.join_s)
            else:
                heapq.heappop(repairs)
                spares += 1
        elif first == slows_at:
            line.change(now, (total - out) / total, failures.slow_pace)
            now += failures.slow_for_s
            stand_still(failures.loss_s)
        else:
            line.interruptions += 1
            heapq.heappush(repairs, now + repair_s(failures.repair_s, chance))
            if not island.elastic:
                line.lost_s += (now - began) % failures.checkpoint_s
                if spares:
                    spares -= 1
                else:  # nobody can take its place: it waits for a repair
                    stand_still(max(0.0, heapq.heappop(repairs) - now))
                stand_still(failures.restart_s)
            elif spares:
                spares -= 1
                stand_still(failures.loss_s)
            else:
                out = min(total, out + 1)
                stand_still(failures.loss_s)
                join(failures.join_s - failures.loss_s)
    line.freeze()
    return line


def repair_s(mean_s: float, chance: random.Random) -> float:
    """How long one repair takes."""
    u = 1.0 - math.pow(chance.random(), 1 / POWER)
    return mean_s / _UNIT_MEAN * math.pow(-math.log(max(u, 1e-300)), 1 / SHAPE)


def _after(chance: random.Random, rate: float) -> float:
    """Until the next event."""
    return chance.expovariate(rate) if rate > 0 else math.inf


def uptime(lines: Sequence[Timeline]) -> float:
    """The share of the time in which anybody computes."""
    changes = sorted(
        (at, i, share > 0) for i, line in enumerate(lines) for at, share in zip(line.at, line.share, strict=True)
    )
    on, since, idle = set[int](), 0.0, 0.0
    for at, i, computes in changes:
        if not on:
            idle += at - since
        (on.add if computes else on.discard)(i)
        since = at
    until = lines[0].until
    idle += until - since if not on else 0.0
    return 1.0 - idle / until
