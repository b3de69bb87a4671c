"""What a comparison or a sweep has found: for people, as CSV, and as a plot with intervals."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from diloco_lab.arms import Arm
from diloco_lab.runner import Line
from diloco_lab.statistics import Gap, paired_gap

COLUMNS = ("arm", "seed", "loss", "loss_select", "diverged", "versions", "participants", "tokens_trained", "wall_s")


def gap(arm: Arm, base: Arm, seeds: Sequence[int], lines: Mapping[str, Line]) -> Gap | None:
    """Over the seeds in which neither diverged; None: there is none."""
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
    """The arms of a sweep, best first by the half that selects, and which settings of the best lie at an edge."""
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
    """Columns side by side; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write_csv(path: Path, lines: Mapping[str, Line]) -> None:
    """One row per run."""
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
