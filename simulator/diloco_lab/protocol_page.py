"""What the protocol has found, as markdown: losses, paired gaps with intervals, token multipliers, tuned values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from diloco_lab.protocol import Cell
from diloco_lab.report import gap
from diloco_lab.runner import Line
from diloco_lab.statistics import Gap

Lines = Mapping[str, Line]


def page(cells: Sequence[Cell], lines: Lines) -> str:
    """All tables."""
    parts = [gaps(cells, lines), "What was tuned, and how:", _tuned(cells)]
    return "\n\n".join(parts) + "\n"


def seeds_of(cell: Cell, lines: Lines, names: Sequence[str]) -> list[int]:
    """The seeds that all of these arms were run with."""
    seeds = sorted({line["seed"] for line in lines.values()})
    return [seed for seed in seeds if all(cell.arms[name].key(seed) in lines for name in names)]


def gap_to(cell: Cell, lines: Lines, name: str, base: str) -> Gap | None:
    """Paired, over the seeds in which neither diverged; None: there is none."""
    return gap(cell.arms[name], cell.arms[base], seeds_of(cell, lines, (name, base)), lines)


def multiplier(cells: Sequence[Cell], lines: Lines, cell: Cell, name: str, base: str) -> str:
    """Our tokens over those that the other needs for our loss: between its horizons, linear in the log of tokens.

    Of the seeds that there are of ours and of all of its horizons.
    """
    ours = _losses(cell, lines, name)
    horizons = {c.versions: _losses(c, lines, base) for c in cells if c.learners == cell.learners}
    horizons = {versions: losses for versions, losses in horizons.items() if losses}
    seeds = ours.keys() & set.intersection(*map(set, horizons.values())) if horizons else set[int]()
    if not seeds:
        return "-"
    mine = fmean(ours[seed] for seed in seeds)
    points = sorted((versions, fmean(losses[seed] for seed in seeds)) for versions, losses in horizons.items())
    for (v0, loss0), (v1, loss1) in pairwise(points):
        if loss1 <= mine <= loss0:
            part = (loss0 - mine) / (loss0 - loss1)
            return f"{cell.versions / math.exp(math.log(v0) + part * math.log(v1 / v0)):.2f}"
    if mine < points[-1][1]:
        return f"< {cell.versions / points[-1][0]:.2f}"
    return f"> {cell.versions / points[0][0]:.2f}"


def gaps(cells: Sequence[Cell], lines: Lines) -> str:
    """The paired gaps of the first arm to each other one."""
    first = next(iter(cells[0].arms))
    rows = [
        f"| learners | versions | {first} | held against | its loss | {first} above it, 95 % | pairs | "
        "diverged | our tokens to its, for our loss |",
        "| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        for base in list(cell.arms)[1:]:
            found = gap_to(cell, lines, first, base)
            if found is None:
                continue
            ours, theirs = (_losses(cell, lines, name) for name in (first, base))
            mean, its_mean = (fmean(of[seed] for seed in ours.keys() & theirs.keys()) for of in (ours, theirs))
            interval = f" ({found.low:+.2f} to {found.high:+.2f})" if math.isfinite(found.half_width) else ""
            rows.append(
                f"| {cell.learners} | {cell.versions} | {mean:.4f} | {base} "
                f"| {its_mean:.4f} | {found.mean:+.2f} %{interval} | {found.pairs} "
                f"| {_diverged(cell, lines, first)}, {_diverged(cell, lines, base)} "
                f"| {multiplier(cells, lines, cell, first, base)} |"
            )
    return "\n".join(rows)


def _tuned(cells: Sequence[Cell]) -> str:
    rows = ["| learners | versions | arm | values | trials | doubts |", "| ---: | ---: | --- | --- | ---: | --- |"]
    for cell in cells:
        for name, tuned in cell.tuned.items():
            values = ", ".join(f"`{path}` {value}" for path, value in tuned.values.items())
            said = "; ".join([*tuned.doubts, *([f"{tuned.diverged} diverged"] if tuned.diverged else [])])
            where = f"{cell.learners} | {cell.versions}"
            rows.append(f"| {where} | {name} | {values} | {tuned.trials} | {said or 'none'} |")
    return "\n".join(rows)


def _results(cell: Cell, lines: Lines, name: str) -> dict[int, Line]:
    """By seed."""
    return {seed: lines[cell.arms[name].key(seed)]["result"] for seed in seeds_of(cell, lines, [name])}


def _losses(cell: Cell, lines: Lines, name: str) -> dict[int, float]:
    """By seed, where it did not diverge."""
    return {seed: result["loss"] for seed, result in _results(cell, lines, name).items() if not result["diverged"]}


def _diverged(cell: Cell, lines: Lines, name: str) -> str:
    found = _results(cell, lines, name)
    return f"{sum(bool(result['diverged']) for result in found.values())} of {len(found)}"
