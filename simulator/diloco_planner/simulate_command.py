"""`diloco simulate`: its flags and its output. Imports no torch before it runs, so help is fast."""

from __future__ import annotations

import sys
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.errors import ConfigError
from diloco_common.options import NO_SETTINGS, Json, number, refuse_idle, settings_from

_CHIPS = number(quantities.count, 1, 1e9, "a number of chips, such as 4096 or 1.2e6")
_PARAMS = number(quantities.count, 1, 1e14, "a number of parameters, such as 125M, 70B or 5e9")
_LEARNERS = number(quantities.count, 1, 10_000, "a whole number from 1 to 10,000")
_WHOLE = number(quantities.count, 1, 4096, "a whole number from 1 to 4096")
_TIME = number(quantities.seconds, 1e-4, 1e11, "a time, such as 1y, 90d or 3h")
_STEP = number(quantities.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")
_HOURS = number(float, 0.001, 100_000.0, "hours, from 0.001")
CHIPS, LEARNERS, STEP_S = 1_200_000, 8, 1.0
_Encoding = Literal["float32", "bfloat16", "int8", "int4"]
_LINKS = Parameter(metavar="FILE.toml", help="sites, links, failures, shards and prices (docs/planner.md)")
_MTBI = Parameter(
    converter=_TIME, metavar="1y", help="mean time between interruptions of one chip", show_default="of --failures"
)


def simulate(
    *,
    chips: Annotated[
        int | None,
        Parameter(converter=_CHIPS, metavar="N", help="of all learners together", show_default=f"{CHIPS:,}"),
    ] = None,
    learners: Annotated[
        int | None, Parameter(converter=_LEARNERS, metavar="L", help="learners", show_default=str(LEARNERS))
    ] = None,
    mtbi: Annotated[float | None, _MTBI] = None,
    failures: Annotated[
        Literal["paper", "fleet", "poor-cloud"] | None,
        Parameter(
            help="how chips fail: once a year, as large fleets report, as a poor cloud. Values of a file stay",
            show_default="paper, or that of the file",
        ),
    ] = None,
    hours: Annotated[float, Parameter(converter=_HOURS, metavar="HOURS", help="simulated")] = 24.0,
    params: Annotated[int, Parameter(converter=_PARAMS, metavar="5e9", help="of the model")] = 5_000_000_000,
    step_time: Annotated[
        float | None,
        Parameter(converter=_STEP, metavar="1s", help="of one inner step", show_default=f"{STEP_S:g}s"),
    ] = None,
    h: Annotated[int, Parameter(converter=_WHOLE, metavar="H", help="inner steps between two rounds")] = 24,
    fragments: Annotated[int, Parameter(converter=_WHOLE, metavar="P", help="fragments")] = 24,
    quorum: Annotated[str, Parameter(metavar="K", help="contributions that let a round close, or all")] = "1",
    grace: Annotated[str, Parameter(metavar="SECONDS", help="a round stays open for, or adaptive")] = "adaptive",
    push: Annotated[_Encoding, Parameter(help="encoding of contributions")] = "int8",
    pull: Annotated[Literal["float32", "bfloat16", "int8", "int4"], Parameter(help="of versions")] = "bfloat16",
    links: Annotated[Path | None, _LINKS] = None,
    seed: Annotated[int, Parameter(metavar="SEED", help="of everything that is drawn")] = 0,
    json: Json = False,
) -> int:
    """Simulate a run on so many chips: what its failures cost, what the cores decide, and what other ways of training
    would have come to. One simulated day of a million chips takes a quarter of a minute.
    """
    import torch

    from diloco_planner.chips import Island
    from diloco_planner.described import Described, read
    from diloco_planner.effort import refuse_endless
    from diloco_planner.plans import LearnerPlan
    from diloco_planner.report import SimulationProgress, as_json, as_text
    from diloco_planner.run import Run

    torch.set_num_threads(1)
    described = Described() if links is None else read(links)
    given = {"--learners": learners, "--chips": chips, "--step-time": step_time, "--mtbi": mtbi}
    refuse_idle(given, described.idle)
    template = LearnerPlan("", Island(1), described.failures(failures, mtbi), step_time or STEP_S)
    plans = described.learners(template, chips or CHIPS, learners or LEARNERS)
    flags: dict[str, object] = {
        "sync.fragments": fragments, "sync.sync_every": h, "sync.quorum": quorum, "sync.grace": grace,
        "sync.push": push, "sync.pull": pull,
    }  # fmt: skip
    settings = settings_from(NO_SETTINGS, flags, {})
    refuse_endless(settings.sync, plans, described.shards, 3600 * hours)
    late = max(plans, key=lambda plan: plan.begins_s)
    if late.begins_s >= 3600 * hours:
        raise ConfigError(
            f"{late.name} begins after {late.begins_s / 3600:g} hours, and {hours:g} are simulated; "
            "ask for more --hours"
        )
    if described.price_shard_hour and described.shards.count is None:
        raise ConfigError(
            f"{links}: shards have a price, and nobody says how many there are; write count = 2 in [shards] "
            "(`diloco plan --sites` proposes a number)"
        )
    if (described.shards.count or 1) > settings.sync.fragments:
        raise ConfigError(
            f"{links}: {described.shards.count} shards are too many for {fragments} fragments: each has to own one; "
            "ask for more --fragments, or write a smaller count"
        )
    most = settings.sync.quorum
    if most != "all" and most > len(plans):
        raise ConfigError(f"--quorum {quorum}: there are {len(plans)} learners; ask for so many at most, or for all")
    told = SimulationProgress(3600 * hours, partial(print, file=sys.stderr, flush=True))
    found = Run(settings, params, tuple(plans), described, hours, seed).carry_out(told)
    print(dumps(as_json(found), indent=2) if json else as_text(found))
    return 0
