"""Turns what the workers of versus.py wrote down into figures, and these into docs/comparison.md and its picture.

The text of the page stays. Each table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diloco_common.settings import Settings
from diloco_lab.arms import without_gone
from versus_task import SmallGpt, Task, loss_of, make_model, read_bytes

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE = DOCS / "comparison.md", DOCS / "comparison.png"
NAMES = {
    "ours": "ours", "float32": "ours, float32", "tls": "ours, mutual TLS", "ddp": "torch DDP", "torchft": "torchft",
    "hivemind": "hivemind", "flower": "Flower", "alone": "no system",
}  # fmt: skip
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "20mbit": "20 Mbit/s"}
CASES = {"plain": "all alike", "slow": "one worker 3 x slower", "killed": "one worker killed, then back"}
"""The cases with four workers."""
MANY = "many"
"""The case with sixteen workers, all alike."""
COLOURS = {
    "ours": "#c8372d", "ddp": "#777777", "torchft": "#1f6fb4", "hivemind": "#2c9150", "alone": "#c9c2b0",
    "float32": "#e09a3a", "tls": "#7a1f18", "flower": "#7d4fa3",
}  # fmt: skip
Result = dict[str, Any]
OURS = ("ours", "float32", "tls")
END_S = 5.0
Figure = tuple[Callable[[Result], float | None], str]
"""A function from a result to a figure, and the format of the figure."""
FIGURES: Sequence[Figure] = (
    (itemgetter("merged_per_s"), "{:.0f}"),
    (lambda r: 1000 * r["stall_max_s"], "{:,.0f}"),
    (lambda r: loss_at_end(r), "{:.2f}"),
)
"""The figures that are shown for each case."""
COSTS: Sequence[Figure] = (
    (itemgetter("bytes_per_token"), "{:,.0f}"),
    (itemgetter("cpu_ms_per_token"), "{:.2f}"),
)
LOSS_TOP = 3.7
"""Top of the picture: the loss of every system falls to this within 5 s."""
HELD_OUT_BYTES = 4096
PACE_S, PACE_SHARE = 4.0, 0.9
COUNTS_OWN = {"hivemind", "flower"}
"""In these systems, each worker counts its own merged tokens. In the others, each worker knows those of all."""

# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Window:
    """The part of a run that is measured. Times are in seconds of the monotonic clock."""

    began: float
    ended: float
    sent_bytes: int
    busy_s: float
    """CPU time that the whole machine spent."""
    back: float | None = None
    """When the killed worker was started again."""


@dataclass(frozen=True)
class Steps:
    """What one process of a worker wrote down at the end of each inner step."""

    at: list[float]
    tokens: list[float]
    merged: list[float]


def of_run(task: Task, case: str, window: Window, system: str) -> dict[str, Any]:
    """All figures of a run as JSON."""
    workers = {rank: read_steps(Path(task.folder), rank) for rank in range(task.workers)}
    seconds = window.ended - window.began
    trained = sum(
        tokens
        for processes in workers.values()
        for steps in processes
        for at, tokens in zip(steps.at, steps.tokens, strict=True)
        if window.began < at <= window.ended
    )
    own = system in COUNTS_OWN
    merged = merged_at(workers, window.ended, own) - merged_at(workers, window.began, own)
    honest = [rank for rank in workers if case in ("plain", MANY) or rank != task.workers - 1]
    stalls = sorted(s for rank in honest for s in stalls_of(workers[rank], task.step_s, window))
    return {
        "seconds": round(seconds, 1),
        "trained_per_s": round(trained / seconds, 1),
        "merged_per_s": round(merged / seconds, 1),
        "stall_median_s": round(median(stalls), 4),
        "stall_p99_s": round(stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))], 4),
        "stall_max_s": round(stalls[-1], 4),
        "bytes_per_token": round(window.sent_bytes / trained, 1) if trained else None,
        "cpu_ms_per_token": round(1000 * window.busy_s / trained, 3) if trained else None,
        "full_pace_s": None if window.back is None else full_pace_s(workers, task, window),
        "losses": losses(task),
    }


def read_steps(folder: Path, rank: int) -> list[Steps]:
    """The steps of each process of this worker, the oldest process first."""
    paths = sorted(folder.glob(f"steps-{rank}-*.txt"), key=lambda p: float(p.stem.split("-")[2]))
    found = []
    for path in paths:
        lines = [line.split() for line in path.read_text().splitlines()]
        rows = [[float(word) for word in words] for words in lines if len(words) == 3]
        found.append(Steps(*([row[i] for row in rows] for i in range(3))))
    return found


def merged_at(workers: dict[int, list[Steps]], at: float, own: bool) -> float:
    """Tokens that were merged by this time, interpolated between two moments at which a worker saw the count grow.

    Systems merge in lumps of H steps. The interpolation keeps lumps at the ends of a window from changing the result.
    """
    if own:
        return sum(_merged_by(steps, at) for processes in workers.values() for steps in processes)
    return max((_merged_by(steps, at) for processes in workers.values() for steps in processes), default=0.0)


def _merged_by(steps: Steps, at: float) -> float:
    if not steps.at:
        return 0.0
    grown = [(steps.at[0], steps.merged[0])]
    for t, merged in zip(steps.at, steps.merged, strict=True):
        if merged > grown[-1][1]:
            grown.append((t, merged))
    for (t0, m0), (t1, m1) in pairwise(grown):
        if t0 <= at < t1:
            return m0 + (m1 - m0) * (at - t0) / (t1 - t0)
    return grown[-1][1] if at >= grown[-1][0] else 0.0


def stalls_of(processes: Sequence[Steps], step_s: float, window: Window) -> list[float]:
    """Seconds by which each step in the window took longer than computing. This includes the time between two
    processes, and the time from the last step to the end, if that is more than a step."""
    ends = [t for steps in processes for t in steps.at if t <= window.ended]
    found = [b - a - step_s for a, b in pairwise(ends) if b > window.began]
    rest = window.ended - (ends[-1] if ends else window.began) - step_s
    return [*found, rest] if rest > 0 else found


def full_pace_s(workers: dict[int, list[Steps]], task: Task, window: Window) -> float | None:
    """Seconds from the killed worker's second start until all workers train at full pace again.

    Full pace: in the next `PACE_S` seconds, the workers together take at least `PACE_SHARE` of the steps that they
    would take without any system. None: this does not happen within the window.
    """
    assert window.back is not None
    at = sorted(t for processes in workers.values() for steps in processes for t in steps.at)
    enough = PACE_SHARE * task.workers * PACE_S / task.step_s
    for t in [t for t in at if window.back <= t <= window.ended - PACE_S]:
        if bisect_right(at, t + PACE_S) - bisect_left(at, t) >= enough:
            return round(t - window.back, 1)
    return None


def losses(task: Task) -> list[tuple[float, float]]:
    """Pairs: seconds since the beginning, and the held-out loss of the mean of all workers' models, in nats per byte.

    The mean stands for the model that a system would give its users. With DDP, all models are equal.
    """
    by_number: dict[int, list[Path]] = defaultdict(list)
    for path in Path(task.folder).glob("model-*.pt"):
        match = re.fullmatch(r"model-(\d+)-(\d+)", path.stem)
        assert match is not None
        by_number[int(match[1])].append(path)
    text = read_bytes(Path(task.folder, "held.bin"))[: HELD_OUT_BYTES + 1].long()
    model = make_model(task)
    return [
        (round(number * task.snapshot_s, 1), round(_loss(model, text, task, paths), 4))
        for number, paths in sorted(by_number.items())
    ]


def _loss(model: SmallGpt, text: torch.Tensor, task: Task, paths: list[Path]) -> float:
    states = [torch.load(path) for path in paths]
    model.load_state_dict({name: sum(s[name].float() for s in states) / len(states) for name in states[0]})
    windows = len(text) // task.context
    inputs = text[: windows * task.context].view(windows, task.context)
    targets = text[1 : windows * task.context + 1].view(windows, task.context)
    with torch.no_grad():
        return float(loss_of(model(inputs), targets))


# ---------------------------------------------------------------- the page


def line(r: Result) -> str:
    """One result as a line for people."""
    name = f"{r['system']:<9} {r['link']:<8} {r['case']:<7}"
    if "failed" in r:
        return f"{name} failed: {r['failed']}"
    return (
        f"{name} {r['trained_per_s']:6.0f} trained/s {r['merged_per_s']:6.0f} merged/s  stall {_stalls(r)} ms  "
        f"{r['bytes_per_token']} B/token  loss {loss_at_end(r):.3f}  {len(r['deaths'])} deaths"
    )


def loss_at_end(r: Result) -> float:
    """Held-out loss `END_S` before the end. All systems have saved their models for the last time by then."""
    return loss_at(r, r["times"]["warm"] + r["seconds"] - END_S)


def loss_at(r: Result, seconds: float) -> float:
    """The last held-out loss up to this time."""
    return next((float(loss) for at, loss in reversed(r["losses"]) if at <= seconds), float("nan"))


def _filled(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}\n{text}\n\n{place[2]}"


def write(results: Sequence[Result]) -> None:
    """Put tables of these results into the page, and redraw the picture."""
    page = PAGE.read_text()
    for name, text in {"cases": table(results), "many": many(results), "age": age(results)}.items():
        found = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = found.sub(partial(_filled, text), page)
    PAGE.write_text(page)
    draw(results, PICTURE)


def table(results: Sequence[Result]) -> str:
    """A row for each link and system: all workers alike, one slow, one killed. Figures are medians over seeds."""
    heads = [head for what in ("merged tokens/s", "longest stall, ms", "loss") for head in (what, "slow", "killed")]
    heads += ["full pace again, s", "bytes per token", "CPU, ms per token"]
    rows = _head(heads)
    for link, system in dict.fromkeys((r["link"], r["system"]) for r in results if r["case"] in CASES):
        of = [[r for r in results if (r["link"], r["system"], r["case"]) == (link, system, case)] for case in CASES]
        cells = [_median(of_case, figure, shape) for figure, shape in FIGURES for of_case in of]
        cells += [_median(of[2], itemgetter("full_pace_s"), "{:.0f}")]
        cells += [_median(of[0], *figure) for figure in COSTS]
        rows.append(f"| {LINKS[link]} | {NAMES[system]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def many(results: Sequence[Result]) -> str:
    """A row for each link and system, with sixteen workers. Figures are medians over seeds."""
    rows = _head(["merged tokens/s", "longest stall, ms", "loss", "bytes per token", "CPU, ms per token"])
    for link, system in dict.fromkeys((r["link"], r["system"]) for r in results if r["case"] == MANY):
        of = [r for r in results if (r["link"], r["system"], r["case"]) == (link, system, MANY)]
        cells = [_median(of, *figure) for figure in (*FIGURES, *COSTS)]
        rows.append(f"| {LINKS[link]} | {NAMES[system]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _head(figures: Sequence[str]) -> list[str]:
    """The first two lines of a table with a row for each link and system."""
    return ["| " + " | ".join(["link", "system", *figures]) + " |", "| --- | --- |" + " ---: |" * len(figures)]


def _median(results: Sequence[Result], figure: Callable[[Result], float | None], shape: str) -> str:
    """The median over seeds, as text. "-": there are no results. "no": it did not happen in one of the runs."""
    if failed := [r["failed"] for r in results if "failed" in r]:
        return f"could not: {_cell(failed[0])}"
    found = [figure(r) for r in results]
    if not found:
        return "-"
    return "no" if None in found else shape.format(median(x for x in found if x is not None))


def defaults() -> dict[str, Any]:
    """Today's default settings on which a merge depends."""
    content = Settings().model_dump(mode="json")
    return {section: content[section] for section in ("sync", "outer")}


def age(results: Sequence[Result]) -> str:
    """What the page says about rows of ours that are older than today's defaults."""
    ours = [r for r in results if r["system"] in OURS]
    old = sorted(r["when"][:10] for r in ours if without_gone(r.get("defaults", {})) != defaults())
    if not old:
        return "All rows of ours have today's defaults."
    days = old[0] if old[0] == old[-1] else f"{old[0]} to {old[-1]}"
    return f"**{len(old)} of {len(ours)} rows of ours are older than today's defaults** ({days}): another program."


def draw(results: Sequence[Result], picture: Path) -> None:
    """Draw the held-out loss over wall-clock time: a row for each case, a column for each link with all cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    links = [link for link in LINKS if {r["case"] for r in results if r["link"] == link} >= {*CASES}]
    figure, panels = plt.subplots(
        len(CASES), len(links), figsize=(9, 8.6), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for row, (case, words) in zip(panels, CASES.items(), strict=True):
        for panel, link in zip(row, links, strict=True):
            for r in results:
                if (r["case"], r["link"]) == (case, link) and r.get("losses"):
                    at, losses = zip(*r["losses"], strict=True)
                    width = 1.8 if r["seed"] == 0 else 0.6
                    panel.plot(at, losses, color=COLOURS[r["system"]], linewidth=width)
            panel.set_title(f"{LINKS[link]}: {words}", loc="left", fontsize=9, color="#222222")
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#dddddd", linewidth=0.6)
            panel.set_ylim(top=LOSS_TOP)
    for panel in panels[-1]:
        panel.set_xlabel("seconds of training")
    for row in panels:
        row[0].set_ylabel("held-out loss, nats per byte")
    there = {r["system"] for r in results if r["link"] in links}
    lines = [Line2D([], [], color=COLOURS[system], label=name) for system, name in NAMES.items() if system in there]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _stalls(r: Result) -> str:
    return " / ".join(f"{1000 * r[f'stall_{which}_s']:,.0f}" for which in ("median", "p99", "max"))


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:200]
