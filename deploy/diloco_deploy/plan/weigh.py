"""Which way to train on the machines of a file (docs/planner.md), and why. Settings come from `choice.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_deploy import units
from diloco_deploy.plan import formulas
from diloco_deploy.plan.choice import EVERY_MEASURED, EVERY_MOST, Asked, Choice, Link, bit_rate, choose
from diloco_deploy.plan.ways import ALIKE, ROOM, Task, Way, alone, decoupled, parallel, second_best
from diloco_planner.described import Site
from diloco_planner.report import count
from diloco_planner.world import LearnerPlan

SLOWER = 1.1
"""One site is enough if it needs at most so many times the days of all, where no other time is asked for."""
LONGER = 2.0
"""Sites whose links ask for an H whose quality was not measured are left out where the rest takes at most so many times
the days."""
NAMED = 3
"""Sites that are told by name; of more, how many."""
SOME = 0.01
"""Of goodput: a way that comes to less trains nothing."""


@dataclass(frozen=True)
class Weighed:
    """All that machines and links allow, and what to do."""

    ways: tuple[Way, ...]
    verdict: str
    because: str
    works: bool
    """Whether one of them is proposed."""
    memory: tuple[str, ...]
    """What each site's machines can hold."""
    asked: Asked
    choice: Choice
    """Settings of the way that is proposed; where it needs none, those with which all would train decoupled."""
    is_ours: bool
    """Whether it needs them."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ways": [{key: value for key, value in vars(way).items() if key != "settled"} for way in self.ways],
            "verdict": self.verdict, "because": self.because, "works": self.works, "memory": self.memory,
            "is_ours": self.is_ours,
        }  # fmt: skip


def weigh(task: Task, base: Asked) -> Weighed:
    """What links or memory do not allow is not among the ways. `base`: what the file does not say."""
    memory = tuple(_memory(task))
    if not task.able:
        asked = _asked(task, base, task.learners)
        return Weighed((), "no machine here holds it", _what_would(task), False, memory, asked, choose(asked), False)
    able = {plan.site: site for site, plan in _first_of_each(task) if task.holds(plan)}
    apart = [alone(task, site, _asked(task, base, _of(task, [name]))) for name, site in able.items()]
    thin = [name for name in able if _every_of(task, base, name) > EVERY_MEASURED] if len(able) > 1 else []
    thick = [name for name in able if name not in thin]
    whole = _Together.of(task, base, list(able))
    found = whole
    if thin and len(thick) > 1 and (rest := _Together.of(task, base, thick)).is_worth_it_beside(whole, task):
        found = rest
    asked, choice, ours, over, where = found.asked, found.choice, found.ours, found.over, found.where
    second = None
    if ours is not None:
        second = second_best(task, found.learners, asked, choice) if found is whole else whole.named("decoupled, all")
    verdict = _verdict(task, where, ours, over, apart)
    because = [verdict.because, *_left_out(task), *_late(task, verdict.way)]
    if ours is None and over is not None:
        because.append(_too_much(task, base, choice))
    if found is not whole and verdict.way is ours:
        because += _few([_thin(task, base, name) for name in thin])
    ways = tuple(way for way in (ours, second, over, *apart) if way is not None)
    settled = None if verdict.way is None else verdict.way.settled
    asked, choice = settled or (asked, choice)
    return Weighed(
        ways, verdict.words, "; ".join(because), verdict.way is not None, memory, asked, choice, settled is not None
    )


@dataclass(frozen=True)
class _Together:
    """Sites that train together."""

    learners: Sequence[LearnerPlan]
    where: str
    asked: Asked
    choice: Choice
    ours: Way | None
    over: Way | None
    """Data-parallel. None for both: it is one site."""

    @classmethod
    def of(cls, task: Task, base: Asked, sites: Sequence[str]) -> _Together:
        learners, every_site = _of(task, sites), len(task.described.sites)
        where = "all sites" if len(sites) == every_site else f"{len(sites)} of {every_site} sites"
        if len(sites) < min(every_site, NAMED):
            where = " and ".join(sites)
        asked = _asked(task, base, learners)
        if len(sites) == 1:
            asked = replace(asked, link=Link(math.inf, math.inf))
            return cls(learners, where, asked, choose(asked), None, None)
        choice, ours = choose(asked), None
        if choice.fits:
            ours = decoupled(task, learners, asked, choice, "decoupled, as chosen", choice.why_every)
        return cls(learners, where, asked, choice, ours, parallel(task, learners, f"data-parallel, {where}"))

    def named(self, name: str) -> Way | None:
        return None if self.ours is None else replace(self.ours, name=name)

    def is_worth_it_beside(self, whole: _Together, task: Task) -> bool:
        """Whether those with the thin links are better left out: H is as measured, and it does not take much longer."""
        if whole.ours is None or self.ours is None:
            return self.ours is not None
        in_time = task.days is None or self.ours.days <= task.days
        return in_time and self.ours.days - task.begins_days <= LONGER * (whole.ours.days - task.begins_days)


def _of(task: Task, sites: Sequence[str]) -> list[LearnerPlan]:
    """Their learners."""
    names = set(sites)
    return [plan for plan in task.able if plan.site in names]


def _few(lines: Sequence[str]) -> Iterator[str]:
    """Of many that say the same the first ones."""
    yield from lines[:NAMED]
    if len(lines) > NAMED:
        yield f"and so for {len(lines) - NAMED:,} more sites"


def _asked(task: Task, base: Asked, learners: Sequence[LearnerPlan]) -> Asked:
    """The question to `choice.py`: the thinnest link decides, and the fastest step."""
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


def _every_of(task: Task, base: Asked, site: str) -> int:
    """The H that its links and round trips ask for, whatever shards carry."""
    asked = _asked(task, base, _of(task, [site]))
    return choose(replace(asked, learners=1, shards=None, disk=None, merge=formulas.BYTES_PER_S)).every


class _Verdict(NamedTuple):
    words: str
    because: str
    way: Way | None = None
    """None: none works."""


def _verdict(task: Task, where: str, ours: Way | None, over: Way | None, apart: Sequence[Way]) -> _Verdict:
    """`over`: data-parallel over all links; `apart`: each site alone. None: this way is not possible."""
    some = [way for way in (ours, over, *apart) if way is not None and way.goodput >= SOME]
    if not some:
        why = f"each has a goodput below {100 * SOME:g} %, by its links or its failures"
        return _Verdict("no way works", why)
    quick = [way for way in some if task.days is None or way.days <= task.days]
    if not quick:
        why = f"the fastest needs {_days(min(way.days for way in some))}, and {task.days:g} days are there"
        return _Verdict("no way is fast enough", why)
    cheap = [way for way in quick if task.budget is None or way.money <= task.budget]
    if not cheap:
        assert task.budget is not None
        least = _money(task, min(quick, key=lambda way: way.money))
        why = f"the cheapest{' that is in time' if task.days else ''} takes {least}, {task.budget:,.0f} are there"
        return _Verdict("no way is within the budget", why)
    ours = ours if ours in cheap else None
    best = ours or min(cheap, key=lambda way: way.days)
    as_good = over if over is not None and over in cheap and _is_as_good(task, over, best) else None
    rivals = [way for way in (ours, as_good) if way is not None]
    most = task.begins_days + SLOWER * (best.days - task.begins_days) if task.days is None else task.days
    enough = [way for way in apart if way in cheap and way.days <= most]
    site = min(enough, key=lambda way: (way.money, way.days), default=None)
    if site is not None and all(site.money <= way.money for way in rivals):
        return _Verdict(_words_of_one(task, site), _beside(task, site, rivals), site)
    if as_good is not None:
        beside = f", that of ours {100 * ours.goodput:.1f} %" if ours else ""
        why = f"its goodput is {100 * as_good.goodput:.1f} %{beside}, and it loses nothing by synchronising rarely"
        return _Verdict("use data-parallel training instead", why, as_good)
    assert ours is not None
    assert over is not None
    return _Verdict(f"train decoupled, on {where}", (
        f"data-parallel training over these links and failures has a goodput of {100 * over.goodput:.1f} %, "
        f"ours {100 * ours.goodput:.1f} %"
    ), ours)  # fmt: skip


def _words_of_one(task: Task, way: Way) -> str:
    """What to do with one site."""
    name = way.name.removeprefix("only ")
    if len(task.described.sites) > 1:
        return f"one site is enough: {name}"
    return "use data-parallel training instead" if way.settled is None else f"train decoupled, inside {name}"


def _beside(task: Task, way: Way, rivals: Sequence[Way]) -> str:
    """Its days and money, beside those of another way."""
    days = [_days(one.days) for one in (way, *rivals[:1])]
    prices = [_money(task, one) for one in (way, *rivals[:1])]
    return f"it needs {' beside '.join(days)}" + (f", for {' beside '.join(prices)}" if task.described.date else "")


def _is_as_good(task: Task, over: Way, best: Way) -> bool:
    """Data-parallel training beside the best: it may take a little more time and money, as it learns a little more."""
    quick = over.days - task.begins_days <= SLOWER * (best.days - task.begins_days)
    cheap = over.money <= SLOWER * best.money
    return quick and cheap and over.goodput >= best.goodput - ALIKE


def _late(task: Task, way: Way | None) -> Iterator[str]:
    """Sites that come when all is trained."""
    begins = [(site.name, plan.begins_s / 86_400) for site, plan in _first_of_each(task)]
    late = [(name, days) for name, days in begins if way is not None and days > way.days]
    return _few([f"{name} comes after {days:,.1f} days, when all is trained" for name, days in late])


def _too_much(task: Task, base: Asked, choice: Choice) -> str:
    """Why nothing is decoupled."""
    thinnest = max(dict.fromkeys(plan.site for plan in task.able), key=lambda name: _every_of(task, base, name))
    if _every_of(task, base, thinnest) <= EVERY_MOST:
        return f"not decoupled, as it would ask for H = {choice.every:,}: {choice.why_every}"
    return f"not decoupled, as {_link(task, base, thinnest)}, and {EVERY_MOST} is the most that we propose"


def _thin(task: Task, base: Asked, site: str) -> str:
    """Why a site is left out."""
    return f"{site} is left out, as {_link(task, base, site)}, and quality was measured up to {EVERY_MEASURED}"


def _link(task: Task, base: Asked, site: str) -> str:
    link = next(plan.link for plan in task.able if plan.site == site)
    every = _every_of(task, base, site)
    words = f"{bit_rate(link.up)} up, {bit_rate(link.down)} down, {1000 * link.round_trip_s:g} ms there and back"
    return f"the link of {site} ({words}) would ask for H = {every:,}"


def _left_out(task: Task) -> Iterator[str]:
    """Sites that cannot hold the model."""
    unable = [(site, plan) for site, plan in _first_of_each(task) if not task.holds(plan)]
    return _few([f"{site.name} cannot hold it: {_needs(task, site, plan)}" for site, plan in unable])


def _what_would(task: Task) -> str:
    """Hold it, where nobody does: at the site that is nearest to it."""
    site, plan = min(_first_of_each(task), key=lambda one: task.least_chips(one[1]) / one[1].island.chips)
    return f"{site.name} is nearest: {_needs(task, site, plan)}"


def _needs(task: Task, site: Site, plan: LearnerPlan) -> str:
    assert site.memory is not None
    return (
        f"a learner there has {count(round(plan.island.chips), 'chip')} of {units.size(site.memory)}, and needs "
        f"{math.ceil(task.least_chips(plan)):,}"
    )


def _first_of_each(task: Task) -> Iterator[tuple[Site, LearnerPlan]]:
    """Each site with a learner of it: they are alike."""
    first: dict[str, LearnerPlan] = {}
    for plan in task.learners:
        if (site := task.site(plan)) is not None:
            first.setdefault(site.name, plan)
    return ((site, first[site.name]) for site in task.described.sites)


def _days(days: float) -> str:
    return "never" if math.isinf(days) else f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"


def _money(task: Task, way: Way) -> str:
    return f"{way.money:,.0f} {task.described.currency}".strip()


def _memory(task: Task) -> Iterator[str]:
    """Which machines can hold what."""
    for site, plan in _first_of_each(task):
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


def lines_of(task: Task, found: Weighed) -> Iterator[str]:
    """For the screen."""
    yield f"{found.verdict}: {found.because}"
    yield ""
    width = max((len(way.name) for way in found.ways), default=0)
    for way in found.ways:
        price = f", {_money(task, way)}" if task.described.date else ""
        egress = f" ({way.egress:,.0f} of it egress)" if way.egress >= 1 else ""
        yield f"  {way.name:<{width}}  {100 * way.goodput:5.1f} %  {_days(way.days):>12}{price}{egress}"
        yield f"  {'':<{width}}  {way.why}"
    if task.described.date:
        yield f"  prices of {task.described.date}, from the file"
    yield from (f"  {line}" for line in found.memory)
