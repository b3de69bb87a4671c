"""Draws docs/growth.png: the costs of growth.py in six panels, with measured points over the fitted law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growth_law import CpuLaw, MemoryLaw

if TYPE_CHECKING:
    from growth import Cost

BLUE, ORANGE, GREEN, PURPLE, GREY = "#1f6fb4", "#e07b1a", "#2c9150", "#7d4cb2", "#777777"
SHARDS = {2: ORANGE, 4: GREEN, 8: PURPLE}
"""Numbers of shards that are drawn, and their colours."""
MANY = 8
DRAWN = ("learners", "fragments", "parameters", "shards")
"""The sweeps that the picture needs; others are points of its last panel."""
PROMISED_BYTES = 11
"""Bytes per parameter, without the memory of an idle shard and the contributions of its open rounds."""


def draw(costs: Sequence[Cost], cpu: CpuLaw, memory: MemoryLaw, path: Path) -> None:
    """Draw three sweeps. The panel of the learners also shows the sweep of the shards, which has the same model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    swept = {name: [c for c in costs if c.sweep == name] for name in DRAWN}
    figure, ((top_left, top_right), (bottom_left, bottom_right), (calls, moved)) = plt.subplots(
        3, 2, figsize=(11, 12), layout="constrained"
    )
    _panel(top_left, "Learners: CPU grows in proportion, shards divide it", "CPU seconds of a shard, per round")
    top_left.set_xlabel(f"learners  ({_millions(swept['learners'][0]):.0f} M parameters, 8 fragments)")
    labels = _cpu(top_left, swept["learners"], cpu, lambda c: c.learners, f"one shard: {_contribution(cpu)}")
    for count, colour in SHARDS.items():
        points = [c for c in swept["shards"] if c.shards == count]
        if not points:
            continue
        top_left.plot([c.learners for c in points], [max(c.shard_cpu_s) for c in points], marker="s", color=colour)
        labels.append((f"each of {count} shards", colour))
    _key(top_left, labels)

    _panel(top_right, "Fragments: more of them, more contributions", "CPU seconds of a shard, per round")
    top_right.set_xlabel(f"fragments  ({_millions(swept['fragments'][0]):.0f} M parameters, 4 learners)")
    _key(top_right, _cpu(top_right, swept["fragments"], cpu, lambda c: c.fragments, _contribution(cpu)))

    _panel(bottom_left, "Parameters: the bytes decide from 8 M on", "CPU seconds of a shard, per round")
    bottom_left.set_xlabel("million parameters  (4 learners, 24 fragments)")
    words = f"{1e9 * cpu.per_byte_s:.1f} s per GB moved, {1e9 * cpu.per_parameter_s:.1f} s per 1000 M parameters"
    _key(bottom_left, _cpu(bottom_left, swept["parameters"], cpu, _millions, words))

    _panel(bottom_right, "Memory: bounded by the model", "peak resident memory of the shard, MB")
    bottom_right.set_xlabel("million parameters  (4 learners, 24 fragments)")
    _memory(bottom_right, swept["parameters"], memory)

    _panel(calls, "One core: how many contributions it serves", "contributions per second and core")
    calls.set_xlabel(f"learners  ({_millions(swept['learners'][0]):.0f} M parameters, 8 fragments)")
    labels = [("each a push and a pull; one shard", BLUE)]
    calls.plot(*_served(swept["learners"]), marker="o", color=BLUE)
    for count, colour in SHARDS.items():
        points = [c for c in swept["shards"] if c.shards == count]
        if points:
            calls.plot(*_served(points), marker="s", color=colour)
            labels.append((f"{count} shards, per core of all", colour))
    calls.set_yscale("linear")
    calls.set_ylim(bottom=0)
    _key(calls, labels)

    _panel(moved, "One core: how many bytes it serves", "MB per second and core")
    moved.set_xlabel("MB received and sent per contribution")
    _bytes(moved, [c for c in costs if c.shards == 1], cpu)

    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _cpu(axes: Any, sweep: Sequence[Cost], law: CpuLaw, x: Callable[[Cost], float], words: str) -> list[Any]:
    """Plot points and law of one shard. Returns their labels and colours."""
    xs = [x(c) for c in sweep]
    axes.plot(xs, [law.seconds(c) for c in sweep], color=BLUE, linewidth=1)
    axes.plot(xs, [c.shard_cpu_s[0] for c in sweep], "o", color=BLUE)
    return [(words, BLUE), ("points: measured, line: the law of all cases", GREY)]


def _memory(axes: Any, sweep: Sequence[Cost], law: MemoryLaw) -> None:
    """Plot the measured memory, and the promised limit."""
    xs = [_millions(c) for c in sweep]
    given = [c.idle_bytes[0] + c.open_bytes[0] for c in sweep]
    promised = [(g + PROMISED_BYTES * c.parameters) / 1e6 for g, c in zip(given, sweep, strict=True)]
    axes.plot(xs, promised, color=GREY, linestyle="--")
    axes.plot(xs, [(g + law.bytes(c)) / 1e6 for g, c in zip(given, sweep, strict=True)], color=BLUE, linewidth=1)
    axes.plot(xs, [c.peak_bytes[0] / 1e6 for c in sweep], "o", color=BLUE)
    axes.plot(xs, [c.idle_bytes[0] / 1e6 for c in sweep], color=GREY, linewidth=1)
    axes.set_ylim(bottom=100)
    _key(axes, [
        ("points: measured, line: the law", BLUE),
        (f"dashes: promised, idle + contributions + {PROMISED_BYTES} bytes per parameter", GREY),
        (f"each learner more adds {law.per_learner / 1e6:.1f} MB", GREY),
    ])  # fmt: skip
    axes.annotate("idle shard", (xs[-1], sweep[-1].idle_bytes[0] / 1e6), xytext=(0, -14), textcoords="offset points",
                  ha="right", color=GREY, fontsize=9)  # fmt: skip


def _served(sweep: Sequence[Cost]) -> tuple[list[int], list[float]]:
    return [c.learners for c in sweep], [c.contributions_per_core_s for c in sweep]


def _bytes(axes: Any, costs: Sequence[Cost], law: CpuLaw) -> None:
    """Plot bytes per second against the size of a contribution: the law without versions and merging bounds it."""
    sizes = sorted(c.moved_bytes / c.contributions for c in costs)
    bound = [size / (law.per_contribution_s + law.per_byte_s * size) for size in sizes]
    axes.plot([size / 1e6 for size in sizes], [rate / 1e6 for rate in bound], color=BLUE, linewidth=1)
    for cost in costs:
        many = cost.learners >= MANY
        axes.plot(
            cost.moved_bytes / cost.contributions / 1e6, cost.bytes_per_core_s / 1e6, "o",
            color=BLUE if many else GREY, markersize=6 if many else 4,
        )  # fmt: skip
    axes.axvline(law.even_bytes / 1e6, ymax=0.75, color=GREY, linestyle="--", linewidth=1)  # below the labels
    _key(axes, [
        (f"points: measured, {MANY} learners and more", BLUE),
        ("fewer learners, who share the merge among fewer contributions", GREY),
        ("line: calls and bytes alone; dashes: they cost the same", GREY),
    ])  # fmt: skip


def _panel(axes: Any, title: str, ylabel: str) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _key(axes: Any, labels: Sequence[tuple[str, str]]) -> None:
    """Write the labels in their colours at the upper left, which is empty because all curves rise to the right."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.03 if high < 50 else low), high * 2)
    for line, (text, colour) in enumerate(labels):
        axes.text(0.03, 0.96 - 0.065 * line, text, transform=axes.transAxes, color=colour, fontsize=9, va="top")


def _contribution(law: CpuLaw) -> str:
    return f"{1000 * law.per_contribution_s:.1f} ms per contribution, with its pull"


def _millions(cost: Cost) -> float:
    return cost.parameters / 1e6
