"""A fair comparison: every arm is tuned with equally many trials, on seeds and text that the report does not use.

    trials = 12                   # per arm and number of learners
    tune_versions = 40            # horizon of the trials; without it, each horizon is tuned separately
    tune_seeds = 3                # counted from 1000 on
    report_seeds = 10             # counted from 0 on
    edges = "refuse"              # a best value at the edge of its axis is an error; with "report", only a doubt
    [versions]                    # horizons by number of learners, in units of the H of [base]
    4 = [40, 160]
    8 = [160]
    [base.train]                  # settings of all arms
    batch = 4
    [arms.ours]
    closed = ["train.warmup"]     # axes that end where the possible values end
    [arms.ours.axes]              # settings to tune, and their values; the search begins in the middle
    "train.muon_lr" = [2.5e-3, 5e-3, 1e-2]
    "train.warmup" = [0, 0.1, 0.2]
    "sync.sync_every" = [6, 12, 24, 48]
    [arms.parallel.settings.lab]  # settings of one arm
    method = "data-parallel"

One half of the held-out text selects values, the other gives the reported loss. The first arm is compared with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from diloco_common.errors import ConfigError
from diloco_common.settings import Section, SyncSettings
from diloco_lab.arms import Arm, make_arm, read_toml, validated
from diloco_lab.runner import Gap, Line, gap, selecting

Axes = Mapping[str, Sequence[Any]]
"""Setting -> its possible values: numbers in order, or names."""
Point = tuple[int, ...]
"""An index into each axis."""


def proposals(axes: Axes, tried: Mapping[Point, float], trials: int) -> list[Point]:
    """The points to try next, all at once. Empty: the search is over. `tried`: point -> the loss that selects."""
    if not tried:
        return [tuple((len(values) - 1) // 2 for values in axes.values())]
    best = min(tried, key=lambda point: (tried[point], point))
    for axis in range(len(axes)):
        untried = [point for point in neighbours(axes, best, axis) if point not in tried]
        if untried:
            return untried[: max(0, trials - len(tried))]
    return []


def neighbours(axes: Axes, point: Point, axis: int) -> list[Point]:
    """Neighbors along one axis: the next number on either side, or every other name."""
    values = list(axes.values())[axis]
    others = range(len(values)) if _are_names(values) else (point[axis] + 1, point[axis] - 1)
    return [
        (*point[:axis], other, *point[axis + 1 :])
        for other in others
        if 0 <= other < len(values) and other != point[axis]
    ]


AT_EDGE = "lies at the edge of its axis"


def doubts(axes: Axes, tried: Mapping[Point, float], closed: Sequence[str] = ()) -> list[str]:
    """Why the best point may not be an optimum. Empty: it is one. `closed`: axes that end where possible values end."""
    best = min(tried, key=lambda point: (tried[point], point))
    said = []
    for axis, (setting, values) in enumerate(axes.items()):
        at_edge = len(values) > 1 and not _are_names(values) and best[axis] in (0, len(values) - 1)
        if at_edge and setting not in closed:
            said.append(f"{setting} = {values[best[axis]]} {AT_EDGE}")
        elif any(point not in tried for point in neighbours(axes, best, axis)):
            said.append(f"not all neighbours of {setting} = {values[best[axis]]} were tried")
    return said


def _are_names(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str | bool) for value in values)


FIRST_TUNE_SEED = 1000
Tables = dict[str, dict[str, Any]]
IN_BUDGET = ("train.batch", "model.context")
"""An arm's budget grows with these, so they are set for all arms in `[base]`: all get the same tokens. For H, the
budget always uses the value of `[base]`."""
RunAll = Callable[[Sequence[Arm], Sequence[int]], dict[str, Line]]
"""Runs every arm with every seed, and returns the results by key."""


class ProtocolArm(Section):
    settings: Tables = Field(default_factory=dict)
    axes: dict[str, tuple[Any, ...]] = Field(min_length=1)
    closed: tuple[str, ...] = ()
    """Axes that end where the possible values end, such as from 0 to 1."""

    @model_validator(mode="after")
    def _has_the_budget_of_its_rivals(self) -> Self:
        own = {f"{section}.{key}" for section, table in self.settings.items() for key in table}
        if changed := sorted((own | self.axes.keys()) & set(IN_BUDGET)):
            raise ValueError(f"{changed[0]} of one arm would give it another budget of tokens; set it in [base]")
        return self


class Protocol(Section):
    trials: int = Field(ge=1)
    tune_versions: int | None = Field(default=None, ge=1)
    tune_seeds: int = Field(default=3, ge=1)
    report_seeds: int = Field(ge=1)
    edges: Literal["refuse", "report"] = "refuse"
    """What to do if the best value lies at the edge of its axis, so that a better one may lie beyond."""
    versions: dict[int, tuple[int, ...]] = Field(default={4: (160,)}, min_length=1)
    """Number of learners -> horizons, in versions at the H of `[base]`."""
    base: Tables = Field(default_factory=dict)
    arms: dict[str, ProtocolArm] = Field(min_length=2)

    def arm(self, name: str, learners: int, versions: int, values: Mapping[str, Any]) -> Arm:
        """An arm with these values for its axes. Raises ConfigError."""
        content = {key: dict(table) for key, table in self.base.items()}
        for key, table in self.arms[name].settings.items():
            content.setdefault(key, {}).update(table)
        for path, value in values.items():
            section, _, key = path.partition(".")
            content.setdefault(section, {})[key] = value
        content.setdefault("lab", {})["learners"] = learners
        settings = make_arm(name, content).settings
        own, sync = settings.sync.first_every, validated(SyncSettings, self.base.get("sync", {}), name, "sync")
        steps = versions * sync.first_every
        if steps % own:
            raise ConfigError(
                f"{name}: with H = {own}, {steps} inner steps are not a whole number of rounds. All arms must train on "
                f"equally many tokens: take an H that divides {steps}"
            )
        tokens = steps * learners * settings.train.batch * settings.model.context
        content["run"] = {**content.get("run", {}), "tokens": tokens}
        return make_arm(name, content)

    def values(self, name: str, point: Point) -> dict[str, Any]:
        return {path: of[i] for (path, of), i in zip(self.arms[name].axes.items(), point, strict=True)}


@dataclass(frozen=True)
class Tuned:
    """The best values found for an arm."""

    values: Mapping[str, Any]
    trials: int
    diverged: int
    doubts: Sequence[str]
    """Why they may not be an optimum."""


@dataclass(frozen=True)
class Cell:
    """A group of rows in the report: all arms at one number of learners and one horizon."""

    learners: int
    versions: int
    tuned: Mapping[str, Tuned]
    arms: Mapping[str, Arm]


def load_protocol(path: Path) -> Protocol:
    """Raises ConfigError."""
    return validated(Protocol, read_toml(path), str(path))


def carry_out(protocol: Protocol, run_all: RunAll) -> Iterator[tuple[list[Cell], dict[str, Line]]]:
    """Tune, then report. Yields everything found so far after every number of learners.

    Raises ConfigError if a best value lies at the edge of its axis, or an H gives an arm a different number of tokens.
    """
    _check_budgets(protocol)
    cells: list[Cell] = []
    lines: dict[str, Line] = {}
    for learners, horizons in protocol.versions.items():
        for versions in horizons:
            tuned = _tune(protocol, learners, protocol.tune_versions or versions, run_all)
            arms = {name: protocol.arm(name, learners, versions, found.values) for name, found in tuned.items()}
            cells.append(Cell(learners, versions, tuned, arms))
        if protocol.edges == "refuse" and (found := _at_edges(cells)):
            raise ConfigError(
                f"{'; '.join(found)}. A better value may lie beyond: add values there, and run the command again with "
                'the same --out, which keeps finished runs. With edges = "report" it goes on, and the page says so'
            )
        mine = [arm for cell in cells if cell.learners == learners for arm in cell.arms.values()]
        lines |= run_all(mine, range(protocol.report_seeds))
        yield cells, lines


def _check_budgets(protocol: Protocol) -> None:
    """Check before anything runs. Raises ConfigError."""
    for learners, horizons in protocol.versions.items():
        for name, arm in protocol.arms.items():
            for every in arm.axes.get("sync.sync_every", ()):
                for versions in filter(None, (protocol.tune_versions, *horizons)):
                    protocol.arm(name, learners, versions, {"sync.sync_every": every})


def _at_edges(cells: Sequence[Cell]) -> list[str]:
    return [
        f"{name}, {cell.learners} learners, {cell.versions} versions: {doubt}"
        for cell in cells
        for name, tuned in cell.tuned.items()
        for doubt in tuned.doubts
        if doubt.endswith(AT_EDGE)
    ]


def _tune(protocol: Protocol, learners: int, versions: int, run_all: RunAll) -> dict[str, Tuned]:
    seeds = range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + protocol.tune_seeds)
    tried: dict[str, dict[Point, float]] = {name: {} for name in protocol.arms}
    diverged = dict.fromkeys(protocol.arms, 0)
    while True:
        wanted = {
            (name, point): protocol.arm(name, learners, versions, protocol.values(name, point))
            for name, arm in protocol.arms.items()
            for point in proposals(arm.axes, tried[name], protocol.trials)
        }
        if not wanted:
            break
        lines = run_all(list(wanted.values()), seeds)
        for (name, point), arm in wanted.items():
            of = [lines[arm.key(seed)] for seed in seeds]
            tried[name][point] = fmean(map(selecting, of))
            diverged[name] += sum(bool(line["result"]["diverged"]) for line in of)
    return {
        name: Tuned(
            protocol.values(name, min(of, key=lambda point: (of[point], point))), len(of), diverged[name],
            doubts(protocol.arms[name].axes, of, protocol.arms[name].closed),
        )
        for name, of in tried.items()
    }  # fmt: skip


Lines = Mapping[str, Line]


def page(cells: Sequence[Cell], lines: Lines) -> str:
    """All tables, as markdown."""
    parts = [gaps(cells, lines), "What was tuned, and how:", _tuned(cells)]
    return "\n\n".join(parts) + "\n"


def seeds_of(cell: Cell, lines: Lines, names: Sequence[str]) -> list[int]:
    """The seeds with which all of these arms were run."""
    seeds = sorted({line["seed"] for line in lines.values()})
    return [seed for seed in seeds if all(cell.arms[name].key(seed) in lines for name in names)]


def gap_to(cell: Cell, lines: Lines, name: str, base: str) -> Gap | None:
    """The paired gap over the seeds with which neither arm diverged. None: there are no such seeds."""
    return gap(cell.arms[name], cell.arms[base], seeds_of(cell, lines, (name, base)), lines)


def multiplier(cells: Sequence[Cell], lines: Lines, cell: Cell, name: str, base: str) -> str:
    """The arm's tokens over those that `base` needs to reach the arm's loss. Interpolates between the horizons of
    `base`, linearly in the log of tokens. Uses the seeds for which the arm and all horizons of `base` have results."""
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
    """Results by seed."""
    return {seed: lines[cell.arms[name].key(seed)]["result"] for seed in seeds_of(cell, lines, [name])}


def _losses(cell: Cell, lines: Lines, name: str) -> dict[int, float]:
    """Losses by seed, without diverged runs."""
    return {seed: result["loss"] for seed, result in _results(cell, lines, name).items() if not result["diverged"]}


def _diverged(cell: Cell, lines: Lines, name: str) -> str:
    found = _results(cell, lines, name)
    return f"{sum(bool(result['diverged']) for result in found.values())} of {len(found)}"
