"""Ways to train on the machines of a file (docs/planner.md), and what each comes to: goodput, days and money.

Goodput is of the planner's chips. Bytes are those of `formulas.py`, money that of the file's prices. Pure, but for what
is drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from diloco_deploy.plan import formulas
from diloco_deploy.plan.choice import EVERY, EVERY_MOST, LADDER, Asked, Choice, Encodings, needed_every
from diloco_deploy.plan.formulas import BITS
from diloco_planner.chips import island_timeline
from diloco_planner.described import Described, Site
from diloco_planner.ways import Sent, data_parallel, data_parallel_bits
from diloco_planner.world import LearnerPlan

HOURS = 240.0
"""That chips are drawn for."""
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
    days: float
    """inf: it never ends."""
    money: float
    """In all; `egress` is part of it. 0 without prices."""
    egress: float
    why: str


def decoupled(
    task: Task, learners: Sequence[LearnerPlan], choice: Choice, encodings: Encodings, every: int, name: str, why: str
) -> Way:  # fmt: skip
    """Shards are as many as were chosen. They are at home, or where all the learners are."""
    weights = [plan.tokens_per_step / plan.step_s for plan in learners]
    lines = [island_timeline(p.island, p.failures, HOURS * 3600, random.Random(p.name)) for p in learners]
    goodput = sum(w * line.goodput for w, line in zip(weights, lines, strict=True)) / sum(weights)
    sites = [site for plan in learners if (site := task.site(plan)) is not None]
    home, egress = _home(task) if len({site.name for site in sites}) > 1 else None, 0.0
    for plan in learners:
        site = task.site(plan)
        if home is None or site is None or site is home:
            continue
        up, down = (formulas.rate(task.params, BITS[e], every, plan.step_s) / 8e9 for e in encodings[:2])
        egress += up * (site.price_egress_gb + home.price_ingress_gb)
        egress += down * (home.price_egress_gb + site.price_ingress_gb)
    shards = task.described.price_shard_hour * choice.shards / 3600
    why = f"push {encodings.push}, pull {encodings.pull}, H = {every}: {why}"
    return _way(task, learners, name, goodput, shards, egress, why)


def second_best(task: Task, asked: Asked, choice: Choice) -> Way:
    """The other careful encodings with the H that they need; where the last resort was chosen, twice its H."""
    other = next((rung for rung in LADDER[:2] if rung.push != choice.encodings.push), LADDER[0])
    every = max(EVERY, needed_every(asked.params_moved, other, asked.link, asked.step_s))
    why = other.price
    if every > EVERY_MOST:
        other, every, why = choice.encodings, 2 * choice.every, "half of the bytes, at the price of a larger H"
    return decoupled(task, task.able, choice, other, every, "decoupled, second best", why)


def parallel(task: Task, learners: Sequence[LearnerPlan], name: str) -> Way:
    """Data-parallel: elastic, as the better one. A step is as long as its exchange over the thinnest link."""
    goodput = data_parallel(learners, Sent(task.params, 0, 0, 1), HOURS * 3600, 0, elastic=True)
    if len(learners) == 1 or not any(math.isfinite(plan.link.up) for plan in learners):
        return _way(task, learners, name, goodput, 0.0, 0.0, "no bytes leave it")
    sites = {site.name: site for plan in learners if (site := task.site(plan)) is not None}
    bits, crosses = data_parallel_bits(task.params, max(2, len(sites))), len(sites) > 1
    steps = _rate(learners) * goodput / sum(plan.tokens_per_step for plan in learners)  # per second
    egress = sum(bits * steps / 8e9 * site.price_egress_gb for site in sites.values()) if crosses else 0.0
    why = f"its links would have to carry {bits / min(plan.step_s for plan in learners) / 1e9:.3g} Gbit/s"
    return _way(task, learners, name, goodput, 0.0, egress, why)


def alone(task: Task, site: Site, choice: Choice) -> Way:
    """All that one site has, by the better of both ways inside it, where links count for nothing."""
    learners = [replace(plan, link=type(plan.link)()) for plan in task.able if task.site(plan) is site]
    in_step = parallel(task, learners, f"only {site.name}")
    if len(learners) == 1:
        return in_step
    rarely = decoupled(task, learners, choice, LADDER[0], EVERY, f"only {site.name}", "inside one site")
    return rarely if rarely.goodput > in_step.goodput + ALIKE else in_step


def _way(
    task: Task, learners: Sequence[LearnerPlan], name: str, goodput: float, other: float, egress: float, why: str
) -> Way:  # fmt: skip
    """`other` and `egress`: money per second, beside that of chips."""
    rate = _rate(learners) * max(0.0, goodput)
    seconds = task.tokens / rate if rate else math.inf
    money, on_links = (each * seconds if each else 0.0 for each in (_chips(task, learners) + other + egress, egress))
    return Way(name, max(0.0, goodput), rate, seconds / 86_400, money, on_links, why)


def _rate(learners: Sequence[LearnerPlan]) -> float:
    """Tokens per second of chips that never fail."""
    return sum(plan.tokens_per_step / plan.step_s for plan in learners)


def _home(task: Task) -> Site | None:
    sites = task.described.sites
    return next((s for s in sites if s.name == task.described.shards_at), sites[0] if sites else None)


def _chips(task: Task, learners: Sequence[LearnerPlan]) -> float:
    """Money per second."""
    total = 0.0
    for plan in learners:
        site = task.site(plan)
        if site is not None:
            chips = plan.island.chips + plan.island.spares * plan.island.slice_chips
            total += chips * site.price_chip_hour / 3600
    return total
