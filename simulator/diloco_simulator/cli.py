"""`python -m diloco_simulator`: run many schedules, or replay one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from diloco_common.command import run_command
from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED
from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import DISK_FAULTS, FAMILIES, FAULTS, draw
from diloco_simulator.runner import Tally, run_many

PROGRESS_EVERY_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 if an invariant was broken."""
    return run_command(lambda: _run(argv), name="diloco_simulator")


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco_simulator", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many to run (default 1000)")
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), default="short",
        help="short: 3 shards and 5 learners for a few seconds; long: all sizes, for half a minute (default short)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--replay", metavar="FAMILY:SEED", help="run this one alone, and say what it came to")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    args = parser.parse_args(argv)
    if args.schedules < 1 or args.jobs < 1:
        parser.error("--schedules and --jobs take a number from 1")
    torch.set_num_threads(1)
    if args.replay is not None:
        try:
            options = draw(args.replay)
        except ValueError as error:
            parser.error(str(error))
        try:
            result = run_schedule(options)
        except ScheduleFailed as failure:
            print(failure)
            return EXIT_UNEXPECTED
        print(f"{args.replay}: no violation; {result.events} events, {result.virtual_s:.0f} s of virtual time")
        print(f"{_listed(result.counts)}; faults: {_listed(result.faults)}\ntrace {result.trace}")
        return EXIT_OK

    began, told = time.perf_counter(), [time.perf_counter()]

    def tell(total: Tally) -> bool:
        if time.perf_counter() - told[0] >= PROGRESS_EVERY_S:
            told[0] = time.perf_counter()
            rate = total.schedules / (told[0] - began)
            print(f"{total.schedules} of {args.schedules}, {rate:.0f}/s", file=sys.stderr, flush=True)
        return args.keep_going or not total.failures

    total = run_many(args.family, range(args.seed, args.seed + args.schedules), args.jobs, tell)
    for words in total.failures.values() if not args.keep_going else ():
        print(words)
        break
    if args.keep_going:
        for words in total.failures.values():
            print(words.splitlines()[0])
    print(_summary(args.family, total, time.perf_counter() - began))
    return EXIT_UNEXPECTED if total.failures else EXIT_OK


def _summary(family: str, total: Tally, took_s: float) -> str:
    return (
        f"{total.schedules} {family} schedules in {took_s:.1f} s ({total.schedules / took_s:.0f}/s), "
        f"{len(total.failures)} violations; {total.events} events\n"
        f"in 1000 of them: {_coverage(total)}\n"
        f"in all: {_listed(total.counts)}; faults: {_listed(total.faults)}"
    )


def _coverage(total: Tally) -> str:
    """Whether schedules do anything: what goes wrong in 1000 of them, and what comes about in spite of it."""
    counts, faults = total.counts, total.faults
    struck = sum(faults[kind] for kind in (*FAULTS, *DISK_FAULTS))
    rows = {
        "faults": struck,
        "learners crashed": faults["crash learner"],
        "shards crashed": counts["kills"] + counts["power cuts"] + counts["memory losses"],
        "recoveries from disk": counts["recoveries"],
        "messages lost, late or twice": faults.total() - struck,
        "versions": counts["versions"],
        "contributions merged": counts["contributions merged"],
    }
    return ", ".join(f"{1000 * count / total.schedules:.0f} {name}" for name, count in rows.items())


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(counts).items()))
