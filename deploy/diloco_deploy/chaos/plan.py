"""The plan: which fault hits whom, and when. A pure function of the seed and the size of the cluster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

START_S = 5.0
"""Seconds from the start of a worker to its first step, by assumption; part of the time that a kill costs it."""
SETTLE_S = 2.0
"""Seconds without another fault for a process that has recovered from one."""
FILL_SHARE = 1 / 3
"""Of the faults that hit shards, where disks can be filled."""
KILL_SHARE = 0.7
"""Of all faults; the others freeze."""
CUT_SHARE = 0.1
"""Of all faults, where links can be cut."""
SHARD_SHARE = 0.2
"""Of all faults, at least. Shards are few, but they are the ones that must not lose anything."""


class FaultKind(Enum):
    """What a fault does."""

    KILL = "kill"  # SIGKILL; the process is started again after a while
    FREEZE = "freeze"  # SIGSTOP; SIGCONT follows after a while
    FILL = "fill"  # the disk of a shard is full for a while
    CUT = "cut"  # for a while nothing gets through between a worker and a shard, either way


TIMES = {
    FaultKind.KILL: (0.2, 2.0),
    FaultKind.FREEZE: (1.0, 10.0),
    FaultKind.FILL: (2.0, 8.0),
    FaultKind.CUT: (1.0, 10.0),
}
"""Shortest and longest time of a fault of a shard or a link, in seconds."""
LINK = " to "
"""Between the names of a worker and a shard."""


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    at_s: float
    """Seconds after the measured time has begun."""
    kind: FaultKind
    target: str
    """Name of a process, or of a link: "worker-0 to shard-1"."""
    for_s: float
    """Seconds until it is over: the process is started again or goes on, the disk has room, the link is back."""

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
    """One fault in every interval of `every_s`, at a random moment, that hits a healthy process.

    Args:
        seed: the same seed makes the same plan.
        seconds: length of the measured time. A fault may last longer.
        every_s: mean time between two faults, in seconds.
        shards: names.
        workers: names.
        dead_share: share of all worker-seconds that workers are to be dead or frozen, from 0 to 1.
        disk_full: a third of the faults that hit shards fill their disks.
        links: a tenth of all faults cut a link.
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
    """The factor for all durations that makes them add up to this share of the measured time."""
    if not faults:
        return 1.0
    low, high = 0.0, seconds / 3.0  # no absence is longer than half the measured time
    for _ in range(50):
        middle = (low + high) / 2
        dead_s = sum(min(middle * fault.for_s, seconds - fault.at_s) for fault in faults)
        low, high = (middle, high) if dead_s < dead_share * seconds else (low, middle)
    return low
