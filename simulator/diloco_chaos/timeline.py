"""The timeline: one row per shard and worker. Ticks show its steps or versions, bars and marks its faults.

matplotlib is imported only to draw. It comes with the `dev` extra.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_chaos.plan import LINK, ChaosRun, InjectedFault
from diloco_chaos.result import alive_times
from diloco_common.errors import ConfigError
from diloco_simulator.verify.histories import Histories, Process

STEP, VERSION, PACE = "#2a8c82", "#3b4cc0", "#b8860b"
STARTING = "#fbe3e0"
AWAY = {"kill": "#f3b8b8", "freeze": "#bfe0f5", "fill": "#f5e2a9", "cut": "#dcc8ee"}
MARKS = {"kill": ("X", "#c0272d"), "freeze": ("s", "#1b78b4"), "fill": ("D", "#a67c00"), "cut": ("P", "#7b3fb0")}
"""Kind of a fault -> marker and color."""
EVICTED, JOINED = "#e07b1a", "#2e8b3d"
ANNOUNCED = ("announced", "restored")
LANE, INK, FAINT = "#f5f6f7", "#22272e", "#8b949e"
_WIDTH_IN = 16.0
_ROW_IN = 0.46


def check_timeline(path: Path) -> None:
    """Raise ConfigError if no picture can be drawn here. Call it before the run."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--timeline {path}: give a name that ends with .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--timeline needs matplotlib: pip install matplotlib")


def draw(histories: Histories, run: ChaosRun, result: dict[str, Any], path: Path) -> None:
    """Draw the run with faults, and write the picture to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shards, workers = sorted(histories.shards), sorted(histories.learners, key=_number)
    names = [*shards, *workers]
    height = 2.9 + _ROW_IN * len(names)
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10.5, "svg.fonttype": "none"}):
        figure, (rows, pace) = plt.subplots(
            2, 1, figsize=(_WIDTH_IN, height), sharex=True,
            gridspec_kw={"height_ratios": [_ROW_IN * len(names), 1.15], "hspace": 0.07},
        )  # fmt: skip
        figure.subplots_adjust(left=0.075, right=0.985, top=1 - 1.12 / height, bottom=0.62 / height)
        _title(figure, height, result)
        gaps = dict.fromkeys(workers, 0.35)
        place = {name: -row - gaps.get(name, 0.0) for row, name in enumerate(names)}
        for name in names:
            rows.barh(place[name], run.ended - run.began, 0.8, color=LANE, zorder=0)
        _shadows(rows, histories, run, place)
        for name in names:
            _absences(rows, name, histories, run, place[name])
        most = max(
            (len(line["contributions"]) for process in histories.shard_processes() for line in process.of("merging")),
            default=1,
        )
        for name in shards:
            _versions(rows, histories.shards[name], run, place[name], most)
        for name in workers:
            _steps(rows, histories.learners[name], run, place[name])
        _memberships(rows, histories, run, place)
        _marks(rows, run, place)
        rows.set_yticks([place[name] for name in names], names)
        rows.set_ylim(min(place.values()) - 0.6, 0.6)
        rows.set_xlim(-0.004 * (run.ended - run.began), run.ended - run.began)
        _bare(rows)
        rows.tick_params(axis="x", length=0)
        _pace(pace, histories, run, result)
        _key(figure, height, run)
        figure.savefig(path, facecolor="white", metadata={"Software": None} if path.suffix == ".png" else None)
        plt.close(figure)


# ---------------------------------------------------------------- rows


def _shadows(axes: Any, histories: Histories, run: ChaosRun, place: dict[str, float]) -> None:
    """Draw the times when a shard was away across the rows of all workers, to show that their steps go on."""
    low, high = min(place.values()) - 0.4, min(place[name] for name in histories.shards) - 0.4
    for fault in run.faults:
        if fault.kind != "fill" and (processes := histories.shards.get(fault.target)) is not None:
            back = _back(processes, fault, run) if fault.kind == "kill" else fault.ended
            times = [fault.began - run.began, min(back, run.ended) - run.began]
            axes.fill_between(times, low, high, color=INK, alpha=0.045, linewidth=0, zorder=0.5)


def _absences(axes: Any, name: str, histories: Histories, run: ChaosRun, y: float) -> None:
    """Draw the times when a process was dead, starting or frozen, as bars."""
    processes = [*histories.shards.get(name, ()), *histories.learners.get(name, ())]
    end = run.ended - run.began
    for fault in run.faults:
        if fault.target.partition(LINK)[0] != name:
            continue
        began, over = fault.began - run.began, min(fault.ended - run.began, end)
        axes.barh(y, over - began, 0.8, left=began, color=AWAY[fault.kind], zorder=1)
        if fault.kind == "kill":
            back = _back(processes, fault, run)
            axes.barh(y, max(0.0, min(back - run.began, end) - over), 0.8, left=over, color=STARTING, zorder=1)


def _back(processes: Sequence[Process], fault: InjectedFault, run: ChaosRun) -> float:
    """When a killed process was useful again: at its first inner step, or its first version."""
    later = (process for process in processes if process.began > fault.began)
    return float(next((line["t"] for process in later for line in process.of("stepped", *ANNOUNCED)), run.ended))


def _versions(axes: Any, processes: Sequence[Process], run: ChaosRun, y: float, most: int) -> None:
    """A tick per announced version. Its height is the number of contributions."""
    for process in processes:
        held = {(line["fragment"], line["version"]): len(line["contributions"]) for line in process.of("merging")}
        marks = [
            (line["t"] - run.began, held.get((line["fragment"], line["version"]), 0))
            for line in process.of("announced")
            if run.began <= line["t"] <= run.ended
        ]
        axes.vlines(
            [at for at, _ in marks], y - 0.4, [y - 0.4 + 0.8 * max(count, 0.3) / most for _, count in marks],
            color=VERSION, linewidth=_tick(run), alpha=0.75, zorder=2,
        )  # fmt: skip


def _steps(axes: Any, processes: Sequence[Process], run: ChaosRun, y: float) -> None:
    times = (line["t"] for process in processes for line in process.of("stepped"))
    at = [t - run.began for t in times if run.began <= t <= run.ended]
    axes.vlines(at, y - 0.17, y + 0.17, color=STEP, linewidth=_tick(run), alpha=0.8, zorder=2)


def _tick(run: ChaosRun) -> float:
    """Ticks are thinner where there are more of them."""
    return max(0.5, min(1.3, 60.0 / (run.ended - run.began)))


def _memberships(axes: Any, histories: Histories, run: ChaosRun, place: dict[str, float]) -> None:
    """Draw the evictions and joins of workers that the shards recorded."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for process in histories.shard_processes():
        for line in process.of("joined", "gone"):
            if line["what"] == "joined" or line["code"] != "LEFT":
                found[line["what"], line["learner"]].append(line["t"] - run.began)
    for (what, learner), times in found.items():
        at = [t for t in times if 0 < t < run.ended - run.began]
        marker, colour, edge = ("v", EVICTED, 0.33) if what == "gone" else ("^", JOINED, -0.33)
        if learner in place:
            axes.scatter(
                at, [place[learner] + edge] * len(at), marker=marker, s=26, color=colour, linewidths=0, zorder=5
            )


def _marks(axes: Any, run: ChaosRun, place: dict[str, float]) -> None:
    size = 64 if len(run.faults) < 50 else 44
    for fault in run.faults:
        marker, colour = MARKS[fault.kind]
        y = place[fault.target.partition(LINK)[0]]
        axes.scatter(
            fault.began - run.began, y, marker=marker, s=size, color=colour, edgecolors="white", linewidths=0.9,
            zorder=6,
        )  # fmt: skip


# ---------------------------------------------------------------- the pace below


def _pace(axes: Any, histories: Histories, run: ChaosRun, result: dict[str, Any]) -> None:
    """Draw merged tokens per second, and the fault-free pace of the living workers."""
    seconds = run.ended - run.began
    bins = max(1, min(120, round(seconds / 2.0)))
    width = seconds / bins
    merged, alive = [0.0] * bins, [0.0] * bins
    for merge in histories.merges():
        if merge.push is None or merge.fragment in histories.companions:
            continue
        if run.began <= merge.at < run.ended:
            merged[int((merge.at - run.began) / width)] += merge.tokens / histories.num_fragments / width
    for process in histories.learner_processes():
        for begin, end in alive_times(process, run):
            for index in range(bins):
                left = run.began + index * width
                alive[index] += max(0.0, min(end, left + width) - max(begin, left)) / width
    edges = [index * width for index in range(bins + 1)]
    usual = result["baseline"]["tokens_per_alive_s"] if result["baseline"] else 0.0
    axes.stairs(merged, edges, fill=True, color=PACE, alpha=0.45)
    if usual:
        axes.stairs([usual * count for count in alive], edges, color=INK, linewidth=1.2, baseline=None)
    axes.set_ylabel("tokens/s", color=INK)
    axes.set_xlabel("seconds", labelpad=2)
    axes.set_ylim(0, max(*merged, usual * len(histories.learners), 1.0) * 1.4)
    axes.text(0.006, 0.93, "merged", color=PACE, transform=axes.transAxes, va="top", fontweight="bold")
    words = "and the fault-free pace of the workers that are alive" if usual else ""
    axes.text(0.056, 0.93, words, color=INK, transform=axes.transAxes, va="top")
    _bare(axes)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)


# ---------------------------------------------------------------- around it


def _title(figure: Any, height: float, result: dict[str, Any]) -> None:
    broken = f"{result['violations']} violations" if result["violations"] else "nothing lost, nothing counted twice"
    first = f"{result['faults']} faults in {result['seconds']:.0f} s: {broken}"
    goodput = result["goodput_per_alive"]
    share = "" if goodput is None else f"{goodput:.1%} of fault-free tokens per alive worker-second, "
    second = (
        f"{share}workers away "
        f"for {result['dead_share']:.0%} of the time; no living worker went longer than "
        f"{result['longest_step_gap_s']:.2f} s without a step.   python -m diloco_chaos --seed {result['seed']}"
    )
    colour = MARKS["kill"][1] if result["violations"] else INK
    figure.text(0.012, 1 - 0.34 / height, first, fontsize=17, fontweight="bold", color=colour)
    figure.text(0.012, 1 - 0.62 / height, second, fontsize=11, color="#57606a")


def _key(figure: Any, height: float, run: ChaosRun) -> None:
    """The legend, in one line above the rows."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(marker: str, colour: str, words: str, size: float = 8) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, color=colour, markersize=size, label=words, markeredgewidth=1.2
        )

    done = {fault.kind for fault in run.faults}
    handles = [
        mark("|", STEP, "inner step", 10),
        mark("|", VERSION, "version, higher with more contributions", 12),
        mark(*MARKS["kill"], "SIGKILL"),
        Patch(color=AWAY["kill"], label="dead"),
        Patch(color=STARTING, label="starting"),
        mark(*MARKS["freeze"], "SIGSTOP", 7),
        Patch(color=AWAY["freeze"], label="frozen"),
        *([mark(*MARKS["fill"], "disk full", 7)] if "fill" in done else []),
        *([mark(*MARKS["cut"], "link to a shard cut", 8)] if "cut" in done else []),
        mark("v", EVICTED, "evicted", 6),
        mark("^", JOINED, "joined", 6),
        Patch(color="#eceded", label="a shard is away"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.68 / height), ncols=len(handles), frameon=False,
        handletextpad=0.4, columnspacing=1.5, handlelength=1.1, fontsize=10,
    )  # fmt: skip


def _bare(axes: Any) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _number(name: str) -> tuple[str, int]:
    """worker-10 comes after worker-9."""
    kind, _, number = name.rpartition("-")
    return kind, int(number) if number.isdigit() else 0
