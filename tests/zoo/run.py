"""Every program of the zoo as learners that die and come back, beside what single processes come to.

    make zoo                                    # a quarter of an hour on two cores
    make zoo ZOO="--only vision gan"            # these alone
    make zoo ZOO="--page docs/zoo.md"           # and write the table into the page

Ends with 1 where a pulled model is worse than the worst learner by more than 1 %, or where a program failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))

from zoo import HIGHER_IS_BETTER, ZOO, Found, Program, by_itself, keep, preload

BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
HEAD = (
    "| program | metric | pulled | worst learner | 3 x batch | third of the data |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def row(program: Program, found: Found) -> str:
    about = f"[{program.name}](../tests/zoo/programs/{program.name}.py): {program.about}"
    better = "↑" if found.metric in HIGHER_IS_BETTER else "↓"
    shown = (found.pulled, found.worst, found.larger, found.third)
    numbers = ["-" if one is None else f"{one:.4g}" for one in shown]
    if not found.holds:
        numbers[0] += f" **FAILED: {found.behind:.1%} worse than the worst learner**"
    what = f"{about}{', **unequal data**' if found.unequal else ''}"
    return f"| {' | '.join([what, f'{found.metric}{better}', *numbers])} |"


def write(page: Path, rows: list[str]) -> None:
    """Rows of other programs stay as they are. New ones come last."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    here = {row.split(" |")[0]: row for row in (*table.split(HEAD)[1].split("\n"), *rows) if row}
    page.write_text(f"{before}{BEGIN}\n\n{HEAD}\n" + "\n".join(here.values()) + f"\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of programs")
    parser.add_argument("--json", type=Path, default=Path("runs/zoo/result.json"), help="what came out, kept over runs")
    parser.add_argument("--page", type=Path, help="write the table between the markers of this page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the shards")
    given = parser.parse_args()
    if unknown := set(given.only) - {program.name for program in ZOO}:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    chosen = [program for program in ZOO if program.name in (given.only or [one.name for one in ZOO if one.is_here])]
    for program in ZOO:
        if not program.is_here:
            print(f"{program.name} is left out: pip install {program.needs}", file=sys.stderr)
    settings = dict(one.split("=", 1) for one in given.set)
    preload(chosen)
    found = (
        {key: Found(**one) for key, one in json.loads(given.json.read_text()).items()} if given.json.exists() else {}
    )
    failed = []
    print(HEAD)
    for program in chosen:
        for unequal in (False, True) if program.splits else (False,):
            key, began = program.name + ("-unequal" if unequal else ""), time.monotonic()
            with TemporaryDirectory() as folder:
                try:
                    one = keep(program, Path(folder, "run"), unequal=unequal, seed=given.seed, settings=settings)
                    one.larger = by_itself(program, Path(folder, "alone"), 3, unequal=unequal, seed=given.seed)
                    one.third = by_itself(program, Path(folder, "alone"), 1, unequal=unequal, seed=given.seed)
                except AssertionError as error:
                    print(f"{key}: FAILED: {error}", file=sys.stderr, flush=True)
                    failed.append(key)
                    continue
            found[key] = one
            failed += [] if one.holds else [key]
            print(row(program, one), f"{time.monotonic() - began:.0f} s", flush=True)
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps({key: asdict(one) for key, one in found.items()}, indent=1) + "\n")
    if given.page:
        keys = [(program, program.name + end) for program in ZOO for end in ("", "-unequal")]
        write(given.page, [row(program, found[key]) for program, key in keys if key in found])
    print(f"{len(chosen) - len({key.removesuffix('-unequal') for key in failed})} of {len(chosen)} programs hold")
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
