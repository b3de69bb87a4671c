"""What `diloco lab` does."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_common.command import check_outputs
from diloco_common.errors import EXIT_OK, ConfigError
from diloco_lab.arms import load_arm
from diloco_lab.cli import LabOptions
from diloco_lab.report import comparison, draw, ranking, write_csv
from diloco_lab.runner import run_all


def compare(paths: Sequence[Path], options: LabOptions, plot: Path | None) -> int:
    """Run `diloco lab compare`. Raises ConfigError."""
    seeds = _seeds(options)
    arms = [load_arm(path, options.model) for path in paths]
    check_outputs(options.out, options.csv, plot)
    lines = run_all(arms, seeds, options.out, options.jobs, tell, options.track)
    print("\n" + comparison(arms, seeds, lines))
    if options.csv is not None:
        write_csv(options.csv, lines)
    if plot is not None:
        draw(plot, arms, seeds, lines)
    return EXIT_OK


def sweep(path: Path, axes: Sequence[str], options: LabOptions) -> int:
    """Run `diloco lab sweep`. Raises ConfigError."""
    seeds, base, grid = _seeds(options), load_arm(path, options.model), dict(map(_axis, axes))
    values: list[dict[str, Any]] = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    arms = []
    for point in values:
        arm = base
        for name, value in point.items():
            arm = arm.with_value(name, value)
        arms.append(arm)
    check_outputs(options.out, options.csv)
    lines = run_all(arms, seeds, options.out, options.jobs, tell, options.track)
    print("\n" + ranking(arms, values, seeds, lines))
    if options.csv is not None:
        write_csv(options.csv, lines)
    return EXIT_OK


def _seeds(options: LabOptions) -> range:
    """Raises ConfigError."""
    if options.seeds < 1 or options.jobs < 1:
        raise ConfigError("--seeds and --jobs take a number from 1")
    return range(options.first_seed, options.first_seed + options.seeds)


def tell(text: str) -> None:
    print(text, flush=True)


def _axis(text: str) -> tuple[str, list[Any]]:
    """A setting and the values that it takes. Raises ConfigError."""
    path, equals, values = text.partition("=")
    if not equals or "." not in path:
        raise ConfigError(f"--grid {text!r} is not of the form section.setting=A,B,...")
    return path, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
