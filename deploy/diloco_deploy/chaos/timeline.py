"""The timeline: one row per shard and worker, what each did as ticks, what was done to it as bars and marks.

matplotlib is imported only to draw: it comes with the `dev` extra.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco_common.errors import ConfigError
from diloco_deploy.chaos.cluster import Course, Deed
from diloco_deploy.chaos.goodput import alive_times
from diloco_deploy.chaos.histories import Histories, Life
from diloco_deploy.chaos.plan import LINK

STEP, VERSION, PACE = "#2a8c82", "#3b4cc0", "#b8860b"
STARTING = "#fbe3e0"
AWAY = {"kill": "#f3b8b8", "freeze": "#bfe0f5", "fill": "#f5e2a9", "cut": "#dcc8ee"}
MARKS = {"kill": ("X", "#c0272d"), "freeze": ("s", "#1b78b4"), "fill": ("D", "#a67c00"), "cut": ("P", "#7b3fb0")}
"""By what was done."""
EVICTED, JOINED = "#e07b1a", "#2e8b3d"
ANNOUNCED = ("announced", "restored")
LANE, INK, FAINT = "#f5f6f7", "#22272e", "#8b949e"
_WIDTH_IN, _DPI = 16.0, 100
_ROW_IN = 0.46
_SAME_MARK_S = 0.3
"""Shards evict the same worker one after the other: shown once."""


def check_timeline(path: Path) -> None:
    """Raises ConfigError where no picture can be drawn: before the run rather than after it."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--timeline {path}: a timeline is a .png or a .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--timeline needs matplotlib: pip install matplotlib")


def draw(histories: Histories, course: Course, result: dict[str, Any], path: Path) -> None:
    """Draw the course of the run that was hurt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shards, workers = sorted(histories.shards), sorted(histories.workers, key=_number)
    names = [*shards, *workers]
    height = 2.9 + _ROW_IN * len(names)
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10.5, "svg.fonttype": "none"}):
        figure, (rows, pace) = plt.subplots(
            2, 1, figsize=(_WIDTH_IN, height), sharex=True,
            gridspec_kw={"height_ratios": [_ROW_IN * len(names), 1.15], "hspace": 0.07},
        )  # fmt: skip
        figure.subplots_adjust(left=0.075, right=0.985, top=1 - 1.12 / height, bottom=0.62 / height)
        _title(figure, height, result)
        place = {name: -row - (0.35 if name in histories.workers else 0.0) for row, name in enumerate(names)}
        for name in names:
            rows.barh(place[name], course.ended - course.began, 0.8, color=LANE, zorder=0)
        _shadows(rows, histories, course, place)
        for name in names:
            _absences(rows, name, histories, course, place[name])
        most = max(
            (len(line["contributions"]) for life in histories.shard_lives() for line in life.of("merging")), default=1
        )
        for name in shards:
            _versions(rows, histories.shards[name], course, place[name], most)
        for name in workers:
            _steps(rows, histories.workers[name], course, place[name])
        _memberships(rows, histories, course, place)
        _marks(rows, course, place)
        rows.set_yticks([place[name] for name in names], names)
        rows.set_ylim(min(place.values()) - 0.6, 0.6)
        rows.set_xlim(-0.004 * (course.ended - course.began), course.ended - course.began)
        _bare(rows)
        rows.tick_params(axis="x", length=0)
        _pace(pace, histories, course, result)
        _key(figure, height, course)
        figure.savefig(
            path, dpi=_DPI, facecolor="white", metadata={"Software": None} if path.suffix == ".png" else None
        )
        plt.close(figure)


# ---------------------------------------------------------------- rows


def _shadows(axes: Any, histories: Histories, course: Course, place: dict[str, float]) -> None:
    """Where a shard is away, across the workers: their steps go on in it."""
    low, high = min(place.values()) - 0.4, min(place[name] for name in histories.shards) - 0.4
    for deed in course.deeds:
        if deed.harm != "fill" and (lives := histories.shards.get(deed.target)) is not None:
            back = _back(lives, deed, course) if deed.harm == "kill" else deed.ended
            times = [deed.began - course.began, min(back, course.ended) - course.began]
            axes.fill_between(times, low, high, color=INK, alpha=0.045, linewidth=0, zorder=0.5)


def _absences(axes: Any, name: str, histories: Histories, course: Course, y: float) -> None:
    """Dead, starting and frozen times as bars."""
    lives = [*histories.shards.get(name, ()), *histories.workers.get(name, ())]
    end = course.ended - course.began
    for deed in course.deeds:
        if deed.target.partition(LINK)[0] != name:
            continue
        began, over = deed.began - course.began, min(deed.ended - course.began, end)
        axes.barh(y, over - began, 0.8, left=began, color=AWAY[deed.harm], zorder=1)
        if deed.harm == "kill":
            back = _back(lives, deed, course)
            axes.barh(y, max(0.0, min(back - course.began, end) - over), 0.8, left=over, color=STARTING, zorder=1)


def _back(lives: Sequence[Life], deed: Deed, course: Course) -> float:
    """When a process was of use again: its first inner step, or its first version, after it was killed."""
    later = (life for life in lives if life.began > deed.began)
    return float(next((line["t"] for life in later for line in life.of("stepped", *ANNOUNCED)), course.ended))


def _versions(axes: Any, lives: Sequence[Life], course: Course, y: float, most: int) -> None:
    """A tick per announced version, as high as many contributed."""
    for life in lives:
        held = {(line["fragment"], line["version"]): len(line["contributions"]) for line in life.of("merging")}
        marks = [
            (line["t"] - course.began, held.get((line["fragment"], line["version"]), 0))
            for line in life.of("announced")
            if course.began <= line["t"] <= course.ended
        ]
        axes.vlines(
            [at for at, _ in marks], y - 0.4, [y - 0.4 + 0.8 * max(count, 0.3) / most for _, count in marks],
            color=VERSION, linewidth=_tick(course), alpha=0.75, zorder=2,
        )  # fmt: skip


def _steps(axes: Any, lives: Sequence[Life], course: Course, y: float) -> None:
    """A tick per inner step."""
    times = (line["t"] for life in lives for line in life.of("stepped"))
    at = [t - course.began for t in times if course.began <= t <= course.ended]
    axes.vlines(at, y - 0.17, y + 0.17, color=STEP, linewidth=_tick(course), alpha=0.8, zorder=2)


def _tick(course: Course) -> float:
    """Ticks are thinner where there are more of them."""
    return max(0.5, min(1.3, 60.0 / (course.ended - course.began)))


def _memberships(axes: Any, histories: Histories, course: Course, place: dict[str, float]) -> None:
    """Evictions and joins of workers, as the shards tell them."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for life in histories.shard_lives():
        for line in life.of("joined", "gone"):
            if line["what"] == "joined" or line["code"] != "LEFT":
                found[line["what"], line["learner"]].append(line["t"] - course.began)
    for (what, learner), times in found.items():
        at = [t for t in _apart(sorted(times)) if 0 < t < course.ended - course.began]
        marker, colour, edge = ("v", EVICTED, 0.33) if what == "gone" else ("^", JOINED, -0.33)
        if learner in place:
            axes.scatter(
                at, [place[learner] + edge] * len(at), marker=marker, s=26, color=colour, linewidths=0, zorder=5
            )


def _apart(times: Sequence[float]) -> Iterator[float]:
    last = float("-inf")
    for at in times:
        if at - last > _SAME_MARK_S:
            yield at
        last = at


def _marks(axes: Any, course: Course, place: dict[str, float]) -> None:
    """What was done, where it began."""
    size = 64 if len(course.deeds) < 50 else 44
    for deed in course.deeds:
        marker, colour = MARKS[deed.harm]
        y = place[deed.target.partition(LINK)[0]]
        axes.scatter(
            deed.began - course.began, y, marker=marker, s=size, color=colour, edgecolors="white", linewidths=0.9,
            zorder=6,
        )  # fmt: skip


# ---------------------------------------------------------------- the pace below


def _pace(axes: Any, histories: Histories, course: Course, result: dict[str, Any]) -> None:
    """Merged tokens per second, and what those alive would do without faults."""
    seconds = course.ended - course.began
    bins = max(1, min(120, round(seconds / 2.0)))
    width = seconds / bins
    merged, alive = [0.0] * bins, [0.0] * bins
    for merge in histories.merges():
        if course.began <= merge.at < course.ended:
            merged[int((merge.at - course.began) / width)] += merge.tokens / histories.num_fragments / width
    for life in histories.worker_lives():
        for begin, end in alive_times(life, course):
            for index in range(bins):
                left = course.began + index * width
                alive[index] += max(0.0, min(end, left + width) - max(begin, left)) / width
    edges = [index * width for index in range(bins + 1)]
    usual = result["baseline"]["tokens_per_alive_s"] if result["baseline"] else 0.0
    axes.stairs(merged, edges, fill=True, color=PACE, alpha=0.45)
    if usual:
        axes.stairs([usual * count for count in alive], edges, color=INK, linewidth=1.2, baseline=None)
    axes.set_ylabel("tokens/s", color=INK)
    axes.set_xlabel("seconds", labelpad=2)
    axes.set_ylim(0, max(*merged, usual * len(histories.workers), 1.0) * 1.4)
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
    second = (
        f"{_goodput(result)}workers away "
        f"{result['dead_share']:.0%} of the time; no living worker went longer than "
        f"{result['longest_step_gap_s']:.2f} s without a step.   diloco chaos --seed {result['seed']}"
    )
    colour = MARKS["kill"][1] if result["violations"] else INK
    figure.text(0.012, 1 - 0.34 / height, first, fontsize=17, fontweight="bold", color=colour)
    figure.text(0.012, 1 - 0.62 / height, second, fontsize=11, color="#57606a")


def _goodput(result: dict[str, Any]) -> str:
    found = result["goodput_per_alive"]
    return f"{found:.1%} of fault-free tokens per alive worker-second, " if found is not None else ""


def _key(figure: Any, height: float, course: Course) -> None:
    """What the marks mean, in one line above the rows."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(marker: str, colour: str, words: str, size: float = 8) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, color=colour, markersize=size, label=words, markeredgewidth=1.2
        )

    done = {deed.harm for deed in course.deeds}
    handles = [
        mark("|", STEP, "inner step", 10),
        mark("|", VERSION, "version, as high as many contributed", 12),
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
