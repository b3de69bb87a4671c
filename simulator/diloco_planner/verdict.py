"""The recommendation: data-parallel, one site, or decoupled training (docs/planner.md), by goodput, days and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_planner.proposed import ALIKE, PlannedTask, Way

SLOWER = 1.1
"""Without a deadline, one site is enough if it takes at most this many times as long as all."""
SOME = 0.01
"""Least goodput of a way that trains anything at all."""


class PlanVerdict(NamedTuple):
    words: str
    because: str
    way: Way | None = None
    """None: none works."""


def verdict_of(task: PlannedTask, where: str, ours: Way | None, over: Way | None, apart: Sequence[Way]) -> PlanVerdict:
    """`over`: data-parallel over all links; `apart`: each site alone. None: that way is not possible."""
    some = [way for way in (ours, over, *apart) if way is not None and way.goodput >= SOME]
    if not some:
        why = f"each has a goodput below {100 * SOME:g} %, by its links or its failures"
        return PlanVerdict("no way works", why)
    quick = [way for way in some if task.days is None or way.days <= task.days]
    if not quick:
        why = f"the fastest needs {days_of(min(way.days for way in some))}, and {task.days:g} days are there"
        return PlanVerdict("no way is fast enough", why)
    cheap = [way for way in quick if task.budget is None or way.money <= task.budget]
    if not cheap:
        assert task.budget is not None
        least = money_of(task, min(quick, key=lambda way: way.money))
        why = f"the cheapest{' that is in time' if task.days else ''} takes {least}, {task.budget:,.0f} are there"
        return PlanVerdict("no way is within the budget", why)
    ours = ours if ours in cheap else None
    best = ours or min(cheap, key=lambda way: way.days)
    as_good = over if over is not None and over in cheap and _is_as_good(task, over, best) else None
    rivals = [way for way in (ours, as_good) if way is not None]
    most = task.begins_days + SLOWER * (best.days - task.begins_days) if task.days is None else task.days
    enough = [way for way in apart if way in cheap and way.days <= most]
    site = min(enough, key=lambda way: (way.money, way.days), default=None)
    if site is not None and all(site.money <= way.money for way in rivals):
        return PlanVerdict(_words_of_one(task, site), _beside(task, site, rivals), site)
    if as_good is not None:
        beside = f", that of ours {100 * ours.goodput:.1f} %" if ours else ""
        why = f"its goodput is {100 * as_good.goodput:.1f} %{beside}, and it loses nothing by synchronising rarely"
        on = "" if where == "all sites" else f", on {where}"
        return PlanVerdict(f"use data-parallel training instead{on}", why, as_good)
    assert ours is not None
    assert over is not None
    return PlanVerdict(f"train decoupled, on {where}", (
        f"data-parallel training over these links and failures has a goodput of {100 * over.goodput:.1f} %, "
        f"ours {100 * ours.goodput:.1f} %"
    ), ours)  # fmt: skip


def _words_of_one(task: PlannedTask, way: Way) -> str:
    """The recommendation if there is only one site."""
    name = way.name.removeprefix("only ")
    if len(task.described.sites) > 1:
        return f"one site is enough: {name}"
    return "use data-parallel training instead" if way.settled is None else f"train decoupled, inside {name}"


def _beside(task: PlannedTask, way: Way, rivals: Sequence[Way]) -> str:
    """Days and cost of a way, compared with those of others."""
    days = [days_of(one.days) for one in (way, *rivals[:1])]
    prices = [money_of(task, one) for one in (way, *rivals[:1])]
    return f"it needs {' beside '.join(days)}" + (f", for {' beside '.join(prices)}" if task.described.date else "")


def _is_as_good(task: PlannedTask, over: Way, best: Way) -> bool:
    """Whether data-parallel is as good as the best way. As it learns a little more, it may take a little more."""
    quick = over.days - task.begins_days <= SLOWER * (best.days - task.begins_days)
    cheap = over.money <= SLOWER * best.money
    return quick and cheap and over.goodput >= best.goodput - ALIKE


def days_of(days: float) -> str:
    return "never" if math.isinf(days) else f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"


def money_of(task: PlannedTask, way: Way) -> str:
    return f"{way.money:,.0f} {task.described.currency}".strip()
