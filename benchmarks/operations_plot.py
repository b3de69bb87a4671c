"""Draws a worker that is killed and comes back, as Prometheus saw it. The panels are in the order to look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ["#1f6fb4", "#e07b1a", "#2c9150"]
"""Colours of the learners, sorted by name."""
GREY, INK, YELLOW, RED = "#777777", "#222222", "#f2c14e", "#c8372d"
BEGIN_S = 22
"""Rates look back 20 s, so before this time they still grow."""
LEASE_S = 6
"""The default of lease.lease_s."""


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw what `operations.py` measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series, victim, quorum = found["series"], found["victim"], found["quorum"]
    figure, panels = plt.subplots(
        4, 1, figsize=(10, 8.6), sharex=True, layout="constrained", height_ratios=[3, 2.4, 2.4, 0.8]
    )
    progress, silent, rounds, alerts = panels

    _head(progress, "Is it making progress?", "thousand tokens per second")
    trained = sorted(series["trained"], key=lambda one: one["labels"]["learner"])
    names = [one["labels"]["learner"] for one in trained]
    colours = dict(zip(names, COLOURS, strict=True))
    at = _points(series["merged"][0])[0]
    rates = [_filled(one, at) for one in trained]
    progress.stackplot(at, *rates, colors=COLOURS, alpha=0.35, linewidth=0)
    merged = _filled(series["merged"][0], at)
    progress.plot(at, merged, color=INK, linewidth=1.8)
    label = len(at) // 20  # index at which labels stand
    progress.text(BEGIN_S + 3, 1.08 * max(merged[: 2 * label]), "merged into the model")
    middle = 0.0
    for name, values in zip(names, rates, strict=True):
        words = f"trained by {name}"
        progress.text(BEGIN_S + 3, middle + values[label] / 2, words, color=colours[name], va="center")
        middle += values[label]
    top = 1.35 * max(*merged, *map(sum, zip(*rates, strict=True)))
    progress.set_ylim(0, top)

    _head(silent, "Who is gone?", "seconds since last message")
    for one in series["silent"]:
        silent.plot(*_points(one), color=colours[one["labels"]["learner"]], linewidth=1.8)
    longest = max(_of(series["silent"], victim)["values"])
    silent.axhline(LEASE_S, color=GREY, linestyle=":", linewidth=1)
    silent.text(BEGIN_S + 3, LEASE_S + 0.03 * longest, f"lease: {LEASE_S} s", color=GREY)
    away = [t for t, v in zip(*_points(_of(series["evicted"], victim)), strict=True) if v]
    silent.axvspan(away[0], away[-1], color=colours[victim], alpha=0.10, linewidth=0)
    words = f"{victim} is evicted"
    silent.text((away[0] + away[-1]) / 2, 0.95 * longest, words, color=colours[victim], ha="center")
    silent.set_ylim(0, 1.1 * longest)

    _head(rounds, "Do rounds go on?", "contributions per round")
    rounds.plot(*_points(series["alive"][0]), color=GREY, linestyle="--", linewidth=1.3, drawstyle="steps-post")
    rounds.plot(*_points(series["participants"][0]), color=INK, linewidth=1.8)
    rounds.axhline(quorum, color=GREY, linestyle=":", linewidth=1)
    rounds.text(BEGIN_S + 3, quorum - 0.12, f"quorum: {quorum}", color=GREY, va="top")
    rounds.text(BEGIN_S + 3, 3.12, "dashed: learners alive", color=GREY)
    rounds.set_ylim(0, 3.7)

    _head(alerts, "What has fired?", "")
    shown = [one for one in series["alerts"] if one["at"][-1] >= BEGIN_S]
    rows = sorted({one["labels"]["alertname"] for one in shown}, reverse=True)
    for one in shown:
        at, _ = _points(one)
        name, state = one["labels"]["alertname"], one["labels"]["alertstate"]
        row, width = rows.index(name), at[-1] - at[0] + 2
        alerts.barh(row, width, left=at[0], height=0.8, color=RED if state == "firing" else YELLOW)
        words, colour = f"{name}: {state}", "white" if state == "firing" else INK
        if width > 40:  # else the words have no room
            alerts.text((at[0] + at[-1]) / 2, row, words, ha="center", va="center", color=colour)
    alerts.set_yticks([])
    alerts.set_ylim(-0.6, len(rows) - 0.4)
    alerts.spines["left"].set_visible(False)
    alerts.set_xlabel("seconds of the run")
    alerts.set_xlim(BEGIN_S, found["ended"])

    for axes in panels:
        for when in (found["killed"], found["back"]):
            axes.axvline(when, color=INK, linewidth=1, alpha=0.6)
    for when, words in ((found["killed"], f"{victim}: SIGKILL"), (found["back"], "started again")):
        progress.text(when + 2, 0.96 * top, words, va="top", fontweight="bold", fontsize=9)
    figure.savefig(picture, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _head(axes: Any, title: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(ylabel, fontsize=9)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _of(series: list[dict[str, Any]], learner: str) -> dict[str, Any]:
    return next(one for one in series if one["labels"]["learner"] == learner)


def _filled(one: dict[str, Any], at: list[float]) -> list[float]:
    """Thousands at these times; 0 where there is no value."""
    known = dict(zip(one["at"], one["values"], strict=True))
    return [known.get(t, 0.0) / 1e3 for t in at]


def _points(one: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Times and values from BEGIN_S on."""
    first = next(i for i, t in enumerate(one["at"]) if t >= BEGIN_S)
    return one["at"][first:], one["values"][first:]
