"""Sites that train together: their learners, the settings that their links and shards allow, and both ways to train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco_common import formulas
from diloco_planner.choice import EVERY_MEASURED, INSIDE, Choice, PlannedRun, choose
from diloco_planner.plans import LearnerPlan, Link
from diloco_planner.proposed import PlannedTask, Way, decoupled, parallel, second_best

LONGER = 2.0
"""Sites whose links need an H of unmeasured quality are left out if the others take at most this many times as long."""
NAMED = 3
"""Most sites that are listed by name; of more, only their number."""


@dataclass(frozen=True)
class Together:
    learners: Sequence[LearnerPlan]
    where: str
    asked: PlannedRun
    choice: Choice
    ours: Way | None
    over: Way | None
    """Data-parallel training. None, like `ours`, for a single site."""

    @classmethod
    def of(cls, task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> Together:
        learners, every_site = task.of(sites), len(task.described.sites)
        where = " and ".join(sites) if len(sites) <= NAMED else f"{len(sites)} of {every_site} sites"
        if len(sites) == every_site:
            where = "all sites"
        asked = asked_of(task, base, learners)
        if len(sites) == 1:
            asked = replace(asked, link=INSIDE)
            return cls(learners, where, asked, choose(asked), None, None)
        choice, ours = choose(asked), None
        if choice.fits:
            ours = decoupled(task, learners, asked, choice, "decoupled, as chosen", choice.why_every)
        return cls(learners, where, asked, choice, ours, parallel(task, learners, f"data-parallel, {where}"))

    def second(self, task: PlannedTask) -> Way | None:
        return None if self.ours is None else second_best(task, self.learners, self.asked, self.choice)

    def named(self, name: str) -> Way | None:
        return None if self.ours is None else replace(self.ours, name=name)

    def is_better_than(self, whole: Together, task: PlannedTask) -> bool:
        """Whether to leave out the other sites: H has measured quality, and training does not take much longer."""
        if whole.ours is None or self.ours is None:
            return self.ours is not None
        in_time = task.days is None or self.ours.days <= task.days
        is_paid = task.budget is None or self.ours.money <= task.budget
        mine, of_all = (way.days - task.begins_days for way in (self.ours, whole.ours))
        return in_time and is_paid and mine <= LONGER * of_all


def worth_it(task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> tuple[Together, Together, list[str]]:
    """The sites that should train together, all sites, and those left out because of their links."""
    whole = Together.of(task, base, sites)
    thin = [name for name in sites if every_of(task, base, name) > EVERY_MEASURED] if len(sites) > 1 else []
    thick = [name for name in sites if name not in thin]
    if not thin or len(thick) < 2:
        return whole, whole, []
    rest = Together.of(task, base, thick)
    return (rest, whole, thin) if rest.is_better_than(whole, task) else (whole, whole, [])


def asked_of(task: PlannedTask, base: PlannedRun, learners: Sequence[LearnerPlan]) -> PlannedRun:
    """The question to `choice.py`: the thinnest link and the fastest step decide."""
    links, shards = [plan.to_shards for plan in learners], task.described.shards
    thinnest = Link(min(x.up for x in links), min(x.down for x in links), max(x.round_trip_s for x in links))
    return replace(
        base,
        learners=len(learners),
        link=thinnest,
        step_s=min(plan.step_s for plan in learners),
        shards=base.shards or shards.count,
        disk=base.disk or (shards.disk_bytes_s if math.isfinite(shards.disk_bytes_s) else None),
        merge=shards.merge_bytes_s,
    )


def every_of(task: PlannedTask, base: PlannedRun, site: str) -> int:
    """The H that a site's links and round trips need beside the fastest learner, whatever shards can carry."""
    asked, fastest_s = asked_of(task, base, task.of([site])), min(plan.step_s for plan in task.able)
    asked = replace(asked, step_s=fastest_s, learners=1, shards=None, disk=None, merge=formulas.BYTES_PER_S)
    return choose(asked).every
