"""The honest comparison: every arm is tuned with as many trials, on seeds and text that the report does not use.

    trials = 7                    # per arm and number of learners
    tune_versions = 40            # horizon of the trials; without it, every horizon is tuned for itself
    tune_seeds = 1                # counted from 1000 on
    report_seeds = 10             # counted from 0 on
    [versions]                    # horizons, by the number of learners
    4 = [40, 160]
    8 = [160]
    [base.train]                  # settings of all arms
    batch = 4
    [arms.ours.axes]              # what is tuned, and the values; the search begins in the middle
    "train.muon_lr" = [2.5e-3, 5e-3, 1e-2]
    [arms.parallel.settings.lab]  # settings of one arm
    method = "data-parallel"

Selects by one half of the held-out text, and reports the other. The arms after the first are what it is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from diloco_common.settings import Section
from diloco_lab.arms import Arm, make_arm
from diloco_lab.given import read_toml, validated
from diloco_lab.report import selecting
from diloco_lab.runner import Line
from diloco_lab.search import Point, doubts, proposals

FIRST_TUNE_SEED = 1000
Tables = dict[str, dict[str, Any]]
IN_BUDGET = ("sync.sync_every", "train.batch", "model.context")
"""What the budget of an arm grows with: for all arms in `[base]`, or they would not have the same tokens."""
RunAll = Callable[[Sequence[Arm], Sequence[int]], dict[str, Line]]
"""Runs every arm with every seed, and gives the results by key."""


class ProtocolArm(Section):
    """One arm, and what of it is tuned."""

    settings: Tables = Field(default_factory=dict)
    axes: dict[str, tuple[Any, ...]] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_the_budget_of_its_rivals(self) -> Self:
        own = {f"{section}.{key}" for section, table in self.settings.items() for key in table}
        if changed := sorted((own | self.axes.keys()) & set(IN_BUDGET)):
            raise ValueError(f"{changed[0]} of one arm would give it another budget of tokens; set it in [base]")
        return self


class Protocol(Section):
    """A file of the protocol."""

    trials: int = Field(ge=1)
    tune_versions: int | None = Field(default=None, ge=1)
    tune_seeds: int = Field(default=1, ge=1)
    report_seeds: int = Field(ge=1)
    versions: dict[int, tuple[int, ...]] = Field(default={4: (160,)}, min_length=1)
    """Horizons, by the number of learners."""
    base: Tables = Field(default_factory=dict)
    arms: dict[str, ProtocolArm] = Field(min_length=2)

    def arm(self, name: str, learners: int, versions: int, values: Mapping[str, Any]) -> Arm:
        """With these values for its axes. Raises ConfigError."""
        content = {key: dict(table) for key, table in self.base.items()}
        for key, table in self.arms[name].settings.items():
            content.setdefault(key, {}).update(table)
        for path, value in values.items():
            section, _, key = path.partition(".")
            content.setdefault(section, {})[key] = value
        content.setdefault("lab", {})["learners"] = learners
        settings = make_arm(name, content).settings
        tokens = versions * settings.sync.sync_every * learners * settings.train.batch * settings.model.context
        content["run"] = {**content.get("run", {}), "tokens": tokens}
        return make_arm(name, content)

    def values(self, name: str, point: Point) -> dict[str, Any]:
        """Of a point on the axes."""
        return {path: of[i] for (path, of), i in zip(self.arms[name].axes.items(), point, strict=True)}


@dataclass(frozen=True)
class Tuned:
    """What the search found for an arm."""

    values: Mapping[str, Any]
    trials: int
    diverged: int
    doubts: Sequence[str]
    """Why it may be no optimum."""


@dataclass(frozen=True)
class Cell:
    """What is reported together: the arms at one number of learners and one horizon."""

    learners: int
    versions: int
    tuned: Mapping[str, Tuned]
    arms: Mapping[str, Arm]


def load_protocol(path: Path) -> Protocol:
    """Raises ConfigError."""
    return validated(Protocol, read_toml(path), str(path))


def carry_out(protocol: Protocol, run_all: RunAll) -> Iterator[tuple[list[Cell], dict[str, Line]]]:
    """Tune, then report seed by seed. Gives what there is after every seed: a run of hours may be stopped at any."""
    cells: list[Cell] = []
    lines: dict[str, Line] = {}
    for learners, horizons in protocol.versions.items():
        for versions in horizons:
            tuned = _tune(protocol, learners, protocol.tune_versions or versions, run_all)
            arms = {name: protocol.arm(name, learners, versions, found.values) for name, found in tuned.items()}
            cells.append(Cell(learners, versions, tuned, arms))
        for seed in range(protocol.report_seeds):
            mine = [arm for cell in cells if cell.learners == learners for arm in cell.arms.values()]
            lines |= run_all(mine, [seed])
            yield cells, lines


def carried_out(protocol: Protocol, lines: Mapping[str, Line]) -> tuple[list[Cell], dict[str, Line]]:
    """What of it is in these results, without running anything: the numbers of learners that are tuned to the end,
    and of their reports what there is."""
    found: tuple[list[Cell], dict[str, Line]] = [], {}
    with suppress(_NotRunError):
        for found in carry_out(protocol, partial(_recorded, lines)):  # noqa: B007 the last one counts
            pass
    return found


class _NotRunError(Exception):
    """A trial is not on record, so what would be tried after it is not known."""


class _Recorded(dict[str, Line]):
    def __missing__(self, key: str) -> Line:
        raise _NotRunError(key)


def _recorded(lines: Mapping[str, Line], arms: Sequence[Arm], seeds: Sequence[int]) -> _Recorded:
    """In the place of running them: what there is. Raises _NotRunError when it is asked for another."""
    keys = [arm.key(seed) for arm in arms for seed in seeds]
    return _Recorded((key, lines[key]) for key in keys if key in lines)


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
            doubts(protocol.arms[name].axes, of),
        )
        for name, of in tried.items()
    }  # fmt: skip
