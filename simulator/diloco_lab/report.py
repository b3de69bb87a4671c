"""The results of a comparison or sweep: as text, as CSV, and as a plot with intervals."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from diloco_lab.arms import Arm
from diloco_lab.runner import Line

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantile of Student's t, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Gap:
    """How far the loss of an arm is above that of another, in percent."""

    mean: float
    half_width: float
    """Half of the 95 % interval; inf for one pair."""
    pairs: int

    def __str__(self) -> str:
        sure = "one pair" if self.pairs == 1 else f"[{self.low:+.2f}, {self.high:+.2f}], {self.pairs} pairs"
        return f"{self.mean:+.2f} % ({sure})"

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def paired_gap(arm: Sequence[float], base: Sequence[float]) -> Gap:
    """The mean gap between losses of equal seeds. Needs at least one pair."""
    gaps = [100 * (a / b - 1) for a, b in zip(arm, base, strict=True)]
    n = len(gaps)
    if n == 1:
        return Gap(gaps[0], math.inf, 1)
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96
    return Gap(fmean(gaps), quantile * stdev(gaps) / math.sqrt(n), n)


COLUMNS = ("arm", "seed", "loss", "loss_select", "diverged", "versions", "participants", "tokens_trained", "wall_s")


def gap(arm: Arm, base: Arm, seeds: Sequence[int], lines: Mapping[str, Line]) -> Gap | None:
    """The paired gap over the seeds in which neither diverged; None if there are none."""
    pairs = [(lines[arm.key(s)]["result"], lines[base.key(s)]["result"]) for s in seeds]
    whole = [(a["loss"], b["loss"]) for a, b in pairs if not a["diverged"] and not b["diverged"]]
    return paired_gap([a for a, _ in whole], [b for _, b in whole]) if whole else None


def comparison(arms: Sequence[Arm], seeds: Sequence[int], lines: Mapping[str, Line]) -> str:
    """Each arm's mean, and its paired gap to the first arm with the 95 % interval."""
    base, rows = arms[0], [("arm", "loss", "diverged", f"above {arms[0].name}, paired, 95 %")]
    for arm in arms:
        results = [lines[arm.key(seed)]["result"] for seed in seeds]
        whole = [r["loss"] for r in results if not r["diverged"]]
        mean = f"{fmean(whole):.4f}" if whole else "-"
        found = None if arm is base else gap(arm, base, seeds, lines)
        rows.append((arm.name, mean, f"{len(results) - len(whole)} of {len(results)}", str(found or "-")))
    return table(rows)


def ranking(
    arms: Sequence[Arm], values: Sequence[Mapping[str, object]], seeds: Sequence[int], lines: Mapping[str, Line]
) -> str:
    """The arms of a sweep, best first by the selecting half, and the best arm's values at an edge of the grid."""
    losses = [fmean(selecting(lines[arm.key(seed)]) for seed in seeds) for arm in arms]
    order = sorted(range(len(arms)), key=lambda i: losses[i])
    names = list(values[0])
    rows = [(*names, "loss to select by")]
    rows += [(*(str(values[i][name]) for name in names), f"{losses[i]:.4f}") for i in order]
    best, said = values[order[0]], []
    for name in names:
        tried = sorted({v for setting in values if isinstance(v := setting[name], (int, float))})
        if len(tried) > 1 and best[name] in (tried[0], tried[-1]):
            said.append(f"{name} = {best[name]} lies at the edge of what was tried: no optimum yet, widen the grid")
    return "\n".join([table(rows), *said])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write_csv(path: Path, lines: Mapping[str, Line]) -> None:
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**line["result"], "arm": line["arm"], "seed": line["seed"]} for line in lines.values())


def draw(path: Path, arms: Sequence[Arm], seeds: Sequence[int], lines: Mapping[str, Line]) -> None:
    """Left: losses over progress, mean over seeds. Right: paired gaps to the first arm with 95 % intervals."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for i, arm in enumerate(arms):
        curves = [lines[arm.key(seed)]["result"]["curve"] for seed in seeds]
        points = list(zip(*curves, strict=False))
        left.plot([p[0][0] for p in points], [fmean(loss for _, loss in p) for p in points], label=arm.name)
        found = gap(arm, arms[0], seeds, lines) if i else None
        if found is not None:
            error = found.half_width if math.isfinite(found.half_width) else 0.0
            right.errorbar([found.mean], [i], xerr=[error], fmt="o", capsize=4)
    left.set(xlabel="share of the token budget", ylabel="held-out loss")
    left.legend()
    right.axvline(0, color="grey", linewidth=1)
    right.set(xlabel=f"above {arms[0].name}, %", yticks=range(1, len(arms)), yticklabels=[a.name for a in arms[1:]])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def selecting(line: Line) -> float:
    result = line["result"]
    return math.inf if result["diverged"] else float(result["loss_select"])
