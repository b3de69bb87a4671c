"""`diloco chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.options import NO_SETTINGS, Flag, SettingsOptions, number, setting, settings_from

_MINUTES = number(float, 0.01, 10_000.0, "minutes, from 0.01 to 10000")
_SECONDS = number(quantities.seconds, 0.1, 10_000.0, "seconds, from 0.1 to 10000, such as 5s")
_SHARE = number(float, 0.0, 0.9, "a share, from 0 to 0.9")
_COUNT = number(quantities.count, 0, 1000, "a number, from 0 to 1000")


def chaos(
    *,
    minutes: Annotated[float, Parameter(converter=_MINUTES, metavar="M", help="length of each run")] = 1.0,
    every: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="time between two faults")] = 5.0,
    shards: Annotated[str | None, setting("cluster.shards", "N", "parameter-server processes")] = None,
    workers: Annotated[str | None, setting("cluster.workers", "N", "learners", default=8)] = None,
    seed: Annotated[
        str | None, setting("run.seed", "N", "of the plan, the initial weights and the order of the data")
    ] = None,
    dead: Annotated[
        float,
        Parameter(converter=_SHARE, metavar="SHARE", help="share of time for which workers are dead or frozen"),
    ] = 0.2,
    gap: Annotated[
        float,
        Parameter(converter=_SECONDS, metavar="3s", help="longest time that a living worker may go without a step"),
    ] = 3.0,
    hostile: Annotated[
        int,
        Parameter(converter=_COUNT, metavar="N", help="so many workers are hostile: they lie, replay and flood"),
    ] = 0,
    disk_full: Annotated[Flag, Parameter(help="fill the disks of shards too (needs root)")] = False,
    json: Annotated[Path | None, Parameter(metavar="FILE.json", help="write the result here")] = None,
    timeline: Annotated[Path | None, Parameter(metavar="FILE.png|svg", help="draw a timeline of the run")] = None,
    baseline: Annotated[
        Path | None, Parameter(metavar="FILE.json", help="use the fault-free run of an earlier --json")
    ] = None,
    no_baseline: Annotated[Flag, Parameter(help="no fault-free run: half the time, but no goodput")] = False,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder for histories and logs", default="runs/chaos")
    ] = None,
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Run a cluster on this machine without faults. Then run one, and kill and freeze its workers and shards by a
    seeded plan. Every process records its history. The histories show how much work got through, and whether any was
    lost or counted twice. Exit code 1 if a promise was broken.
    """
    from diloco_deploy.chaos.comparison import DEFAULTS, Chaos, run_chaos

    flags = {"cluster.shards": shards, "cluster.workers": workers, "cluster.folder": folder, "run.seed": seed}
    settings = settings_from(options, flags, defaults=DEFAULTS).for_built_in()
    return run_chaos(
        settings,
        Chaos(
            seconds=60.0 * minutes, every_s=every, dead_share=dead, gap_max_s=gap, disk_full=disk_full, json=json,
            timeline=timeline, baseline=baseline, compared=not no_baseline, hostile=int(hostile),
        ),
    )  # fmt: skip
