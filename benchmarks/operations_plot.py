"""docs/operations.png: a worker that is killed and comes back, as Prometheus saw it, in the order to look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"worker-0": "#1f6fb4", "worker-1": "#e07b1a", "worker-2": "#2c9150"}
GREY, INK, YELLOW, RED = "#777777", "#222222", "#f2c14e", "#c8372d"
BEGIN_S = 22
"""Rates look back 20 s: before, they are still growing."""
LEASE_S, QUORUM = 6, 2
"""As the run was set."""


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw what `operations.py` measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = found["series"]
    figure, panels = plt.subplots(
        4, 1, figsize=(10, 8.6), sharex=True, layout="constrained", height_ratios=[3, 2.4, 2.4, 0.8]
    )
    progress, silent, rounds, alerts = panels

    _head(progress, "Is it making progress?", "thousand tokens per second")
    learners = [_points(one) for one in series["trained"]]
    names = [one["labels"]["learner"] for one in series["trained"]]
    progress.stackplot(
        learners[0][0], *[[v / 1e3 for v in values] for _, values in learners],
        colors=[COLOURS[name] for name in names], alpha=0.35, linewidth=0,
    )  # fmt: skip
    at, merged = _points(series["merged"][0])
    progress.plot(at, [v / 1e3 for v in merged], color=INK, linewidth=1.8)
    progress.annotate("merged into the model", (at[10], merged[10] / 1e3), xytext=(0, 9), textcoords="offset points")
    middle = 0.0
    for name, (_, values) in zip(names, learners, strict=True):
        progress.text(BEGIN_S + 3, middle + values[12] / 2e3, f"trained by {name}", color=COLOURS[name], va="center")
        middle += values[12] / 1e3
    progress.set_ylim(0, 23)

    _head(silent, "Who is gone?", "seconds since last message")
    for one in series["silent"]:
        name = one["labels"]["learner"]
        silent.plot(*_points(one), color=COLOURS[name], linewidth=1.8)
    silent.axhline(LEASE_S, color=GREY, linestyle=":", linewidth=1)
    silent.text(BEGIN_S + 3, LEASE_S + 4, f"lease: {LEASE_S} s", color=GREY)
    away = [t for t, v in zip(*_points(_of(series["evicted"], "worker-1")), strict=True) if v]
    silent.axvspan(away[0], away[-1], color=COLOURS["worker-1"], alpha=0.10, linewidth=0)
    silent.text((away[0] + away[-1]) / 2, 138, "worker-1 is evicted", color=COLOURS["worker-1"], ha="center")
    silent.set_ylim(0, 160)

    _head(rounds, "Do rounds go on?", "contributions per round")
    rounds.plot(*_points(series["alive"][0]), color=GREY, linestyle="--", linewidth=1.3, drawstyle="steps-post")
    rounds.plot(*_points(series["participants"][0]), color=INK, linewidth=1.8)
    rounds.axhline(QUORUM, color=GREY, linestyle=":", linewidth=1)
    rounds.text(BEGIN_S + 3, QUORUM - 0.12, f"quorum: {QUORUM}", color=GREY, va="top")
    rounds.text(BEGIN_S + 3, 3.12, "dashed: learners alive", color=GREY)
    rounds.set_ylim(0, 3.7)

    _head(alerts, "What has fired?", "")
    for one in series["alerts"]:
        at, _ = _points(one)
        state = one["labels"]["alertstate"]
        alerts.barh(0, at[-1] - at[0] + 2, left=at[0], height=0.8, color=RED if state == "firing" else YELLOW)
        words, colour = f"{one['labels']['alertname']}: {state}", "white" if state == "firing" else INK
        alerts.text((at[0] + at[-1]) / 2, 0, words, ha="center", va="center", color=colour)
    alerts.set_yticks([])
    alerts.set_ylim(-0.6, 0.6)
    alerts.spines["left"].set_visible(False)
    alerts.set_xlabel("seconds of the run")
    alerts.set_xlim(BEGIN_S, found["ended"])

    for axes in panels:
        for when in (found["killed"], found["back"]):
            axes.axvline(when, color=INK, linewidth=1, alpha=0.6)
    for when, words in ((found["killed"], "worker-1: SIGKILL"), (found["back"], "started again")):
        progress.text(when + 2, 22.2, words, va="top", fontweight="bold", fontsize=9)
    figure.savefig(picture, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _head(axes: Any, title: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(ylabel, fontsize=9)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _of(series: list[dict[str, Any]], learner: str) -> dict[str, Any]:
    return next(one for one in series if one["labels"]["learner"] == learner)


def _points(one: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Times and values from BEGIN_S on."""
    first = next(i for i, t in enumerate(one["at"]) if t >= BEGIN_S)
    return one["at"][first:], one["values"][first:]
