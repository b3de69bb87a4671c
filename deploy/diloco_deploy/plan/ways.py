"""Ways to train on the machines of a file (docs/planner.md), and what each comes to: goodput, days and money.

Goodput is of the planner's chips. Bytes are those of `formulas.py`, money that of the file's prices. Pure, but for what
is drawn from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from diloco_deploy.plan import formulas
from diloco_deploy.plan.choice import (
    EVERY,
    EVERY_MOST,
    LADDER,
    Asked,
    Choice,
    Encodings,
    Link,
    choose,
    needed_every,
    shards_of,
)
from diloco_deploy.plan.formulas import BITS
from diloco_planner import world
from diloco_planner.described import Described, Site
from diloco_planner.effort import changes
from diloco_planner.ways import Sent, data_parallel, data_parallel_bits
from diloco_planner.world import LearnerPlan

HOURS = 240.0
"""That chips are drawn for, at least."""
CHANGES = 5e4
"""Of chips that fail, are preempted and come back: enough to tell their share of the time."""
SEED = 0
ALIKE = 0.02
"""Of goodput: rarely synchronising costs about as much of the loss (docs/quality.md, H = 24)."""
TRAINING_BYTES = 16
"""Per parameter: weights, gradients, two moments of AdamW."""
KEPT_BYTES = 6
"""Anchor, residual and what is under way, at most (`diloco plan memory` is exact)."""
ROOM = 0.7
"""Of a chip's memory; the rest is for activations."""


@dataclass(frozen=True)
class Task:
    """What is to be trained, where, by when and for how much."""

    described: Described
    learners: tuple[LearnerPlan, ...]
    params: float
    tokens: float
    days: float | None = None
    """By when; None: as soon as it is worth."""
    budget: float | None = None
    """In the file's currency, at most."""

    @cached_property
    def able(self) -> tuple[LearnerPlan, ...]:
        """Those that can hold the model. No other takes part."""
        return tuple(plan for plan in self.learners if self.holds(plan))

    @cached_property
    def hours(self) -> float:
        """That chips are drawn for: the longer, the rarer anything happens."""
        return HOURS * max(1.0, CHANGES / changes(self.learners, HOURS * 3600))

    def holds(self, plan: LearnerPlan) -> bool:
        return self.least_chips(plan) <= plan.island.chips

    def site(self, plan: LearnerPlan) -> Site | None:
        return self.described.site_of(plan.name)

    def least_chips(self, plan: LearnerPlan) -> float:
        """That hold the model at this learner's site; 0 if its memory is not known."""
        site = self.site(plan)
        return 0.0 if site is None or site.memory is None else self.num_bytes / (ROOM * site.memory)

    @property
    def num_bytes(self) -> float:
        """Of the model, at one learner."""
        return (TRAINING_BYTES + KEPT_BYTES) * self.params


@dataclass(frozen=True)
class Way:
    """One way to train, and what it comes to."""

    name: str
    goodput: float
    tokens_per_s: float
    """When all are there."""
    days: float
    """inf: it never ends."""
    money: float
    """In all; `egress` is part of it. 0 without prices."""
    egress: float
    why: str


def decoupled(
    task: Task, learners: Sequence[LearnerPlan], encodings: Encodings, every: int, shards: int, name: str, why: str
) -> Way:  # fmt: skip
    """Shards are at home, or where all the learners are."""
    until = task.hours * 3600
    goodputs = [replace(plan, begins_s=0.0).drawn(until, plan.chance(SEED)).goodput for plan in learners]
    sites = [site for plan in learners if (site := task.site(plan)) is not None]
    home, egress = _home(task) if len({site.name for site in sites}) > 1 else None, 0.0
    for plan, goodput in zip(learners, goodputs, strict=True):
        site = task.site(plan)
        if home is None or site is None or site is home:
            continue
        up, down = (goodput * formulas.rate(task.params, BITS[e], every, plan.step_s) / 8e9 for e in encodings[:2])
        egress += up * (site.price_egress_gb + home.price_ingress_gb)
        egress += down * (home.price_egress_gb + site.price_ingress_gb)
    others = task.described.price_shard_hour * shards / 3600
    why = f"push {encodings.push}, pull {encodings.pull}, H = {every}: {why}"
    return _way(task, learners, name, goodputs, others, egress, why)


def second_best(task: Task, asked: Asked, choice: Choice) -> Way | None:
    """The other careful encodings with the H that they need; where the last resort was chosen, twice its H. None: the
    shards do not keep up with it."""
    other = next((rung for rung in LADDER[:2] if rung.push != choice.encodings.push), LADDER[0])
    every = max(EVERY, needed_every(asked.params_moved, other, asked.link, asked.step_s))
    why = other.price if every == EVERY else "larger encodings, at the price of a larger H"
    if every > EVERY_MOST:
        other, every, why = choice.encodings, 2 * choice.every, "half of the bytes, at the price of a larger H"
    shards = shards_of(asked, other, every, choice.fragments)
    if not shards.keep_up:
        return None
    return decoupled(task, task.able, other, every, shards.count, "decoupled, second best", why)


def parallel(task: Task, learners: Sequence[LearnerPlan], name: str) -> Way:
    """Data-parallel: elastic, as the better one. A step is as long as its exchange over the thinnest link."""
    first = min(plan.begins_s for plan in learners)
    there = [replace(plan, begins_s=plan.begins_s - first) for plan in learners]
    goodput = data_parallel(there, Sent(task.params, 0, 0, 1), task.hours * 3600, SEED, elastic=True)
    goodputs = [goodput] * len(learners)
    if len(learners) == 1 or not any(math.isfinite(plan.link.up) for plan in learners):
        return _way(task, learners, name, goodputs, 0.0, 0.0, "no bytes leave it")
    sites = {site.name: site for plan in learners if (site := task.site(plan)) is not None}
    bits = data_parallel_bits(task.params, len(learners))
    steps = _rate(learners) * goodput / sum(plan.tokens_per_step for plan in learners)  # per second
    prices = sum(site.price_egress_gb + site.price_ingress_gb for site in sites.values()) if len(sites) > 1 else 0.0
    why = f"its links would have to carry {bits / min(plan.step_s for plan in learners) / 1e9:.3g} Gbit/s"
    return _way(task, learners, name, goodputs, 0.0, bits * steps / 8e9 * prices, why)


def alone(task: Task, site: Site, asked: Asked) -> Way:
    """All that one site has, by the better of both ways inside it, where links count for nothing."""
    learners = [replace(plan, link=world.Link()) for plan in task.able if task.site(plan) is site]
    name = f"only {site.name}"
    in_step = parallel(task, learners, name)
    step_s = min(plan.step_s for plan in learners)
    inside = choose(replace(asked, learners=len(learners), link=Link(math.inf, math.inf), step_s=step_s))
    if len(learners) == 1 or not inside.works:
        return in_step
    rarely = decoupled(task, learners, inside.encodings, inside.every, inside.shards, name, "inside one site")
    return rarely if rarely.goodput > in_step.goodput + ALIKE else in_step


def _way(
    task: Task, learners: Sequence[LearnerPlan], name: str, goodputs: Sequence[float], other: float, egress: float,
    why: str,
) -> Way:  # fmt: skip
    """`goodputs`: of each learner. `other` and `egress`: money per second, beside that of chips."""
    ideal = [plan.tokens_per_step / plan.step_s for plan in learners]
    rates = [each * max(0.0, goodput) for each, goodput in zip(ideal, goodputs, strict=True)]
    seconds = ends_s(task.tokens, [(plan.begins_s, rate) for plan, rate in zip(learners, rates, strict=True)])
    chips = sum(price * plan.there_s(seconds) for plan in learners if (price := _chips(task, plan)))
    beside, on_links = (each * seconds if each else 0.0 for each in (other + egress, egress))
    return Way(name, sum(rates) / sum(ideal), sum(rates), seconds / 86_400, chips + beside, on_links, why)


def ends_s(tokens: float, learners: Sequence[tuple[float, float]]) -> float:
    """Seconds until so many tokens are trained. Of each learner: when it begins, and its tokens per second. inf:
    never."""
    done = rate = since = 0.0
    for begins_s, more in sorted(learners):
        if done + rate * (begins_s - since) >= tokens:
            break
        done, rate, since = done + rate * (begins_s - since), rate + more, begins_s
    return since + (tokens - done) / rate if rate else math.inf


def _rate(learners: Sequence[LearnerPlan]) -> float:
    """Tokens per second of chips that never fail."""
    return sum(plan.tokens_per_step / plan.step_s for plan in learners)


def _home(task: Task) -> Site | None:
    sites = task.described.sites
    return next((s for s in sites if s.name == task.described.shards_at), sites[0] if sites else None)


def _chips(task: Task, plan: LearnerPlan) -> float:
    """Money per second for those of a learner."""
    site = task.site(plan)
    if site is None:
        return 0.0
    return (plan.island.chips + plan.island.spares * plan.island.slice_chips) * site.price_chip_hour / 3600
