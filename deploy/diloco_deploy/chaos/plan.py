"""What is done to whom and when: a pure function of the seed and the size of the cluster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

START_S = 5.0
"""Seconds that a started worker is taken to need until it trains; part of the time that a kill costs it."""
SETTLE_S = 2.0
"""Seconds that a process is left alone after a fault."""
FILL_SHARE = 1 / 3
"""Of the faults of shards, where disks can be filled."""
KILL_SHARE = 0.7
"""Of all faults; the others freeze."""
CUT_SHARE = 0.1
"""Of all faults, where links can be cut."""
SHARD_SHARE = 0.2
"""Of all faults, at least: shards are few, and they are what must not lose anything."""


class Harm(Enum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL, and started again after a while
    FREEZE = "freeze"  # SIGSTOP, and SIGCONT after a while
    FILL = "fill"  # the disk of a shard is full, and has room again after a while
    CUT = "cut"  # nothing gets through between a worker and a shard, either way


TIMES = {Harm.KILL: (0.2, 2.0), Harm.FREEZE: (1.0, 10.0), Harm.FILL: (2.0, 8.0), Harm.CUT: (1.0, 10.0)}
"""Shortest and longest time of a fault of a shard or a link, in seconds."""
LINK = " to "
"""Between the names of a worker and a shard."""


@dataclass(frozen=True)
class Fault:
    """One line of the plan."""

    at_s: float
    """After the beginning of the measured time."""
    harm: Harm
    target: str
    """Name of a process, or of a link: "worker-0 to shard-1"."""
    for_s: float
    """Until the process is started again, or goes on."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.harm.value:6}  {self.target:21}  for {self.for_s:.1f} s"


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
    """A fault in every interval of `every_s`, at a random moment of it, to a process that is well.

    Args:
        seed: the same one makes the same plan.
        seconds: length of the measured time; a fault may outlast it.
        every_s: seconds between two faults, in the mean.
        shards: names.
        workers: names.
        dead_share: share of all worker-seconds in which the worker is to be dead or frozen, from 0 to 1.
        disk_full: a third of the faults of shards fill their disks.
        links: a tenth of all faults cut a link.
    """
    chance = random.Random(seed)
    shard_share = max(SHARD_SHARE, len(shards) / (len(shards) + len(workers)))
    drafts = []
    for interval in range(round(seconds / every_s)):
        at_s = (interval + chance.uniform(0.1, 0.9)) * every_s
        harm = Harm.KILL if chance.random() < KILL_SHARE else Harm.FREEZE
        to_shard = chance.random() < shard_share
        if to_shard:
            if disk_full and chance.random() < FILL_SHARE:
                harm = Harm.FILL
            away_s = chance.uniform(*TIMES[harm])
        elif links and chance.random() < CUT_SHARE / (1.0 - shard_share):
            harm = Harm.CUT
            away_s = chance.uniform(*TIMES[harm])
        else:
            away_s = chance.uniform(0.5, 1.5)  # to be stretched
        drafts.append((Fault(at_s, harm, "", away_s), to_shard))
    absences = [fault for fault, to_shard in drafts if not to_shard and fault.harm is not Harm.CUT]
    stretch = _stretch(absences, seconds, dead_share * len(workers))
    plan, busy_until = [], dict.fromkeys([*shards, *workers], 0.0)
    for fault, to_shard in drafts:
        names = shards if to_shard else workers
        well = [name for name in names if busy_until[name] <= fault.at_s]
        if fault.at_s >= seconds or len(well) < (1 if to_shard else 2):  # one worker at least is left in peace
            continue
        target = chance.choice(well)
        as_drawn = to_shard or fault.harm is Harm.CUT
        away_s = fault.for_s if as_drawn else fault.for_s * stretch
        start_s = START_S if fault.harm is Harm.KILL else 0.0
        busy_until[target] = fault.at_s + max(away_s, start_s) + SETTLE_S
        for_s = away_s if as_drawn else max(0.2, away_s - start_s)
        if fault.harm is Harm.CUT:
            target += LINK + chance.choice(shards)
        plan.append(replace(fault, target=target, at_s=round(fault.at_s, 2), for_s=round(for_s, 2)))
    return tuple(plan)


def _stretch(faults: Sequence[Fault], seconds: float, dead_share: float) -> float:
    """By what to multiply durations so that, inside the measured time, they sum to this share of it."""
    if not faults:
        return 1.0
    low, high = 0.0, seconds / 3.0  # no absence is longer than half the measured time
    for _ in range(50):
        middle = (low + high) / 2
        dead_s = sum(min(middle * fault.for_s, seconds - fault.at_s) for fault in faults)
        low, high = (middle, high) if dead_s < dead_share * seconds else (low, middle)
    return low
