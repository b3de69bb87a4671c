"""Ways to train on the machines of a file (docs/planner.md): goodput, days and money of each, and which one to take.

Settings come from `choice.py`, goodput from the planner's chips. Bytes are those of `formulas.py`, money that of the
file's prices. Pure, but for what is drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diloco_deploy import units
from diloco_deploy.plan import formulas
from diloco_deploy.plan.choice import EVERY, EVERY_MOST, LADDER, Asked, Choice, Encodings, Link, needed_every
from diloco_deploy.plan.formulas import BITS
from diloco_planner.chips import island_timeline
from diloco_planner.described import Described, Site
from diloco_planner.ways import Sent, data_parallel, data_parallel_bits
from diloco_planner.world import LearnerPlan

HOURS = 240.0
"""That chips are drawn for."""
ALIKE = 0.02
"""Of goodput: rarely synchronising costs about as much of the loss (docs/quality.md, H = 24)."""
SLOWER = 1.1
"""One site is enough if it needs at most so many times the days of all, where no other time is asked for."""
TRAINING_BYTES = 16
"""Per parameter: weights, gradients, two moments of AdamW."""
KEPT_BYTES = 6
"""Anchor, residual and what is under way, at most (`diloco plan memory` is exact)."""


@dataclass(frozen=True)
class Way:
    """One way to train, and what it comes to."""

    name: str
    goodput: float
    tokens_per_s: float
    days: float
    money: float
    """In all; `egress` is part of it. 0 without prices."""
    egress: float
    why: str


@dataclass(frozen=True)
class Weighed:
    """All of them, the best first, and what to do."""

    ways: tuple[Way, ...]
    verdict: str
    because: str
    memory: tuple[str, ...]
    """What each site's machines can hold."""


@dataclass(frozen=True)
class Task:
    """What is to be trained, where, and by when."""

    described: Described
    learners: tuple[LearnerPlan, ...]
    params: float
    tokens: float
    days: float | None = None
    """By when; None: as soon as it is worth."""


def asked_of(task: Task, base: Asked) -> Asked:
    """The question to `choice.py`: the thinnest link decides, and the fastest step."""
    links, shards = [plan.link for plan in task.learners], task.described.shards
    thinnest = Link(min(x.up for x in links), min(x.down for x in links), max(x.round_trip_s for x in links))
    return replace(
        base,
        learners=len(task.learners),
        link=thinnest,
        step_s=min(plan.step_s for plan in task.learners),
        shards=base.shards or shards.count,
        disk=base.disk or (shards.disk_bytes_s if math.isfinite(shards.disk_bytes_s) else None),
        merge=shards.merge_bytes_s,
    )


def weigh(task: Task, asked: Asked, choice: Choice) -> Weighed:
    """`choice`: the settings that were chosen for `asked`."""
    best = _ours(task, task.learners, choice.encodings, choice.every, "decoupled, as chosen", choice.why_every)
    others = [
        _second(task, asked, choice),
        _together(task, task.learners, "data-parallel, all sites"),
        *(_alone(task, site) for site in task.described.sites if len(task.described.sites) > 1),
    ]
    ways = (best, *others)
    verdict, why = _verdict(task, ways)
    return Weighed(ways, verdict, why, tuple(_memory(task)))


def _verdict(task: Task, ways: Sequence[Way]) -> tuple[str, str]:
    ours = ways[0]
    together = next(way for way in ways if way.name == "data-parallel, all sites")
    if together.goodput >= ours.goodput - ALIKE:
        return "use data-parallel training instead", (
            f"its goodput is {100 * together.goodput:.1f} %, that of ours {100 * ours.goodput:.1f} %, and it loses "
            "nothing by synchronising rarely"
        )
    most = SLOWER * ours.days if task.days is None else task.days
    alone = [way for way in ways if way.name.startswith("only ") and way.days <= most]
    cheapest = min(alone, key=lambda way: (way.money, way.days), default=None)
    if cheapest is not None and cheapest.money <= ours.money:
        name = cheapest.name.removeprefix("only ")
        return f"one site is enough: {name}", (
            f"it needs {cheapest.days:.1f} days beside {ours.days:.1f}, for {_money(task, cheapest)} beside "
            f"{_money(task, ours)}"
        )
    if task.days is not None and ours.days > task.days:
        return "no way is fast enough", f"the fastest needs {min(w.days for w in ways):.1f} days of {task.days:g}"
    return "train decoupled, on all sites", (
        f"data-parallel training over these links and failures has a goodput of {100 * together.goodput:.1f} %, "
        f"ours {100 * ours.goodput:.1f} %"
    )


def _money(task: Task, way: Way) -> str:
    return f"{way.money:,.0f} {task.described.currency}".strip()


def _rate(learners: Sequence[LearnerPlan]) -> float:
    """Tokens per second of chips that never fail."""
    return sum(plan.tokens_per_step / plan.step_s for plan in learners)


def _ours(
    task: Task, learners: Sequence[LearnerPlan], encodings: Encodings, every: int, name: str, why: str
) -> Way:  # fmt: skip
    weights = [plan.tokens_per_step / plan.step_s for plan in learners]
    lines = [island_timeline(p.island, p.failures, HOURS * 3600, random.Random(p.name)) for p in learners]
    goodput = sum(w * line.goodput for w, line in zip(weights, lines, strict=True)) / sum(weights)
    seconds = task.tokens / (_rate(learners) * goodput)
    home, egress = _home(task), 0.0
    for plan in learners:
        site = task.described.site_of(plan.name)
        if home is None or site is None or site is home:
            continue
        up, down = (
            formulas.rate(task.params, BITS[e], every, plan.step_s) * seconds / 8e9
            for e in (encodings.push, encodings.pull)
        )
        egress += up * (site.price_egress_gb + home.price_ingress_gb)
        egress += down * (home.price_egress_gb + site.price_ingress_gb)
    shards = task.described.price_shard_hour * (task.described.shards.count or 1) * seconds / 3600
    money = _chips(task, learners, seconds) + shards + egress
    return Way(
        name, goodput, _rate(learners) * goodput, seconds / 86_400, money, egress,
        f"push {encodings.push}, pull {encodings.pull}, H = {every}: {why}",
    )  # fmt: skip


def _second(task: Task, asked: Asked, choice: Choice) -> Way:
    """The other careful encodings with the H that they need; where the last resort was chosen, twice its H."""
    other = next((rung for rung in LADDER[:2] if rung.push != choice.encodings.push), LADDER[0])
    every = max(EVERY, needed_every(asked.params_moved, other, asked.link, asked.step_s))
    why = other.price
    if every > EVERY_MOST:
        other, every, why = choice.encodings, 2 * choice.every, "half of the bytes, at the price of a larger H"
    return _ours(task, task.learners, other, every, "decoupled, second best", why)


def _together(task: Task, learners: Sequence[LearnerPlan], name: str) -> Way:
    """Data-parallel: elastic, as the better one."""
    goodput = data_parallel(learners, Sent(task.params, 0, 0, 1), HOURS * 3600, 0, elastic=True)
    seconds = task.tokens / (_rate(learners) * goodput)
    egress, steps = 0.0, task.tokens / sum(plan.tokens_per_step for plan in learners)
    sites = {site.name: site for plan in learners if (site := task.described.site_of(plan.name)) is not None}
    if len(sites) > 1:
        each = data_parallel_bits(task.params, len(sites)) * steps / 8e9
        egress = sum(each * site.price_egress_gb for site in sites.values())
    money = _chips(task, learners, seconds) + egress
    bits = data_parallel_bits(task.params, max(2, len(sites))) / min(plan.step_s for plan in learners)
    why = f"its links would have to carry {bits / 1e9:.3g} Gbit/s" if len(sites) > 1 else "no bytes leave it"
    return Way(name, goodput, _rate(learners) * goodput, seconds / 86_400, money, egress, why)


def _alone(task: Task, site: Site) -> Way:
    """All that one site has, by the better of both ways inside it, where links count for nothing."""
    learners = [
        replace(plan, link=type(plan.link)()) for plan in task.learners if task.described.site_of(plan.name) is site
    ]
    together = _together(task, learners, f"only {site.name}")
    if len(learners) == 1:
        return together
    rare = _ours(task, learners, LADDER[0], 24, f"only {site.name}", "inside one site")
    return rare if rare.goodput > together.goodput + ALIKE else together


def _home(task: Task) -> Site | None:
    sites = task.described.sites
    return next((s for s in sites if s.name == task.described.shards_at), sites[0] if sites else None)


def _chips(task: Task, learners: Sequence[LearnerPlan], seconds: float) -> float:
    total = 0.0
    for plan in learners:
        site = task.described.site_of(plan.name)
        if site is not None:
            chips = plan.island.chips + plan.island.spares * plan.island.slice_chips
            total += chips * site.price_chip_hour * seconds / 3600
    return total


def _memory(task: Task) -> Iterator[str]:
    """Which machines can hold what."""
    need = (TRAINING_BYTES + KEPT_BYTES) * task.params
    for site in task.described.sites:
        plan = next(p for p in task.learners if task.described.site_of(p.name) is site)
        if site.memory is None:
            continue
        have, least = plan.island.chips * site.memory, need / (0.7 * site.memory)
        words = f"{site.name}: a learner has {units.size(have)}, the model takes {units.size(need)}"
        if least <= 1:
            yield f"{words}: one chip holds it, beside activations"
        elif least <= plan.island.chips:
            yield f"{words}: spread it over at least {least:,.0f} chips (FSDP2, docs/islands.md)"
        else:
            most = 0.7 * have / (TRAINING_BYTES + KEPT_BYTES)
            yield f"{words}: too little; it holds {units.count(most)} parameters, or needs {least:,.0f} chips"


def lines_of(task: Task, found: Weighed) -> Iterator[str]:
    """For the screen."""
    yield f"{found.verdict}: {found.because}"
    yield ""
    width = max(len(way.name) for way in found.ways)
    for way in found.ways:
        price = f", {_money(task, way)}" if task.described.date else ""
        egress = f" ({way.egress:,.0f} of it egress)" if way.egress >= 1 else ""
        yield f"  {way.name:<{width}}  {100 * way.goodput:5.1f} %  {way.days:7.1f} days{price}{egress}"
        yield f"  {'':<{width}}  {way.why}"
    if task.described.date:
        yield f"  prices of {task.described.date}, from the file"
    yield from (f"  {line}" for line in found.memory)
