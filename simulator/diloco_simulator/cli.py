"""`python -m diloco_simulator`: run many schedules, or replay one."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

import torch

from diloco_common.command import run_command
from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED
from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import draw_options


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 if an invariant was broken."""
    return run_command(lambda: _run(argv), name="diloco_simulator")


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco_simulator", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many to run (default 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the first; the others follow")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this one alone, and say what it came to")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seeds = range(args.seed, args.seed + args.schedules) if args.replay is None else (args.replay,)
    counts: Counter[str] = Counter()
    failed, events, virtual_s, began = [], 0, 0.0, time.perf_counter()
    for seed in seeds:
        try:
            result = run_schedule(draw_options(seed))
        except ScheduleFailed as failure:
            print(failure if not args.keep_going else str(failure).splitlines()[0], flush=True)
            failed.append(seed)
            if not args.keep_going:
                break
            continue
        counts.update(result.counts)
        events += result.events
        virtual_s += result.virtual_s
    took_s = time.perf_counter() - began
    print(f"{len(seeds)} schedules, {len(failed)} failed; {events} events, {virtual_s:.0f} s in {took_s:.1f} s")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if args.replay is not None and not failed:
        print(f"trace {result.trace}")
    return EXIT_UNEXPECTED if failed else EXIT_OK
