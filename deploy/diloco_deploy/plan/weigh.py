"""Which way to train on the machines of a file (docs/planner.md), and why. Settings come from `choice.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco_deploy import units
from diloco_deploy.plan.choice import EVERY_MOST, Asked, Choice, Link, bit_rate, needed_every
from diloco_deploy.plan.ways import (
    ALIKE,
    KEPT_BYTES,
    ROOM,
    TRAINING_BYTES,
    Task,
    Way,
    alone,
    decoupled,
    parallel,
    second_best,
)
from diloco_planner.described import Site
from diloco_planner.world import LearnerPlan

SLOWER = 1.1
"""One site is enough if it needs at most so many times the days of all, where no other time is asked for."""
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
    is_ours: bool
    """Whether that is training decoupled, on several sites."""
    memory: tuple[str, ...]
    """What each site's machines can hold."""


def asked_of(task: Task, base: Asked) -> Asked:
    """The question to `choice.py`: the thinnest link decides, and the fastest step, of all who can hold the model. If
    nobody can, of all."""
    learners, shards = task.able or task.learners, task.described.shards
    links = [plan.link for plan in learners]
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


def weigh(task: Task, asked: Asked, choice: Choice) -> Weighed:
    """`choice`: the settings that were chosen for `asked`. What links or memory do not allow is not among the ways."""
    memory = tuple(_memory(task))
    if not task.able:
        return Weighed((), "no machine here holds it", _what_would(task), False, False, memory)
    able = [site for site, plan in _first_of_each(task) if task.holds(plan)]
    where = "all sites" if len(able) == len(task.described.sites) else " and ".join(site.name for site in able)
    apart = [alone(task, site, asked) for site in able if len(task.described.sites) > 1]
    over = None if len(apart) == 1 else parallel(task, task.able, f"data-parallel, {where}")
    ours = None
    if over is not None and choice.works:
        name = "decoupled, as chosen"
        ours = decoupled(task, task.able, choice.encodings, choice.every, choice.shards, name, choice.why_every)
    second = None if ours is None else second_best(task, asked, choice)
    found = _verdict(task, where, ours, over, apart)
    because = [found.because, *_left_out(task), *_late(task, found.way)]
    if over is not None and not choice.fits:
        because.append(_thin(task, asked, choice))
    elif over is not None and not choice.keeps_up:
        because.append(f"not decoupled, as {_shards(choice)} {choice.why_shards.removeprefix('given, and ')}")
    ways = [way for way in (ours, second, over, *apart) if way is not None]
    is_ours = ours is not None and found.way is ours
    return Weighed(tuple(ways), found.words, "; ".join(because), found.way is not None, is_ours, memory)


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
    if ours not in cheap:
        ours = None
    best = ours or min(cheap, key=lambda way: way.days)
    if over in cheap and over is not None and _is_as_good(over, best):
        beside = f", that of ours {100 * ours.goodput:.1f} %" if ours else ""
        why = f"its goodput is {100 * over.goodput:.1f} %{beside}, and it loses nothing by synchronising rarely"
        return _Verdict("use data-parallel training instead", why, over)
    most = SLOWER * best.days if task.days is None else task.days
    enough = [way for way in apart if way in cheap and way.days <= most]
    cheapest = min(enough, key=lambda way: (way.money, way.days), default=None)
    if cheapest is not None and (ours is None or cheapest.money <= ours.money):
        why = f"it needs {_days(cheapest.days)}{f' beside {_days(ours.days)}' if ours else ''}"
        if task.described.date:
            why += f", for {_money(task, cheapest)}{f' beside {_money(task, ours)}' if ours else ''}"
        return _Verdict(f"one site is enough: {cheapest.name.removeprefix('only ')}", why, cheapest)
    assert ours is not None
    assert over is not None
    return _Verdict(f"train decoupled, on {where}", (
        f"data-parallel training over these links and failures has a goodput of {100 * over.goodput:.1f} %, "
        f"ours {100 * ours.goodput:.1f} %"
    ), ours)  # fmt: skip


def _is_as_good(over: Way, best: Way) -> bool:
    """Data-parallel training beside the best: it may take a little more time and money, as it learns a little more."""
    quick, cheap = over.days <= SLOWER * best.days, over.money <= SLOWER * best.money
    return quick and cheap and over.goodput >= best.goodput - ALIKE


def _shards(choice: Choice) -> str:
    return "1 shard is" if choice.shards == 1 else f"{choice.shards:,} shards are"


def _late(task: Task, way: Way | None) -> Iterator[str]:
    """Sites that come when all is trained."""
    for site, plan in _first_of_each(task):
        begins = plan.begins_s / 86_400
        if way is not None and begins > way.days:
            yield f"{site.name} comes after {begins:,.1f} days, when all is trained"


def _thin(task: Task, asked: Asked, choice: Choice) -> str:
    """Why nothing is decoupled."""

    def needs(plan: LearnerPlan) -> int:
        return needed_every(asked.params_moved, choice.encodings, Link(plan.link.up, plan.link.down), asked.step_s)

    worst = max(task.able, key=needs)
    site = task.site(worst)
    return (
        f"not decoupled, as the link of {worst.name if site is None else site.name} ({bit_rate(worst.link.up)} up, "
        f"{bit_rate(worst.link.down)} down) would ask for H = {needs(worst):,}, and {EVERY_MOST} is the most that we "
        "propose; find a faster link, or leave that site out"
    )


def _left_out(task: Task) -> Iterator[str]:
    """Sites that cannot hold the model."""
    for site, plan in _first_of_each(task):
        if not task.holds(plan):
            yield f"{site.name} cannot hold it: {_needs(task, site, plan)}"


def _what_would(task: Task) -> str:
    """Hold it, where nobody does: at the site that is nearest to it."""
    site, plan = min(_first_of_each(task), key=lambda one: task.least_chips(one[1]) / one[1].island.chips)
    return f"{site.name} is nearest: {_needs(task, site, plan)}"


def _needs(task: Task, site: Site, plan: LearnerPlan) -> str:
    assert site.memory is not None
    return (
        f"a learner there has {plan.island.chips:,.0f} chips of {units.size(site.memory)}, and needs "
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
            most = ROOM * have / (TRAINING_BYTES + KEPT_BYTES)
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
