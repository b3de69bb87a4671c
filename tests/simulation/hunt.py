"""Which slips drawn schedules find, with no schedule made for any: `python tests/simulation/hunt.py [NAME ...]`.

The schedule that has found a slip before comes first (`KEPT` in slips.py), then seeds from 0 on of a family.
Mutants of one's own: add them to `SLIPS`.
"""

from __future__ import annotations

import argparse

import torch
from mutants import broken_by
from slips import KEPT, SLIPS

from diloco_simulator.options import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*SLIPS])
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--family", default="short")
    args = parser.parse_args()
    torch.set_num_threads(1)
    total = 0
    for slip in args.names:
        schedules = [*KEPT.get(slip, ())[:1], *(f"{args.family}:{seed}" for seed in range(args.schedules))]
        tried = ((name, broken_by(SLIPS[slip], draw(name))) for name in schedules)
        found = next(((name, broken) for name, broken in tried if broken is not None), None)
        total += found is not None
        print(f"{slip}: {' '.join(found) if found else 'not found'}", flush=True)
    print(f"{total} of {len(args.names)} found")


if __name__ == "__main__":
    main()
