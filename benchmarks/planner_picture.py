"""Makes the picture and the page of docs/planner.md: goodput over chips for four ways of training.

Writes docs/images/planner.png and docs/assets/planner.html, a page that needs no server. Takes one core a minute.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from string import Template

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from diloco_planner.chips import YEAR_S, Island
from diloco_planner.plans import LearnerPlan
from diloco_planner.proposed import Sent, data_parallel, synchronous
from diloco_planner.simulate_command import WAYS

DOCS = Path(__file__).resolve().parent.parent / "docs"
CHIPS = [round(10 ** (3.5 + i / 6)) for i in range(19)]
LEARNERS, HOURS = 8, 48.0
COLORS = {"dp_restart": "#b0413e", "dp_elastic": "#d98e04", "diloco_sync": "#4878a8", "ours": "#2f7d4f"}


def goodputs(chips: float) -> dict[str, float]:
    sent, until = Sent(0, 0, 0, 24), HOURS * 3600
    plans = [LearnerPlan(f"learner-{i}", Island(chips / LEARNERS)) for i in range(LEARNERS)]
    return {
        "dp_restart": data_parallel(plans, sent, until, elastic=False),
        "dp_elastic": data_parallel(plans, sent, until, elastic=True),
        "diloco_sync": synchronous(plans, sent, until, 0),
        "ours": fmean(plan.drawn(until, plan.chance()).computed for plan in plans),
    }


def draw(found: dict[int, dict[str, float]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for way, words in WAYS.items():
        axes.plot(CHIPS, [100 * found[c][way] for c in CHIPS], color=COLORS[way], label=words, linewidth=2.2)
    axes.set(xscale="log", ylim=(0, 102), xlabel="chips", ylabel="goodput, %")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)
    hourly = 3600 / YEAR_S
    top = axes.secondary_xaxis("top", functions=(lambda c: np.multiply(c, hourly), lambda r: np.divide(r, hourly)))
    top.set_xlabel("interruptions per hour, at one per chip and year")
    figure.tight_layout()
    figure.savefig(DOCS / "images/planner.png", metadata={"Software": ""})


PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Goodput over chips</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem }
input { width: 100% } td { padding: .3rem .6rem .3rem 0; white-space: nowrap }
.bar { height: 1.2rem; border-radius: 3px } .line { width: 100% }
</style>
<h1>What is left of a million chips?</h1>
<p><label for="chips">Chips in $learners learners, each interrupted once a year:</label> <b id="count"></b>,
<b id="rate"></b> interruptions per hour</p>
<input id="chips" type="range" min="0" max="$last" value="$start">
<table id="ways"></table>
<p>Each row is the share of the compute that reaches the model's training.
See <a href="../planner/">the planner</a>.</p>
<script>
const found = $found, ways = $ways, colors = $colors, slider = document.getElementById("chips");
const chips = Object.keys(found);
function show() {
  const n = chips[slider.value];
  document.getElementById("count").textContent = Number(n).toLocaleString("en");
  document.getElementById("rate").textContent = Number((n / $hours_per_year).toPrecision(2)).toLocaleString("en");
  document.getElementById("ways").innerHTML = Object.keys(ways).map(way => {
    const percent = 100 * found[n][way];
    const bar = `<div class="bar" style="width:$${percent}%;background:$${colors[way]}"></div>`;
    return `<tr><td>$${ways[way]}<td class="line">$${bar}<td>$${percent.toFixed(0)} %`;
  }).join("");
}
slider.oninput = show; show();
</script>
</html>
""")


def main() -> None:
    found = {chips: goodputs(chips) for chips in CHIPS}
    draw(found)
    rounded = {chips: {way: round(share, 4) for way, share in row.items()} for chips, row in found.items()}
    page = PAGE.substitute(
        found=json.dumps(rounded), ways=json.dumps(WAYS), colors=json.dumps(COLORS), learners=LEARNERS,
        last=len(CHIPS) - 1, start=CHIPS.index(max(c for c in CHIPS if c <= 1.2e6)), hours_per_year=YEAR_S / 3600,
    )  # fmt: skip
    (DOCS / "assets/planner.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
