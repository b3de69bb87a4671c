"""Many schedules over several processes.

Each process runs a chunk of seeds and ends. Garbage goes with the process: collecting it would take a tenth of the
time.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from diloco_simulator.cluster import Result, ScheduleFailed, run_schedule
from diloco_simulator.options import FAMILIES

CHUNK = 25
"""Schedules per process: their garbage fits into memory, and hardly slows asyncio, which has all tasks in one set."""


@dataclass
class ScheduleTally:
    schedules: int = 0
    events: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Seed -> how to replay it."""

    def add(self, other: ScheduleTally | Result) -> None:
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.counts.update(other.counts)
        self.faults.update(other.faults)
        if isinstance(other, ScheduleTally):
            self.schedules += other.schedules
            self.failures.update(other.failures)


def run_seeds(family: str, seeds: Sequence[int]) -> ScheduleTally:
    tally = ScheduleTally()
    for seed in seeds:
        tally.schedules += 1
        try:
            tally.add(run_schedule(FAMILIES[family](seed)))
        except ScheduleFailed as failure:
            tally.failures[seed] = str(failure)
    return tally


def run_many(family: str, seeds: Sequence[int], jobs: int, tell: Callable[[ScheduleTally], bool]) -> ScheduleTally:
    """Run schedules in `jobs` processes. `tell` gets the sum after every chunk, and returns whether to go on."""
    total = ScheduleTally()
    run_chunk, chunks = partial(run_seeds, family), [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    for tally in _map(run_chunk, chunks, min(jobs, len(chunks))):
        total.add(tally)
        if not tell(total):
            break
    return total


def _map(
    run_chunk: Callable[[Sequence[int]], ScheduleTally], chunks: list[Sequence[int]], jobs: int
) -> Iterator[ScheduleTally]:
    if jobs <= 1:
        yield from map(run_chunk, chunks)
        return
    gc.collect()
    gc.freeze()  # memory shared with the processes: scanning it would copy it
    with multiprocessing.get_context("fork").Pool(jobs, gc.disable, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)
