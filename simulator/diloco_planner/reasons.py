"""Why a site takes no part, and which models its machines can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from diloco_common import units
from diloco_common.settings import EVERY_MOST
from diloco_planner.choice import EVERY_MEASURED, Choice, PlannedRun, link_words
from diloco_planner.described import Site
from diloco_planner.plans import LearnerPlan
from diloco_planner.proposed import ROOM, PlannedTask, Way
from diloco_planner.together import NAMED, asked_of, every_of


def late(task: PlannedTask, way: Way | None) -> Iterator[str]:
    """Sites that start only when everything is trained."""
    begins = [(site.name, plan.begins_s / 86_400) for site, plan in task.first_of_each()]
    too_late = [(name, days) for name, days in begins if way is not None and days > way.days]
    return _few([f"{name} comes after {days:,.1f} days, when all is trained" for name, days in too_late])


def left_out(task: PlannedTask) -> Iterator[str]:
    unable = [(site, plan) for site, plan in task.first_of_each() if not task.holds(plan)]
    return _few([f"{site.name} cannot hold it: {_needs(task, site, plan)}" for site, plan in unable])


def what_would_hold(task: PlannedTask) -> str:
    """What it takes to hold a model that no site can hold, at the site that is closest to it."""
    site, plan = min(task.first_of_each(), key=lambda one: task.least_chips(one[1]) / one[1].island.chips)
    return f"{site.name} is nearest: {_needs(task, site, plan)}"


def _needs(task: PlannedTask, site: Site, plan: LearnerPlan) -> str:
    assert site.memory is not None
    return (
        f"a learner there has {units.counted(round(plan.island.chips), 'chip')} of {units.size(site.memory)}, and "
        f"needs {math.ceil(task.least_chips(plan)):,}"
    )


def too_much(task: PlannedTask, base: PlannedRun, choice: Choice) -> str:
    """Why decoupled training is not possible."""
    thinnest = max(dict.fromkeys(plan.site for plan in task.able), key=lambda name: every_of(task, base, name))
    if every_of(task, base, thinnest) <= EVERY_MOST:
        return f"not decoupled, as it would ask for H = {choice.every:,}: {choice.why_every}"
    return f"not decoupled, as {_link(task, base, thinnest)}, and we propose {EVERY_MOST} at most"


def thin_links(task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> Iterator[str]:
    """Sites that are left out because of their links."""
    measured = f"and quality was measured up to {EVERY_MEASURED}"
    return _few([f"{site} is left out, as {_link(task, base, site)}, {measured}" for site in sites])


def _link(task: PlannedTask, base: PlannedRun, site: str) -> str:
    link = asked_of(task, base, task.of([site])).link
    return f"the link of {site} ({link_words(link)}) would ask for H = {every_of(task, base, site):,}"


def _few(lines: Sequence[str]) -> Iterator[str]:
    """The first of many similar lines, and how many more there are."""
    yield from lines[:NAMED]
    if len(lines) > NAMED:
        yield f"and so for {len(lines) - NAMED:,} more sites"


def memory_of(task: PlannedTask) -> Iterator[str]:
    """What a learner at each site can hold."""
    for site, plan in task.first_of_each():
        if site.memory is None:
            continue
        have, least = plan.island.chips * site.memory, task.least_chips(plan)
        words = f"{site.name}: a learner has {units.size(have)}, the model takes {units.size(task.num_bytes)}"
        if least <= 1:
            yield f"{words}: one chip holds it, beside activations"
        elif least <= plan.island.chips:
            yield f"{words}: spread it over at least {math.ceil(least):,} chips (FSDP2, docs/islands.md)"
        else:
            most = ROOM * have / task.bytes_per_parameter
            yield f"{words}: too little; it holds {units.count(most)} parameters, or needs {math.ceil(least):,} chips"
