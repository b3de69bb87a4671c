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
KILL_SHARE = 0.7
"""Share of all faults that kill; the others freeze."""
SHARD_SHARE = 0.2
"""Least share of all faults that hit shards. Shards are few, but only they can lose merged work."""


class FaultKind(Enum):
    KILL = "kill"  # SIGKILL; the process is started again after a while
    FREEZE = "freeze"  # SIGSTOP; SIGCONT follows after a while


TIMES = {
    FaultKind.KILL: (0.2, 2.0),
    FaultKind.FREEZE: (1.0, 10.0),
}
"""Shortest and longest time of a fault of a shard, in seconds."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    """Seconds after the beginning of the measured time."""
    kind: FaultKind
    target: str
    """Name of a process."""
    for_s: float
    """Seconds until the process is started again or goes on."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind.value:6}  {self.target:10}  for {self.for_s:.1f} s"


def make_plan(
    *,
    seed: int,
    seconds: float,
    every_s: float,
    shards: Sequence[str],
    workers: Sequence[str],
    dead_share: float,
) -> tuple[Fault, ...]:
    """One fault in every interval of `every_s`, at a random moment. It hits a healthy process.

    `seconds`: the measured time; a fault may last longer. `dead_share`: of all worker-seconds, for which workers should
    be dead or frozen.
    """
    chance = random.Random(seed)
    shard_share = max(SHARD_SHARE, len(shards) / (len(shards) + len(workers)))
    drafts = []
    for interval in range(round(seconds / every_s)):
        at_s = (interval + chance.uniform(0.1, 0.9)) * every_s
        kind = FaultKind.KILL if chance.random() < KILL_SHARE else FaultKind.FREEZE
        to_shard = chance.random() < shard_share
        away_s = chance.uniform(*(TIMES[kind] if to_shard else (0.5, 1.5)))  # of a worker: stretched below
        drafts.append((Fault(at_s, kind, "", away_s), to_shard))
    absences = [fault for fault, to_shard in drafts if not to_shard]
    stretch = _stretch(absences, seconds, dead_share * len(workers))
    plan, busy_until = [], dict.fromkeys([*shards, *workers], 0.0)
    for fault, to_shard in drafts:
        names = shards if to_shard else workers
        well = [name for name in names if busy_until[name] <= fault.at_s]
        if fault.at_s >= seconds or len(well) < (1 if to_shard else 2):  # at least one worker stays well
            continue
        target = chance.choice(well)
        away_s = fault.for_s if to_shard else fault.for_s * stretch
        start_s = START_S if fault.kind is FaultKind.KILL else 0.0
        busy_until[target] = fault.at_s + max(away_s, start_s) + SETTLE_S
        for_s = away_s if to_shard else max(0.2, away_s - start_s)
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
    """When the process was started again or went on."""


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
