"""`diloco simulate`: one question to the planner, and its whole answer: the run of the cores, and other ways.

Imports no torch before it runs, so help is fast.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from diloco_common import units
from diloco_common.errors import ConfigError
from diloco_common.formulas import BITS
from diloco_common.options import NO_SETTINGS, Json, number, refuse_idle, settings_from
from diloco_common.settings import Settings
from diloco_common.wire.calls import SAY_EVERY_S
from diloco_planner.chips import Island
from diloco_planner.choice import DEFAULTS, EVERY, FRAGMENTS, FULL
from diloco_planner.described import Described, read
from diloco_planner.plans import LEARNERS, LearnerPlan, RunOutcome, ShardPlan, refuse_restless
from diloco_planner.proposed import Sent, baselines

_CHIPS = number(units.whole, 1, 1e9, "a number of chips, such as 4096 or 1.2e6")
_PARAMS = number(units.whole, 1, 1e14, "a number of parameters, such as 125M, 70B or 5e9")
_LEARNERS = number(units.whole, 1, 10_000, "a whole number from 1 to 10,000")
_WHOLE = number(units.whole, 1, 4096, "a whole number from 1 to 4096")
_TIME = number(units.seconds, 1e-4, 1e11, "a time, such as 1y, 90d or 3h")
_STEP = number(units.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")
_HOURS = number(float, 0.001, 100_000.0, "hours, from 0.001")
_Encoding = Literal["float32", "bfloat16", "int8", "int4"]


@Parameter(name="*")
@dataclass(frozen=True)
class FleetOptions:
    """Learners with their chips, and how these fail."""

    chips: Annotated[int | None, Parameter(converter=_CHIPS, metavar="N", help="of all learners together")] = None
    learners: Annotated[
        int | None, Parameter(converter=_LEARNERS, metavar="L", help="learners", show_default=str(LEARNERS))
    ] = None
    mtbi: Annotated[
        float | None,
        Parameter(
            converter=_TIME, metavar="1y", help="mean time between interruptions of one chip",
            show_default="of --failures",
        ),
    ] = None  # fmt: skip
    failures: Annotated[
        Literal["paper", "fleet", "poor-cloud"] | None,
        Parameter(
            help="how chips fail: once a year, as large fleets report, as a poor cloud. Values of a file stay",
            show_default="paper, or that of the file",
        ),
    ] = None
    step_time: Annotated[
        float | None, Parameter(converter=_STEP, metavar="1s", help="of one inner step", show_default="1s")
    ] = None
    links: Annotated[
        Path | None, Parameter(metavar="FILE.toml", help="sites, links, failures and shards (docs/planner.md)")
    ] = None

    def described(self) -> Described:
        """What the file says. Raises ConfigError, also for flags that would change nothing beside it."""
        found = Described() if self.links is None else read(self.links)
        given = {"--learners": self.learners, "--chips": self.chips, "--step-time": self.step_time, "--mtbi": self.mtbi}
        refuse_idle(given, found.idle)
        return found

    def plans(self, described: Described) -> list[LearnerPlan]:
        """Raises ConfigError."""
        failures = described.failures(self.failures, self.mtbi)
        template = LearnerPlan("", Island(1), failures, self.step_time or LearnerPlan.step_s)
        return described.learners(template, self.chips, self.learners or LEARNERS)


@Parameter(name="*")
@dataclass(frozen=True)
class SyncOptions:
    """How often they synchronize, and what moves."""

    h: Annotated[int, Parameter(converter=_WHOLE, metavar="H", help="inner steps between two rounds")] = EVERY
    fragments: Annotated[int, Parameter(converter=_WHOLE, metavar="P", help="fragments")] = FRAGMENTS
    quorum: Annotated[str, Parameter(metavar="K", help="contributions to close a round, or all")] = str(DEFAULTS.quorum)
    grace: Annotated[str, Parameter(metavar="SECONDS", help="a round stays open, or adaptive")] = str(DEFAULTS.grace)
    # A setting may name a plugin, which the simulation does not know; the default names none.
    push: Annotated[_Encoding, Parameter(help="encoding of contributions")] = DEFAULTS.push  # type: ignore[assignment]
    pull: Annotated[_Encoding, Parameter(help="of versions")] = DEFAULTS.pull

    def settings(self) -> Settings:
        """Raises ConfigError."""
        flags: dict[str, object] = {
            "sync.fragments": self.fragments, "sync.sync_every": self.h, "sync.quorum": self.quorum,
            "sync.grace": self.grace, "sync.push": self.push, "sync.pull": self.pull,
        }  # fmt: skip
        return settings_from(NO_SETTINGS, flags, {})


def simulate(
    *,
    who: FleetOptions = FleetOptions(),
    hours: Annotated[float, Parameter(converter=_HOURS, metavar="HOURS", help="simulated")] = 24.0,
    params: Annotated[int, Parameter(converter=_PARAMS, metavar="5e9", help="of the model")] = 5_000_000_000,
    sync: SyncOptions = SyncOptions(),
    seed: Annotated[int, Parameter(metavar="SEED", help="of everything that is drawn")] = 0,
    json: Json = False,
) -> int:
    """Simulate a run on so many chips: what its failures cost, what the cores decide, and what other training methods
    would have achieved. One simulated day of a million chips takes a quarter of a minute.
    """
    described = who.described()
    plans, settings = who.plans(described), sync.settings()
    refuse_restless(plans, 3600 * hours)
    if (described.shards.count or 1) > settings.sync.fragments:
        raise ConfigError(
            f"{who.links}: {described.shards.count} shards are too many for {settings.sync.fragments} fragments: each "
            "has to own one; ask for more --fragments, or write a smaller count"
        )
    most = settings.sync.quorum
    if most != "all" and most > len(plans):
        raise ConfigError(f"--quorum {most}: there are {len(plans)} learners; ask for so many at most, or for all")
    told = SimulationProgress(3600 * hours, partial(print, file=sys.stderr, flush=True))
    found = Run(settings, params, tuple(plans), described.shards, hours, seed).carry_out(told)
    print(dumps(found.as_json(), indent=2) if json else "\n".join(found.lines()))
    return 0


# ---------------------------------------------------------------- the question


@dataclass(frozen=True)
class Run:
    settings: Settings
    params: float
    learners: Sequence[LearnerPlan]
    shards: ShardPlan
    hours: float
    seed: int = 0

    @cached_property
    def sent(self) -> Sent:
        sync = self.settings.sync
        return Sent(self.params, BITS[sync.push], BITS[sync.pull], sync.first_every)

    def carry_out(self, told: Callable[[float], None] | None = None) -> SimulatedRun:
        """`told` is called now and then with the simulated seconds so far."""
        import torch

        from diloco_planner.world import PlannedWorld

        torch.set_num_threads(1)
        began, until = time.perf_counter(), self.hours * 3600
        world = PlannedWorld(self.settings, self.params, self.learners, self.shards, until, self.seed)
        outcome = world.run(told)
        others = baselines(self.learners, self.sent, until, self.seed)
        return SimulatedRun(self, outcome, others, time.perf_counter() - began)


class SimulationProgress:
    """Reports on a long simulation: a line every ten seconds."""

    def __init__(self, until: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._until, self._say, self._clock = until, say, clock
        self._began = self._said = clock()

    def __call__(self, simulated_s: float) -> None:
        now = self._clock()
        if now < self._said + SAY_EVERY_S:
            return
        self._said = now
        left = units.clock((now - self._began) * (self._until / simulated_s - 1)) if simulated_s else "?"
        self._say(f"{simulated_s / 3600:.3g} of {self._until / 3600:g} hours are simulated; about {left} left")


# ---------------------------------------------------------------- the answer

WAYS = {
    "dp_restart": "data-parallel, restarts",
    "dp_elastic": "data-parallel, elastic",
    "diloco_sync": "DiLoCo, synchronous",
    "ours": "decoupled (this)",
}
"""Way to train -> its name in a table."""


@dataclass(frozen=True)
class SimulatedRun:
    asked: Run
    outcome: RunOutcome
    baselines: dict[str, float]
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """All results; figures are rounded to meaningful digits."""
        o, learners = self.outcome, self.asked.learners
        return {
            "goodput": round(o.goodput, 4), "uptime": round(o.uptime, 4), "rounds": o.rounds,
            "participants_mean": round(o.participants_mean, 3), "tokens_share_merged": round(o.tokens_share_merged, 4),
            "gbit_per_learner_up": round(o.gbit_per_learner_up, 4),
            "gbit_per_learner_down": round(o.gbit_per_learner_down, 4),
            "wall_s": round(self.wall_s, 2),
            "baselines": {name: {"goodput": round(share, 4)} for name, share in self.baselines.items()},
            "hours": round(o.hours, 3), "late_share": round(o.late_share, 5), "shards_busy": round(o.shards_busy, 4),
            "evictions": o.evictions, "events": o.events,
            "fragments_decided": o.decided, "chips": sum(plan.island.chips for plan in learners),
            "learners": len(learners),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """All results as a table."""
        o, asked = self.outcome, self.asked
        chips, sync = sum(plan.island.chips for plan in asked.learners), asked.settings.sync
        rate = sum(plan.island.chips / plan.failures.mtbi_s for plan in asked.learners) * 3600
        everyone = units.counted(len(asked.learners), "learner")
        yield (
            f"{chips:,.0f} chips in {everyone}, {rate:,.3g} interruptions per hour, {o.hours:g} hours; "
            f"{asked.params:.3g} parameters, H = {sync.first_every}, P = {sync.fragments}, "
            f"push {sync.push}, pull {sync.pull}"
        )
        yield ""
        for name, share in (self.baselines | {"ours": o.goodput}).items():
            yield f"  {WAYS[name]:<24} {100 * share:5.1f} %"
        yield ""
        rows = {
            "somebody computes": f"{100 * o.uptime:.2f} % of the time",
            "rounds": f"{o.rounds:,}, with {o.participants_mean:.2f} of {everyone} on average",
            "tokens merged": f"{100 * o.tokens_share_merged:.2f} % of those trained",
            "contributions late": f"{100 * o.late_share:.2f} %",
            "each learner, up": f"{o.gbit_per_learner_up:.3g} Gbit/s while it computes",
            "each learner, down": f"{o.gbit_per_learner_down:.3g} Gbit/s",
        }
        if o.shards_busy:
            rows["shards busy"] = f"{100 * o.shards_busy:.0f} % of the time"
        if o.shards_busy > FULL:
            rows["shards busy"] += ": versions are late; write a larger count in [shards]"
        for name, words in rows.items():
            yield f"  {name:<24} {words}"
        yield ""
        of = f"{o.decided} of {sync.fragments} fragments"
        yield f"  {o.events:,} events in {self.wall_s:.0f} s; the cores decided for {of}"
