"""Writes the tables of docs/quality.md from results of `diloco lab`: `python benchmarks/quality.py`.

Each table stands between `<!-- NAME -->` and `<!-- end -->` in the page; the text around it is written by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from diloco_lab import runner
from diloco_lab.arms import Arm, load_arm
from diloco_lab.runner import gap

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
RESULTS = ROOT / "benchmarks" / "results"
SEEDS_MAX = 1000


def _filled(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}\n{text}\n\n{place[2]}"


def rebuilt(page: str) -> str:
    texts = {"arms": arms_table(FOLDERS), "default": default_table()}
    for name, text in texts.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page = re.sub(mark, partial(_filled, text), page, flags=re.DOTALL)
    return page


@dataclass(frozen=True)
class Shown:
    """A folder of arms of `diloco lab compare`."""

    folder: str
    results: str
    """benchmarks/results/quality_RESULTS.jsonl"""
    base: str = ""
    """The arm with which all others are compared. Not used if there are `pairs`."""
    pairs: Sequence[tuple[str, str]] = ()
    """Pairs of arms to compare."""
    title: str = ""
    """The title of the run. Empty: the name of its arm."""


FOLDERS = [
    Shown("disturbed", "disturbed", base="undisturbed"),
    Shown("frequency", "frequency", title="int4 int8, H = 12", pairs=[("four_h12", "four_h12_int8")]),
    Shown("asynchronous", "async", base="carry_and_grace"),
]


def default_table() -> str:
    """The results of arms with default settings of shards: from scratch, and going on from a trained model."""
    lines = runner.load(RESULTS / "quality_default.jsonl")
    arms = {path.stem: load_arm(path) for path in sorted((ROOT / "benchmarks" / "default").glob("*.toml"))}
    rows = ["| run | loss | above data-parallel | above the defaults before |", "| --- | ---: | ---: | ---: |"]
    for name in (name for name in arms if not name.startswith(("before", "data_parallel"))):
        plain = name[: name.index("_versions")].removeprefix("classic_") + "_versions"  # arms differ in the rest
        others = f"data_parallel_{plain}", f"before_{name}"
        held = [_gap(arms[name], arms[other], lines) if other in arms else "" for other in others]
        rows += _row(_words(name), arms[name], lines, held)
    lines = runner.load(RESULTS / "quality_continuing.jsonl")
    for what in ("full", "adapter"):
        ours, other = (
            load_arm(ROOT / "benchmarks" / "continuing" / f"{side}_{what}.toml", f"continuing:{what}")
            for side in ("ours", "data_parallel")
        )
        rows += _row(f"adamw 4 learners 20 versions, going on, {what}", ours, lines, [_gap(ours, other, lines), ""])
    return "\n".join(rows)


def _row(run: str, arm: Arm, lines: Mapping[str, runner.Line], held: Sequence[str]) -> list[str]:
    losses = [lines[key]["result"]["loss"] for key in map(arm.key, range(SEEDS_MAX)) if key in lines]
    return [f"| {run} | {fmean(losses):.4f} | {held[0]} | {held[1]} |"] if losses else []


def _gap(arm: Arm, other: Arm, lines: Mapping[str, runner.Line]) -> str:
    seeds = [seed for seed in range(SEEDS_MAX) if {arm.key(seed), other.key(seed)} <= lines.keys()]
    return str(gap(arm, other, seeds, lines) or "") if seeds else ""


def arms_table(folders: Sequence[Shown]) -> str:
    head = ["| run | loss | held against | its loss | above it, 95 % | contributions a round |"]
    head.append("| --- | ---: | --- | ---: | ---: | ---: |")
    return "\n".join([*head, *(row for shown in folders for row in arms_rows(shown))])


def arms_rows(shown: Shown) -> Iterator[str]:
    """The arms of a folder, compared in pairs with equal seeds."""
    lines = runner.load(RESULTS / f"quality_{shown.results}.jsonl")
    arms = {path.stem: load_arm(path) for path in sorted((ROOT / "benchmarks" / shown.folder).glob("*.toml"))}
    for name, base in shown.pairs or [(name, shown.base) for name in arms if name != shown.base]:
        arm, other = arms[name], arms[base]
        seeds = [seed for seed in range(SEEDS_MAX) if {arm.key(seed), other.key(seed)} <= lines.keys()]
        if (found := gap(arm, other, seeds, lines)) is None:
            continue
        loss, its_loss = (fmean(lines[of.key(seed)]["result"]["loss"] for seed in seeds) for of in (arm, other))
        merged = [lines[arm.key(seed)]["result"].get("participants", math.nan) for seed in seeds]
        a_round = "" if math.isnan(merged[0]) else f"{fmean(merged):.2f}"
        run = shown.title or _words(name)
        yield f"| {run} | {loss:.4f} | {_words(base)} | {its_loss:.4f} | {found} | {a_round} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    PAGE.write_text(rebuilt(PAGE.read_text()))
