"""The faults of a run: what is planned, a pure function of the seed and the size of the cluster, and what was done."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

START_S = 5.0
"""Assumed seconds from the start of a worker to its first step. They count as part of the cost of a kill."""
SETTLE_S = 2.0
"""A process that has recovered from a fault gets no further fault for this many seconds."""
FILL_SHARE = 1 / 3
"""Share of the faults on shards that fill a disk, if disks can be filled."""
KILL_SHARE = 0.7
"""Share of all faults that kill; the others freeze."""
CUT_SHARE = 0.1
"""Share of all faults that cut a link, if links can be cut."""
SHARD_SHARE = 0.2
"""Least share of all faults that hit shards. Shards are few, but only they can lose merged work."""


class FaultKind(Enum):
    KILL = "kill"  # SIGKILL; the process is started again after a while
    FREEZE = "freeze"  # SIGSTOP; SIGCONT follows after a while
    FILL = "fill"  # the disk of a shard is full for a while
    CUT = "cut"  # no traffic between a worker and a shard for a while, in both directions


TIMES = {
    FaultKind.KILL: (0.2, 2.0),
    FaultKind.FREEZE: (1.0, 10.0),
    FaultKind.FILL: (2.0, 8.0),
    FaultKind.CUT: (1.0, 10.0),
}
"""Shortest and longest time of a fault of a shard or a link, in seconds."""
LINK = " to "
"""Joins the names of a worker and a shard into the name of their link."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    """Seconds after the beginning of the measured time."""
    kind: FaultKind
    target: str
    """Name of a process, or of a link: "worker-0 to shard-1"."""
    for_s: float
    """Seconds until the process is started again or goes on, the disk has room, or the link is back."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind.value:6}  {self.target:21}  for {self.for_s:.1f} s"


def make_plan(
    *,
    seed: int,
    seconds: float,
    every_s: float,
    shards: Sequence[str],
    workers: Sequence[str],
    dead_share: float,
    disk_full: bool = False,
    links: bool = False,
) -> tuple[Fault, ...]:
    """One fault in every interval of `every_s`, at a random moment. It hits a healthy process.

    `seconds`: the measured time; a fault may last longer. `dead_share`: of all worker-seconds, for which workers should
    be dead or frozen. `disk_full`, `links`: whether disks are filled and links cut, too.
    """
    chance = random.Random(seed)
    shard_share = max(SHARD_SHARE, len(shards) / (len(shards) + len(workers)))
    drafts = []
    for interval in range(round(seconds / every_s)):
        at_s = (interval + chance.uniform(0.1, 0.9)) * every_s
        kind = FaultKind.KILL if chance.random() < KILL_SHARE else FaultKind.FREEZE
        to_shard = chance.random() < shard_share
        if to_shard:
            if disk_full and chance.random() < FILL_SHARE:
                kind = FaultKind.FILL
            away_s = chance.uniform(*TIMES[kind])
        elif links and chance.random() < CUT_SHARE / (1.0 - shard_share):
            kind = FaultKind.CUT
            away_s = chance.uniform(*TIMES[kind])
        else:
            away_s = chance.uniform(0.5, 1.5)  # stretched below
        drafts.append((Fault(at_s, kind, "", away_s), to_shard))
    absences = [fault for fault, to_shard in drafts if not to_shard and fault.kind is not FaultKind.CUT]
    stretch = _stretch(absences, seconds, dead_share * len(workers))
    plan, busy_until = [], dict.fromkeys([*shards, *workers], 0.0)
    for fault, to_shard in drafts:
        names = shards if to_shard else workers
        well = [name for name in names if busy_until[name] <= fault.at_s]
        if fault.at_s >= seconds or len(well) < (1 if to_shard else 2):  # at least one worker stays well
            continue
        target = chance.choice(well)
        as_drawn = to_shard or fault.kind is FaultKind.CUT
        away_s = fault.for_s if as_drawn else fault.for_s * stretch
        start_s = START_S if fault.kind is FaultKind.KILL else 0.0
        busy_until[target] = fault.at_s + max(away_s, start_s) + SETTLE_S
        for_s = away_s if as_drawn else max(0.2, away_s - start_s)
        if fault.kind is FaultKind.CUT:
            target += LINK + chance.choice(shards)
        plan.append(replace(fault, target=target, at_s=round(fault.at_s, 2), for_s=round(for_s, 2)))
    return tuple(plan)


def _stretch(faults: Sequence[Fault], seconds: float, dead_share: float) -> float:
    """The factor for all durations with which they add up to this share of the measured time."""
    if not faults:
        return 1.0
    low, high = 0.0, seconds / 3.0  # no absence is longer than half the measured time
    for _ in range(50):
        middle = (low + high) / 2
        dead_s = sum(min(middle * fault.for_s, seconds - fault.at_s) for fault in faults)
        low, high = (middle, high) if dead_s < dead_share * seconds else (low, middle)
    return low


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected. Times are monotonic seconds, as in the histories."""

    kind: str
    """Value of a FaultKind."""
    target: str
    began: float
    ended: float
    """When the process was started again or went on, its disk had room again, or the link was back."""


@dataclass
class ChaosRun:
    """One run of a cluster, seen from outside."""

    began: float = 0.0
    """When every worker trained, and the measured time began. Monotonic."""
    ended: float = 0.0
    """When the measured time was over."""
    faults: list[InjectedFault] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Processes that ended by themselves or made no progress in the end, in words."""
    healed_s: float | None = None
    """Seconds from the last fault until every worker and every shard had made progress; None: some did not."""
