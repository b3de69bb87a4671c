"""Weighs ways to train on the machines of a file (docs/planner.md): which sites train together, which way is best, and
why the other sites do not take part. Settings come from `choice.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_common import formulas, units
from diloco_common.settings import EVERY_MOST
from diloco_planner.choice import EVERY_MEASURED, INSIDE, Choice, PlannedRun, choose, link_words
from diloco_planner.described import Site
from diloco_planner.plans import LearnerPlan, Link
from diloco_planner.proposed import ALIKE, ROOM, PlannedTask, TrainingMethod, alone, decoupled, parallel

LONGER = 2.0
"""Sites whose links need an H of unmeasured quality are left out if the rest takes at most this many times as long."""
SLOWER = 1.1
"""A simpler way is good enough if it takes at most this many times the days and the money."""
NAMED = 3
"""Maximum number of sites that are listed by name. Of more sites, only the number is given."""


@dataclass(frozen=True)
class Weighed:
    """All ways that machines and links allow, and which one to take."""

    task: PlannedTask
    ways: tuple[TrainingMethod, ...]
    verdict: PlanVerdict
    asked: PlannedRun
    choice: Choice
    """Settings of the proposed way. If it has none, those with which the chosen sites would train decoupled."""

    @property
    def works(self) -> bool:
        """Whether any way is proposed."""
        return self.verdict.way is not None

    @property
    def is_ours(self) -> bool:
        """Whether the proposed way needs the settings."""
        return self.verdict.way is not None and self.verdict.way.settled is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "ways": [{key: value for key, value in vars(way).items() if key != "settled"} for way in self.ways],
            "verdict": self.verdict.words, "because": self.verdict.because, "works": self.works,
            "memory": [*_memory_of(self.task)], "is_ours": self.is_ours,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        task, width = self.task, max((len(way.name) for way in self.ways), default=0)
        yield f"{self.verdict.words}: {self.verdict.because}"
        yield ""
        for way in self.ways:
            price = f", {_money_of(task, way)}" if task.described.date else ""
            egress = f" ({way.egress:,.0f} of it egress)" if way.egress >= 1 else ""
            yield f"  {way.name:<{width}}  {100 * way.goodput:5.1f} %  {_days_of(way.days):>12}{price}{egress}"
            yield f"  {'':<{width}}  {way.why}"
        if task.described.date:
            yield f"  prices of {task.described.date}, from the file"
        yield from (f"  {line}" for line in _memory_of(task))


def weigh(task: PlannedTask, base: PlannedRun) -> Weighed:
    """Weigh all ways that links and memory allow. `base`: values that the file does not give."""
    if not task.able:
        asked = _asked_of(task, base, task.learners)
        nobody = PlanVerdict("no machine here holds it", _what_would_hold(task))
        return Weighed(task, (), nobody, asked, choose(asked))
    able = {plan.site: site for site, plan in task.first_of_each() if task.holds(plan)}
    apart = [alone(task, site, _asked_of(task, base, task.of([name]))) for name, site in able.items()]
    found, whole, thin = _worth_it(task, base, list(able))
    every_site = replace(whole.ours, name="decoupled, all") if thin and whole.ours is not None else None
    verdict = _verdict_of(task, found.where, found.ours, found.over, apart)
    because = [verdict.because, *_left_out(task)]
    if found.ours is None and found.over is not None:
        because.append(_too_much(task, base, found.choice))
    if verdict.way in (found.ours, found.over):
        because += _thin_links(task, base, thin)
    ways = tuple(way for way in (found.ours, every_site, found.over, *apart) if way is not None)
    settled = None if verdict.way is None else verdict.way.settled
    asked, choice = settled or (found.asked, found.choice)
    return Weighed(task, ways, verdict._replace(because="; ".join(because)), asked, choice)


# ---------------------------------------------------------------- sites that train together


@dataclass(frozen=True)
class Together:
    where: str
    asked: PlannedRun
    choice: Choice
    ours: TrainingMethod | None
    over: TrainingMethod | None
    """Data-parallel training. For a single site, this and `ours` are None."""

    @classmethod
    def of(cls, task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> Together:
        learners, every_site = task.of(sites), len(task.described.sites)
        where = " and ".join(sites) if len(sites) <= NAMED else f"{len(sites)} of {every_site} sites"
        if len(sites) == every_site:
            where = "all sites"
        asked = _asked_of(task, base, learners)
        if len(sites) == 1:
            asked = replace(asked, link=INSIDE)
            return cls(where, asked, choose(asked), None, None)
        choice, ours = choose(asked), None
        if choice.fits:
            ours = decoupled(task, learners, asked, choice, "decoupled, as chosen", choice.why_every)
        return cls(where, asked, choice, ours, parallel(task, learners, f"data-parallel, {where}"))


def _worth_it(task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> tuple[Together, Together, list[str]]:
    """The sites that should train together, all sites, and those left out because of their links."""
    whole = Together.of(task, base, sites)
    thin = [name for name in sites if _every_of(task, base, name) > EVERY_MEASURED] if len(sites) > 1 else []
    thick = [name for name in sites if name not in thin]
    if not thin or len(thick) < 2:
        return whole, whole, []
    rest = Together.of(task, base, thick)  # with an H of measured quality
    if rest.ours is None:
        return whole, whole, []
    if whole.ours is None or (task.allows(rest.ours) and rest.ours.days <= LONGER * whole.ours.days):
        return rest, whole, thin
    return whole, whole, []


def _asked_of(task: PlannedTask, base: PlannedRun, learners: Sequence[LearnerPlan]) -> PlannedRun:
    """The question for `choice.py`. The thinnest link and the fastest step decide."""
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


def _every_of(task: PlannedTask, base: PlannedRun, site: str) -> int:
    """The H that a site's links and round trips need at the fastest learner's pace, whatever shards can carry."""
    asked, fastest_s = _asked_of(task, base, task.of([site])), min(plan.step_s for plan in task.able)
    asked = replace(asked, step_s=fastest_s, learners=1, shards=None, disk=None, merge=formulas.BYTES_PER_S)
    return choose(asked).every


# ---------------------------------------------------------------- the recommendation


class PlanVerdict(NamedTuple):
    words: str
    because: str
    way: TrainingMethod | None = None
    """None: no way works."""


def _verdict_of(
    task: PlannedTask, where: str, ours: TrainingMethod | None, over: TrainingMethod | None,
    apart: Sequence[TrainingMethod],
) -> PlanVerdict:  # fmt: skip
    """`over`: data-parallel over all links. `apart`: each site alone. None: this way is not possible."""
    some = [way for way in (ours, over, *apart) if way is not None and way.goodput > ALIKE]
    if not some:
        why = f"each has a goodput of at most {100 * ALIKE:g} %, due to its links or its failures"
        return PlanVerdict("no way works", why)
    quick = [way for way in some if task.days is None or way.days <= task.days]
    if not quick:
        why = f"the fastest needs {_days_of(min(way.days for way in some))}; the limit is {task.days:g} days"
        return PlanVerdict("no way is fast enough", why)
    cheap = [way for way in quick if task.budget is None or way.money <= task.budget]
    if not cheap:
        assert task.budget is not None
        least = _money_of(task, min(quick, key=lambda way: way.money))
        why = f"the cheapest{' that is in time' if task.days else ''} costs {least}; the budget is {task.budget:,.0f}"
        return PlanVerdict("no way is within the budget", why)
    ours = ours if ours in cheap else None
    best = ours or min(cheap, key=lambda way: way.days)
    as_good = over if over is not None and over in cheap and _is_as_good(over, best) else None
    rivals = [way for way in (ours, as_good) if way is not None]
    most = SLOWER * best.days if task.days is None else task.days
    enough = [way for way in apart if way in cheap and way.days <= most]
    site = min(enough, key=lambda way: (way.money, way.days), default=None)
    if site is not None and all(site.money <= way.money for way in rivals):
        return PlanVerdict(_words_of_one(task, site), _beside(task, site, rivals), site)
    if as_good is not None:
        beside = f", ours is {100 * ours.goodput:.1f} %" if ours else ""
        why = f"its goodput is {100 * as_good.goodput:.1f} %{beside}, and it pays nothing for rare synchronization"
        on = "" if where == "all sites" else f", on {where}"
        return PlanVerdict(f"use data-parallel training instead{on}", why, as_good)
    assert ours is not None
    assert over is not None
    return PlanVerdict(f"train decoupled, on {where}", (
        f"data-parallel training over these links and failures has a goodput of {100 * over.goodput:.1f} %, "
        f"ours {100 * ours.goodput:.1f} %"
    ), ours)  # fmt: skip


def _words_of_one(task: PlannedTask, way: TrainingMethod) -> str:
    """The recommendation to train at only one site."""
    name = way.name.removeprefix("only ")
    if len(task.described.sites) > 1:
        return f"one site is enough: {name}"
    return "use data-parallel training instead" if way.settled is None else f"train decoupled, inside {name}"


def _beside(task: PlannedTask, way: TrainingMethod, rivals: Sequence[TrainingMethod]) -> str:
    """Days and cost of a way, compared with those of others."""
    days = [_days_of(one.days) for one in (way, *rivals[:1])]
    prices = [_money_of(task, one) for one in (way, *rivals[:1])]
    return f"it needs {' against '.join(days)}" + (f", for {' against '.join(prices)}" if task.described.date else "")


def _is_as_good(over: TrainingMethod, best: TrainingMethod) -> bool:
    """Whether data-parallel training is as good as the best way. As it learns a little more, it may cost a bit more."""
    return (
        over.goodput >= best.goodput - ALIKE and over.days <= SLOWER * best.days and over.money <= SLOWER * best.money
    )


def _days_of(days: float) -> str:
    return "never" if math.isinf(days) else f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"


def _money_of(task: PlannedTask, way: TrainingMethod) -> str:
    return f"{way.money:,.0f} {task.described.currency}".strip()


# ---------------------------------------------------------------- why others do not take part


def _left_out(task: PlannedTask) -> Iterator[str]:
    unable = [(site, plan) for site, plan in task.first_of_each() if not task.holds(plan)]
    return _few([f"{site.name} cannot hold it: {_needs(task, site, plan)}" for site, plan in unable])


def _what_would_hold(task: PlannedTask) -> str:
    """What the site that comes closest would need to hold a model that no site can hold."""
    site, plan = min(task.first_of_each(), key=lambda one: task.least_chips(one[1]) / one[1].island.chips)
    return f"{site.name} is nearest: {_needs(task, site, plan)}"


def _needs(task: PlannedTask, site: Site, plan: LearnerPlan) -> str:
    assert site.memory is not None
    return (
        f"a learner there has {units.counted(round(plan.island.chips), 'chip')} of {units.size(site.memory)}, and "
        f"needs {math.ceil(task.least_chips(plan)):,}"
    )


def _too_much(task: PlannedTask, base: PlannedRun, choice: Choice) -> str:
    """Why decoupled training is not possible."""
    thinnest = max(dict.fromkeys(plan.site for plan in task.able), key=lambda name: _every_of(task, base, name))
    if _every_of(task, base, thinnest) <= EVERY_MOST:
        return f"not decoupled, as it would need H = {choice.every:,}: {choice.why_every}"
    return f"not decoupled, as {_link(task, base, thinnest)}, and we propose at most {EVERY_MOST}"


def _thin_links(task: PlannedTask, base: PlannedRun, sites: Sequence[str]) -> Iterator[str]:
    """Sites that are left out because of their links."""
    measured = f"and quality was measured up to {EVERY_MEASURED}"
    return _few([f"{site} is left out, as {_link(task, base, site)}, {measured}" for site in sites])


def _link(task: PlannedTask, base: PlannedRun, site: str) -> str:
    link = _asked_of(task, base, task.of([site])).link
    return f"the link of {site} ({link_words(link)}) would need H = {_every_of(task, base, site):,}"


def _few(lines: Sequence[str]) -> Iterator[str]:
    """The first of many similar lines, and how many more there are."""
    yield from lines[:NAMED]
    if len(lines) > NAMED:
        yield f"and the same for {len(lines) - NAMED:,} more sites"


def _memory_of(task: PlannedTask) -> Iterator[str]:
    """What a learner at each site can hold."""
    for site, plan in task.first_of_each():
        if site.memory is None:
            continue
        have, least = plan.island.chips * site.memory, task.least_chips(plan)
        words = f"{site.name}: a learner has {units.size(have)}, the model takes {units.size(task.num_bytes)}"
        if least <= 1:
            yield f"{words}: one chip holds it, with room for activations"
        elif least <= plan.island.chips:
            yield f"{words}: spread it over at least {math.ceil(least):,} chips (FSDP2, docs/islands.md)"
        else:
            most = ROOM * have / task.bytes_per_parameter
            yield f"{words}: too little; it holds {units.count(most)} parameters, or needs {math.ceil(least):,} chips"
