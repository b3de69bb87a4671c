"""An answer as JSON, and as a table with bars."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from diloco_common import units
from diloco_planner.run import SimulatedRun

WAYS = {
    "dp_restart": "data-parallel, restarts",
    "dp_elastic": "data-parallel, elastic",
    "diloco_sync": "DiLoCo, synchronous",
    "ours": "decoupled (this)",
}
WIDTH = 40
SAID_EVERY_S = 10.0
FULL = 0.9
"""Shards busier than this do not keep up; a lower share of merged tokens is worth a remark."""


class SimulationProgress:
    """Reports on a long simulation: a line every ten seconds."""

    def __init__(self, until: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._until, self._say, self._clock = until, say, clock
        self._began = self._said = clock()

    def __call__(self, simulated_s: float) -> None:
        now = self._clock()
        if now < self._said + SAID_EVERY_S:
            return
        self._said = now
        left_s = (now - self._began) * (self._until / simulated_s - 1) if simulated_s else math.inf
        self._say(f"{simulated_s / 3600:.3g} of {self._until / 3600:g} hours are simulated; about {left_s:,.0f} s left")


def as_json(found: SimulatedRun) -> dict[str, Any]:
    """All results; figures are rounded to meaningful digits."""
    o = found.outcome
    answer: dict[str, Any] = {
        "goodput": round(o.goodput, 4), "uptime": round(o.uptime, 4), "rounds": o.rounds,
        "participants_mean": round(o.participants_mean, 3), "tokens_share_merged": round(o.tokens_share_merged, 4),
        "gbit_per_learner_up": round(o.gbit_per_learner_up, 4),
        "gbit_per_learner_down": round(o.gbit_per_learner_down, 4),
        "wall_s": round(found.wall_s, 2),
        "baselines": {name: {"goodput": round(share, 4)} for name, share in found.baselines.items()},
        "hours": round(o.hours, 3), "late_share": round(o.late_share, 5), "shards_busy": round(o.shards_busy, 4),
        "evictions": o.evictions, "events": o.events,
        "fragments_decided": o.decided, "chips": sum(plan.island.chips for plan in found.asked.learners),
        "learners": len(found.asked.learners),
    }  # fmt: skip
    if found.bill is not None:
        answer["money"] = asdict(found.bill) | {"total": found.bill.total}
    return answer


def as_text(found: SimulatedRun) -> str:
    return "\n".join(_lines(found))


def _lines(found: SimulatedRun) -> Iterator[str]:
    o, asked = found.outcome, found.asked
    chips, sync = sum(plan.island.chips for plan in asked.learners), asked.settings.sync
    rate = sum(plan.island.chips / plan.failures.mtbi_s for plan in asked.learners) * 3600
    everyone = units.counted(len(asked.learners), "learner")
    yield (
        f"{chips:,.0f} chips in {everyone}, {rate:,.3g} interruptions per hour, {o.hours:g} hours; "
        f"{asked.params:.3g} parameters, H = {sync.first_every}, P = {sync.fragments}, "
        f"push {sync.push}, pull {sync.pull}"
    )
    yield ""
    for name, share in (found.baselines | {"ours": o.goodput}).items():
        yield f"  {WAYS[name]:<24} {100 * share:5.1f} %  {bar(share)}"
    yield ""
    rows = {
        "somebody computes": f"{100 * o.uptime:.2f} % of the time",
        "rounds": f"{o.rounds:,}, with {o.participants_mean:.2f} of {everyone} on average",
        "tokens merged": f"{100 * o.tokens_share_merged:.2f} % of those trained",
        "contributions late": f"{100 * o.late_share:.2f} %",
        "each learner, up": f"{o.gbit_per_learner_up:.3g} Gbit/s while it computes",
        "each learner, down": f"{o.gbit_per_learner_down:.3g} Gbit/s",
    }
    if o.tokens_share_merged < FULL:
        rows["tokens merged"] += ": the rest was late or lost; look at links, shards and hours"
    if o.shards_busy:
        rows["shards busy"] = f"{100 * o.shards_busy:.0f} % of the time"
    if o.shards_busy > FULL:
        rows["shards busy"] += ": versions are late; write a larger count in [shards]"
    if found.bill is not None:
        b = found.bill
        rows["money"] = (
            f"{f'{b.total:,.0f} {b.currency}'.strip()}: chips {b.chips:,.0f}, egress {b.egress:,.0f}, "
            f"shards {b.shards:,.0f} (prices of {b.date})"
        )
    for name, words in rows.items():
        yield f"  {name:<24} {words}"
    yield ""
    of = f"{o.decided} of {sync.fragments} fragments"
    yield f"  {o.events:,} events in {found.wall_s:.0f} s; the cores decided for {of}"


def bar(share: float) -> str:
    full = round(WIDTH * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (WIDTH - full)
