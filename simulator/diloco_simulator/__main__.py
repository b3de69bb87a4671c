"""`python -m diloco_simulator`: run many schedules, in several processes, or replay one.

Each process runs a chunk of seeds and ends. No process collects garbage, which would take a tenth of the time; the
garbage disappears when the process ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from diloco_common.command import new_app, run_app
from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError
from diloco_common.wire.calls import SAY_EVERY_S
from diloco_simulator.cluster import Result, ScheduleFailed, run_schedule
from diloco_simulator.options import FAMILIES, draw

CHUNK = 25
"""Schedules per process. Their garbage fits into memory and hardly slows asyncio, which keeps all tasks in one set."""


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
    gc.freeze()  # this memory is shared with the child processes, and scanning it would copy it
    with multiprocessing.get_context("fork").Pool(jobs, gc.disable, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


app = new_app("diloco_simulator", "Run many schedules, or replay one.")


@app.default
def simulate(
    *,
    schedules: Annotated[int, Parameter(metavar="N", help="how many to run")] = 1000,
    family: Annotated[
        Literal["short", "long", "islands", "companions", "memory", "mirrored", "sick"],
        Parameter(help="short: 3 shards and 5 learners for a few seconds; long: all sizes, for half a minute"),
    ] = "short",
    seed: Annotated[int, Parameter(metavar="SEED", help="seed of the first; the other seeds follow it")] = 0,
    jobs: Annotated[int, Parameter(metavar="N", help="processes")] = 1,
    replay: Annotated[
        str | None, Parameter(metavar="FAMILY:SEED", help="run only this one, and print its result")
    ] = None,
) -> int:
    """Run many schedules, or replay one. Exit code 1 if an invariant was broken."""
    if schedules < 1 or jobs < 1:
        raise ConfigError("--schedules and --jobs take a number from 1")
    torch.set_num_threads(1)
    if replay is not None:
        try:
            options = draw(replay)
        except ValueError as error:
            raise ConfigError(f"--replay {replay}: {error}") from None
        try:
            result = run_schedule(options)
        except ScheduleFailed as failure:
            print(failure)
            return EXIT_UNEXPECTED
        print(f"{replay}: no violation; {result.events} events, {result.virtual_s:.0f} s of virtual time")
        print(f"{_listed(result.counts)}; faults: {_listed(result.faults)}\ntrace {result.trace}")
        return EXIT_OK

    began, told = time.perf_counter(), [time.perf_counter()]

    def tell(total: ScheduleTally) -> bool:
        if time.perf_counter() - told[0] >= SAY_EVERY_S:
            told[0] = time.perf_counter()
            rate = total.schedules / (told[0] - began)
            print(f"{total.schedules} of {schedules}, {rate:.0f}/s", file=sys.stderr, flush=True)
        return not total.failures

    total = run_many(family, range(seed, seed + schedules), jobs, tell)
    if total.failures:
        print(next(iter(total.failures.values())))
    print(_summary(family, total, time.perf_counter() - began))
    return EXIT_UNEXPECTED if total.failures else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 if an invariant was broken."""
    return run_app(app, argv)


def _summary(family: str, total: ScheduleTally, took_s: float) -> str:
    return (
        f"{total.schedules} {family} schedules in {took_s:.1f} s ({total.schedules / took_s:.0f}/s), "
        f"{len(total.failures)} violations; {total.events} events\n"
        f"{_listed(total.counts)}; faults: {_listed(total.faults)}"
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
