"""The command line of `diloco lab`. Imports no torch before it runs, so help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app

app = new_app("lab", "Compare rules and settings by what they learn: production cores in one process, virtual time.")


@Parameter(name="*")
@dataclass(frozen=True)
class LabOptions:
    """What both commands take."""

    seeds: Annotated[int, Parameter(metavar="N", help="seeds per arm")] = 2
    first_seed: Annotated[int, Parameter(metavar="SEED", help="the others follow")] = 0
    jobs: Annotated[int, Parameter(metavar="N", help="runs at once, a core each")] = 1
    model: Annotated[
        str, Parameter(metavar="PKG.MOD:BUILD", help="a model of your own (docs/lab.md)", show_default=False)
    ] = ""
    out: Annotated[
        Path, Parameter(metavar="FILE", help="results as JSON lines; runs that it holds are not repeated")
    ] = Path("runs/lab/results.jsonl")
    csv: Annotated[Path | None, Parameter(metavar="FILE", help="one row per run")] = None
    track: Annotated[
        str, Parameter(metavar="TRACKER", help="tensorboard:DIR, wandb:PROJECT or csv:FILE", show_default=False)
    ] = ""


@app.command(help="run arms over the same seeds, and show their paired gaps")
def compare(
    arms: Annotated[list[Path], Parameter(metavar="ARM.toml", help="the first is what others are held to")],
    /,
    *,
    plot: Annotated[Path | None, Parameter(metavar="FILE", help="losses, and paired gaps with intervals (PNG)")] = None,
    options: LabOptions = LabOptions(),
) -> int:
    """Run arms over the same seeds, and show their paired gaps."""
    from diloco_lab.commands import compare

    return compare(arms, options, plot)


@app.command(help="run an arm with all combinations of values, and rank them")
def sweep(
    arm: Annotated[Path, Parameter(metavar="ARM.toml")],
    /,
    *,
    grid: Annotated[list[str], Parameter(metavar="SETTING=A,B,...", help="such as train.lr=1e-3,2e-3,4e-3")],
    options: LabOptions = LabOptions(),
) -> int:
    """Run an arm with all combinations of values, and rank them."""
    from diloco_lab.commands import sweep

    return sweep(arm, grid, options)


@app.command(help="tune all arms alike, then hold them against each other")
def protocol(
    file: Annotated[Path, Parameter(metavar="PROTOCOL.toml")],
    /,
    *,
    jobs: Annotated[int, Parameter(metavar="N", help="runs at once, a core each")] = 1,
    out: Annotated[
        Path, Parameter(metavar="FILE", help="results as JSON lines; runs that it holds are not repeated")
    ] = Path("runs/lab/results.jsonl"),
    page: Annotated[
        Path | None, Parameter(metavar="FILE", help="the tables in markdown, anew after every seed")
    ] = None,
    track: Annotated[
        str, Parameter(metavar="TRACKER", help="tensorboard:DIR, wandb:PROJECT or csv:FILE", show_default=False)
    ] = "",
) -> int:
    """Tune all arms alike, then hold them against each other."""
    from diloco_lab.commands import tell
    from diloco_lab.protocol_command import protocol

    return protocol(file, out, jobs, page, track, tell)
