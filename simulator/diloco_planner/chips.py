"""Chips that fail: when an island computes, and with what share of its chips.

An island trains in lockstep, so each loss of a slice stops all of it for a while. Then an elastic island goes on with a
spare or without the slice. Others restart from the last checkpoint, with a spare or once a slice is repaired. Failures
of all chips are one Poisson process, which runs while the island computes: a million chips take no longer to simulate
than one. Repaired slices rejoin together, which stops the island again. Repair times have an exponentiated Weibull
distribution (k 1.5, a 2).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

from diloco_common import units
from diloco_common.wire.calls import NOTICE_S

YEAR_S = units.seconds("1y")
SHAPE, POWER = 1.5, 2.0
"""Parameters of the distribution of repair times. At scale 1, its mean is `_UNIT_MEAN`."""
ROUNDING = 1e-9
"""Allowed rounding error of summed shares."""
_UNIT_MEAN = math.gamma(1 + 1 / SHAPE) * (2 - 2 ** (-1 / SHAPE))


@dataclass(frozen=True)
class Failures:
    """How often chips fail, and for how long each failure stops an island."""

    mtbi_s: float = YEAR_S
    """Mean time between two interruptions of one chip."""
    repair_s: float = 1200.0
    """Mean time until a lost slice is back."""
    loss_s: float = 10.0
    """Pause after losing a slice, if the island is elastic or has a spare."""
    join_s: float = 16.0
    """Pause when slices come back."""
    restart_s: float = 80.0
    """Pause of an island that cannot go on without a slice."""
    checkpoint_s: float = 1.0
    """Interval between checkpoints. An island that restarts loses what it has trained since the last one."""
    preempt_every_s: float = math.inf
    """Mean time between two preemptions of a whole island."""
    preempt_for_s: float = 1800.0
    notice_s: float = NOTICE_S
    """Warning before a preemption. Below `NOTICE_S` there is no goodbye, and uncontributed work is lost."""


PRESETS = {
    "paper": Failures(),
    "fleet": Failures(mtbi_s=5.5 * YEAR_S, repair_s=4 * 3600.0, loss_s=60.0, join_s=60.0, restart_s=900.0,
                      checkpoint_s=900.0),
    "poor-cloud": Failures(mtbi_s=units.seconds("300d"), repair_s=6 * 3600.0, loss_s=120.0, join_s=120.0,
                           restart_s=1200.0, checkpoint_s=1800.0),
}  # fmt: skip
"""paper: one interruption per chip and year, as the paper assumes. fleet: large fleets report one in 3.4 to 9.4
GPU-years; this is the geometric mean. poor-cloud: under 400 GPU-days. The pauses of the last two are assumed."""


@dataclass(frozen=True)
class Island:
    chips: float
    slice_chips: float = 256.0
    """Number of chips in a slice: if one of them fails, all are lost."""
    spares: float = 0
    """Slices that are ready to replace a lost one. Without a spare, an island that is not elastic must wait."""
    elastic: bool = True
    """Whether it can go on with fewer slices."""

    @property
    def slices(self) -> int:
        return max(1, round(self.chips / self.slice_chips))


@dataclass
class ChipTimeline:
    """How much of an island computes, from each moment until the next. Begins at 0."""

    until: float
    at: list[float] = field(default_factory=lambda: [0.0])
    share: list[float] = field(default_factory=lambda: [1.0])
    """Share of its chips that compute. 0: the island stands still."""
    away: list[tuple[float, float, bool]] = field(default_factory=list)
    """When the learner is away: from, until, and whether it could say goodbye."""
    lost_s: float = 0.0
    """Computing time that restarts threw away."""
    spent: list[float] = field(default_factory=list)
    """The length of each piece, in seconds. `worked`, `trained`: seconds of steps before it, and those times share."""
    worked: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)

    def change(self, at: float, share: float) -> None:
        """Set the share from this moment on."""
        if at >= self.until:
            return
        if self.at[-1] == at:
            self.at.pop(), self.share.pop()
        self.at.append(at)
        self.share.append(share)

    def freeze(self) -> None:
        """The timeline is complete: prepare fast look-ups."""
        ends = [*self.at[1:], self.until]
        self.spent = [end - begin for begin, end in zip(self.at, ends, strict=True)]
        self.worked = [0.0, *accumulate(s if share else 0.0 for s, share in zip(self.spent, self.share, strict=True))]
        self.trained = [0.0, *accumulate(s * share for s, share in zip(self.spent, self.share, strict=True))]

    def at_work(self, work: float) -> float:
        """The time at which this many seconds of steps are done. inf: never."""
        index = max(0, bisect_right(self.worked, work) - 1)
        while index < len(self.at) and not self.share[index]:
            index += 1
        return math.inf if index >= len(self.at) else self.at[index] + work - self.worked[index]

    def work_at(self, when: float) -> float:
        """Seconds of steps that are done by then."""
        index = max(0, bisect_right(self.at, when) - 1)
        return self.worked[index] + (when - self.at[index] if self.share[index] else 0.0)

    def trained_at(self, work: float) -> float:
        """What was trained in this many seconds of steps, in seconds of a whole island."""
        index = min(bisect_right(self.worked, work), len(self.at)) - 1
        return self.trained[index] + (work - self.worked[index]) * self.share[index]

    @property
    def computed(self) -> float:
        """The work that was done, as a share of what chips that never fail would have done."""
        return self.trained[-1] / self.until

    @property
    def goodput(self) -> float:
        """The same as `computed`, but without the work that restarts from a checkpoint threw away."""
        return self.computed - self.lost_s / self.until


@dataclass(frozen=True)
class Away:
    """Chips of an island that are away together because they were preempted."""

    begins_s: float
    ends_s: float
    share: float = 1.0
    """Share of the island."""


def preemptions(failures: Failures, until: float, chance: random.Random, share: float = 1.0) -> list[Away]:
    """Draw the preemptions of one learner, which has this share of the island."""
    found, at = list[Away](), _after(chance, 1 / failures.preempt_every_s)
    while at < until:
        found.append(Away(at, at + failures.preempt_for_s, share))
        at = found[-1].ends_s + _after(chance, 1 / failures.preempt_every_s)
    return found


def island_timeline(
    island: Island, failures: Failures, until: float, chance: random.Random, away: Sequence[Away] | None = None
) -> ChipTimeline:
    """Draw a timeline. `away`: which share is away, and when. None: the whole island, after each of its preemptions."""
    if away is None:
        away = preemptions(failures, until, chance)
    drawing = _Drawing(island, failures, until, chance, away)
    drawing.line.away += [(a.begins_s, a.ends_s, failures.notice_s >= NOTICE_S) for a in away if a.share == 1.0]
    return drawing.draw()


class _Drawing:
    """Draws a timeline from event to event."""

    def __init__(
        self, island: Island, failures: Failures, until: float, chance: random.Random, away: Sequence[Away]
    ) -> None:
        self.line = ChipTimeline(until)
        self._island, self._failures, self._chance = island, failures, chance
        self._now = self._began = 0.0
        """`_began`: when the island began to compute without a pause."""
        self._out, self._spares = 0, island.spares
        """`_out`: number of missing slices."""
        self._repairs: list[float] = []
        """When the slices under repair will be ready."""
        self._moves = deque(sorted(move for a in away for move in ((a.begins_s, a.share), (a.ends_s, -a.share))))
        self._gone = 0.0
        """Share of the island that is away now."""
        self._gone = self._moved()

    def draw(self) -> ChipTimeline:
        while self._now < self.line.until and (event := self._compute()) is not None:
            event()
        self.line.freeze()
        return self.line

    @property
    def _here(self) -> float:
        """Share of the island that computes now."""
        return max(0.0, (1 - self._out / self._island.slices) * (1 - self._gone))

    def _compute(self) -> Callable[[], None] | None:
        """Compute until the next event, and return it. None: nothing happens any more."""
        now, here, failures = self._now, self._here, self._failures
        self.line.change(now, here)
        events: list[tuple[float, Callable[[], None]]] = [
            (now + _after(self._chance, here * self._island.chips / failures.mtbi_s), self._lose),
            (self._repairs[0] if self._repairs else math.inf, self._repaired),
            (self._moves[0][0] if self._moves else math.inf, self._move),
        ]
        at, event = min(events, key=itemgetter(0))
        if at >= self.line.until:
            return None
        self._now = max(now, at)
        return event

    def _stand_still(self, seconds: float) -> None:
        self.line.change(self._now, 0.0)
        self._now += seconds
        self._began = self._now

    def _restart(self, waits_s: float = 0.0) -> None:
        self.line.lost_s += (self._now - self._began) % self._failures.checkpoint_s
        self._stand_still(waits_s)
        self._stand_still(self._failures.restart_s)

    def _join(self, seconds: float) -> None:
        """Let slices rejoin that are ready now or become ready during the pause."""
        if not self._repairs or self._repairs[0] > self._now:
            return
        self._stand_still(seconds)
        while self._out and self._repairs and self._repairs[0] <= self._now:
            heapq.heappop(self._repairs)
            self._out -= 1

    # ------------------------------------------------------------ what happens

    def _lose(self) -> None:
        island, failures = self._island, self._failures
        heapq.heappush(self._repairs, self._now + repair_s(failures.repair_s, self._chance))
        if not island.elastic:
            waits_s = 0.0
            if self._spares:
                self._spares -= 1
            else:  # no spare can take its place: the island waits for a repair
                waits_s = max(0.0, heapq.heappop(self._repairs) - self._now)
            self._restart(waits_s)
        elif self._spares:
            self._spares -= 1
            self._stand_still(failures.loss_s)
        else:
            self._out = min(island.slices, self._out + 1)
            self._stand_still(failures.loss_s)
            self._join(failures.join_s - failures.loss_s)

    def _repaired(self) -> None:
        if self._out:
            self._join(self._failures.join_s)
        else:
            heapq.heappop(self._repairs)
            self._spares += 1

    def _move(self) -> None:
        """Some chips leave or come back. The chips that stay pause to adapt; if none stay, there is no pause."""
        before, self._gone = self._gone, self._moved()
        if max(before, self._gone) > 1 - ROUNDING:
            self._stand_still(0.0)
        elif not self._island.elastic:
            self._restart()
        else:
            self._stand_still(self._failures.loss_s if self._gone > before else self._failures.join_s)

    def _moved(self) -> float:
        """The share that is away by now."""
        gone = self._gone
        while self._moves and self._moves[0][0] <= self._now:
            gone += self._moves.popleft()[1]
        return gone if gone > ROUNDING else 0.0


def repair_s(mean_s: float, chance: random.Random) -> float:
    u = 1.0 - math.pow(chance.random(), 1 / POWER)
    return mean_s / _UNIT_MEAN * math.pow(-math.log(max(u, 1e-300)), 1 / SHAPE)


def _after(chance: random.Random, rate: float) -> float:
    """Draw the time until the next event."""
    return chance.expovariate(rate) if rate > 0 else math.inf


def uptime(lines: Sequence[ChipTimeline], until: float) -> float:
    """The share of time in which at least one island computes."""
    changes = sorted(
        (at, i, share > 0) for i, line in enumerate(lines) for at, share in zip(line.at, line.share, strict=True)
    )
    on, since, idle = set[int](), 0.0, 0.0
    for at, i, computes in changes:
        if at >= until:
            break
        if not on:
            idle += at - since
        (on.add if computes else on.discard)(i)
        since = at
    idle += until - since if not on else 0.0
    return 1.0 - idle / until
