"""The commands of this distribution, which `diloco` finds here (`diloco_common/command.py`), and `diloco lab` itself.

No command imports torch before it runs, so help is fast.
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from diloco_common import units
from diloco_common.command import STUDY, Command, check_outputs, new_app
from diloco_common.errors import EXIT_OK, ConfigError
from diloco_common.options import number

COMMANDS = (
    Command(
        "plan", "diloco_planner.plan_command:plan",
        "settings and sizes of a run, from its model, learners and links", STUDY,
    ),
    Command(
        "simulate", "diloco_planner.simulate_command:simulate",
        "a run on up to a million chips that fail: goodput, rounds, bytes", STUDY,
    ),
    Command(
        "lab", "diloco_lab.commands:app",
        "compare rules and settings by what they learn: production cores in one process, virtual time", STUDY,
    ),
)  # fmt: skip


app = new_app("lab", "Compare rules and settings by what they learn: production cores in one process, virtual time.")


_FROM_1 = number(units.whole, 1, 10**6, "a number from 1")


@Parameter(name="*")
@dataclass(frozen=True)
class ResultsOptions:
    """How many runs to do at once, and where their results go."""

    jobs: Annotated[int, Parameter(converter=_FROM_1, metavar="N", help="runs at once, a core each")] = 1
    out: Annotated[
        Path, Parameter(metavar="FILE", help="results as JSON lines; runs that it holds are not repeated")
    ] = Path("runs/lab/results.jsonl")


@Parameter(name="*")
@dataclass(frozen=True)
class LabOptions:
    """Options of both `compare` and `sweep`."""

    seeds: Annotated[int, Parameter(converter=_FROM_1, metavar="N", help="seeds per arm")] = 2
    first_seed: Annotated[int, Parameter(metavar="SEED", help="the other seeds follow it")] = 0
    model: Annotated[
        str, Parameter(metavar="PKG.MOD:BUILD", help="a model of your own (docs/lab.md)", show_default=False)
    ] = ""

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


@app.command(help="run arms over the same seeds, and show their paired gaps")
def compare(
    arms: Annotated[list[Path], Parameter(metavar="ARM.toml", help="others are compared with the first")],
    /,
    *,
    options: LabOptions = LabOptions(),
    results: ResultsOptions = ResultsOptions(),
) -> int:
    from diloco_lab.arms import load_arm
    from diloco_lab.runner import comparison, run_all

    seeds = options.all_seeds
    chosen = [load_arm(path, options.model) for path in arms]
    check_outputs(results.out)
    lines = run_all(chosen, seeds, results.out, results.jobs, tell)
    print("\n" + comparison(chosen, seeds, lines))
    return EXIT_OK


@app.command(help="run an arm with all combinations of values, and rank them")
def sweep(
    arm: Annotated[Path, Parameter(metavar="ARM.toml")],
    /,
    *,
    grid: Annotated[list[str], Parameter(metavar="SETTING=A,B,...", help="such as train.lr=1e-3,2e-3,4e-3")],
    options: LabOptions = LabOptions(),
    results: ResultsOptions = ResultsOptions(),
) -> int:
    from diloco_lab.arms import load_arm
    from diloco_lab.runner import ranking, run_all

    seeds, base, axes = options.all_seeds, load_arm(arm, options.model), dict(map(_axis, grid))
    values: list[dict[str, Any]] = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    arms = []
    for point in values:
        tried = base
        for name, value in point.items():
            tried = tried.with_value(name, value)
        arms.append(tried)
    check_outputs(results.out)
    lines = run_all(arms, seeds, results.out, results.jobs, tell)
    print("\n" + ranking(arms, values, seeds, lines))
    return EXIT_OK


@app.command(help="tune all arms in the same way, then compare them")
def protocol(
    file: Annotated[Path, Parameter(metavar="PROTOCOL.toml")],
    /,
    *,
    results: ResultsOptions = ResultsOptions(),
    page: Annotated[
        Path | None, Parameter(metavar="FILE", help="the tables in markdown, rewritten as results arrive")
    ] = None,
) -> int:
    """Run the missing parts of a protocol. The page is rewritten after every number of learners."""
    from diloco_lab.protocol import carry_out, load_protocol
    from diloco_lab.protocol import page as tables
    from diloco_lab.runner import run_all

    check_outputs(results.out, page)
    text = ""
    run_missing = partial(run_all, path=results.out, jobs=results.jobs, say=tell)
    for cells, lines in carry_out(load_protocol(file), run_missing):
        text = tables(cells, lines)
        if page is not None:
            page.write_text(text)
    tell("\n" + text)
    return EXIT_OK


def tell(text: str) -> None:
    print(text, flush=True)


def _axis(text: str) -> tuple[str, list[Any]]:
    """A setting and its values. Raises ConfigError."""
    path, equals, values = text.partition("=")
    if not equals or "." not in path:
        raise ConfigError(f"--grid {text!r} is not of the form section.setting=A,B,...")
    return path, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
