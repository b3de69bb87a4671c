"""Ways to train on the machines of a file (docs/planner.md), each with its goodput, days and cost.

Goodput comes from the planner's model of chips, bytes from `formulas.py`, costs from the file's prices. Pure, except
for what is drawn from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from diloco_common import formulas
from diloco_common.formulas import BITS
from diloco_planner.choice import INSIDE, TRAINING_BYTES, Choice, PlannedRun, choose
from diloco_planner.described import Described, Site
from diloco_planner.plans import LearnerPlan, changes
from diloco_planner.ways import Sent, data_parallel, data_parallel_bits

HOURS = 240.0
"""Least time for which chips are drawn."""
CHANGES = 2e4
"""Failures, preemptions and returns of chips that are enough to tell the share of time that is lost."""
PHASES = 20
"""Most different times at which sites start."""
ALIKE = 0.02
"""As a share of goodput: synchronizing rarely costs about as much in loss (docs/quality.md, H = 24)."""
KEPT_BYTES, KEPT_WITH_COMPANIONS = 6, 10
"""Most bytes per parameter of anchor, residual and what is in flight (`diloco plan memory` is exact)."""
ROOM = 0.7
"""Usable share of a chip's memory; the rest is for activations."""


@dataclass(frozen=True)
class PlannedTask:
    """What to train, where, by when and for how much."""

    described: Described
    learners: tuple[LearnerPlan, ...]
    params: float
    tokens: float
    days: float | None = None
    """Deadline; None: there is none."""
    budget: float | None = None
    """Most to spend, in the file's currency."""
    has_companions: bool = False
    """Whether momentum is averaged, too."""

    @cached_property
    def able(self) -> tuple[LearnerPlan, ...]:
        """Learners that can hold the model. No others take part."""
        return tuple(plan for plan in self.learners if self.holds(plan))

    @cached_property
    def hours(self) -> float:
        """Time for which chips are drawn: longer if events are rarer."""
        return HOURS * max(1.0, CHANGES / changes(self.learners, HOURS * 3600))

    @cached_property
    def begins_days(self) -> float:
        """When the first learner starts."""
        return min(plan.begins_s for plan in self.able) / 86_400

    def holds(self, plan: LearnerPlan) -> bool:
        return self.least_chips(plan) <= plan.island.chips

    def of(self, sites: Sequence[str]) -> list[LearnerPlan]:
        """The learners of these sites that can hold the model."""
        names = set(sites)
        return [plan for plan in self.able if plan.site in names]

    def first_of_each(self) -> Iterator[tuple[Site, LearnerPlan]]:
        """Each site with one of its learners, which are all alike."""
        first = {plan.site: plan for plan in reversed(self.learners)}
        return ((site, first[site.name]) for site in self.described.sites)

    def site(self, plan: LearnerPlan) -> Site | None:
        return self.described.site_of(plan.name)

    def least_chips(self, plan: LearnerPlan) -> float:
        """Fewest chips that hold the model at this learner's site; 0 if their memory is not known."""
        site = self.site(plan)
        return 0.0 if site is None or site.memory is None else self.num_bytes / (ROOM * site.memory)

    @property
    def bytes_per_parameter(self) -> float:
        return TRAINING_BYTES + (KEPT_WITH_COMPANIONS if self.has_companions else KEPT_BYTES)

    @property
    def num_bytes(self) -> float:
        """Bytes of the model at one learner."""
        return self.bytes_per_parameter * self.params


@dataclass(frozen=True)
class Way:
    name: str
    goodput: float
    """Once all sites have started."""
    tokens_per_s: float
    days: float
    """inf: it never ends."""
    money: float
    """Total cost, including `egress`; 0 without prices."""
    egress: float
    why: str
    settled: tuple[PlannedRun, Choice] | None = None
    """The question and the chosen settings, if learners train decoupled."""


class PlannedPhase(NamedTuple):
    """From one start of a site to the next."""

    since_s: float
    tokens_per_s: float
    egress_per_s: float = 0.0
    """Cost of egress per second."""


def decoupled(
    task: PlannedTask, learners: Sequence[LearnerPlan], asked: PlannedRun, choice: Choice, name: str, why: str
) -> Way:
    """Decoupled training, with shards at their home site, or where all learners are. Each learner sends at its own
    pace, and receives the versions that the fastest one causes."""
    encodings, every, until = choice.encodings, choice.every, task.hours * 3600
    crosses, fastest_s = len({plan.site for plan in learners}) > 1, min(plan.step_s for plan in learners)

    def joins(plan: LearnerPlan) -> PlannedPhase:
        goodput = replace(plan, begins_s=0.0).drawn(until, plan.chance()).computed
        egress = 0.0
        if crosses:
            prices = task.described.per_gb(plan)
            paces = zip(encodings, (plan.step_s, fastest_s), strict=True)
            moved = (formulas.rate(asked.params_moved, BITS[e], every, step_s) / 8e9 for e, step_s in paces)
            egress = goodput * sum(gb * price for gb, price in zip(moved, prices, strict=True))
        return PlannedPhase(plan.begins_s, goodput * plan.tokens_per_step / plan.step_s, egress)

    phases = accumulate(
        sorted(map(joins, learners)),
        lambda all_of_them, more: PlannedPhase(
            more.since_s, all_of_them.tokens_per_s + more.tokens_per_s, all_of_them.egress_per_s + more.egress_per_s
        ),
    )
    why = f"push {encodings.push}, pull {encodings.pull}, H = {every}: {why}"
    shards = task.described.price_shard_hour * choice.shards / 3600
    return _way(task, learners, name, list(phases), shards, why, (asked, choice))


def parallel(task: PlannedTask, learners: Sequence[LearnerPlan], name: str) -> Way:
    """Data-parallel training, elastic if all islands are. A step takes as long as its exchange over the thinnest link.
    A site takes part once it starts; if many start one by one, soon after."""
    elastic, sent = all(plan.island.elastic for plan in learners), Sent(task.params, 0, 0, 1)

    def since(begins_s: float) -> PlannedPhase:
        there = [replace(plan, begins_s=0.0) for plan in learners if plan.begins_s <= begins_s]
        rate = _rate(there) * data_parallel(there, sent, task.hours * 3600, elastic=elastic)
        sites = {site.name: site for plan in there if (site := task.site(plan)) is not None}
        gb = data_parallel_bits(task.params, len(sites)) / 8e9 if len(sites) > 1 else 0.0  # of each site, per step
        per_gb = sum(site.price_egress_gb + site.price_ingress_gb for site in sites.values())
        return PlannedPhase(begins_s, rate, gb * per_gb * rate / sum(plan.tokens_per_step for plan in there))

    why, sites = "no bytes leave it", len({plan.site for plan in learners})
    if sites > 1:
        gbit = data_parallel_bits(task.params, sites) / max(plan.step_s for plan in learners) / 1e9
        why = f"the links of a site would have to carry {gbit:.3g} Gbit/s together"
    comes = sorted({plan.begins_s for plan in learners})
    looked_at = sorted({*comes[:: math.ceil(len(comes) / PHASES)], comes[-1]})
    return _way(task, learners, name, [since(at) for at in looked_at], 0.0, why)


def alone(task: PlannedTask, site: Site, asked: PlannedRun) -> Way:
    """One site alone, by the better of both ways inside it, where links cost nothing. `asked`: the plan for it."""
    learners, name = task.of([site.name]), f"only {site.name}"
    in_step = parallel(task, learners, name)
    inside = replace(asked, link=INSIDE)
    choice = choose(inside)
    if len(learners) == 1 or not choice.fits:
        return in_step
    rarely = decoupled(task, learners, inside, choice, name, "inside one site")
    return rarely if rarely.goodput > in_step.goodput + ALIKE else in_step


def _way(
    task: PlannedTask, learners: Sequence[LearnerPlan], name: str, phases: Sequence[PlannedPhase], shards: float,
    why: str, settled: tuple[PlannedRun, Choice] | None = None,
) -> Way:  # fmt: skip
    """`shards`: cost per second."""
    seconds, egress = ends(task.tokens, phases)
    spent = egress + _times(shards, seconds - phases[0].since_s)
    spent += sum(_times(task.described.chips_hour(plan), plan.there_s(seconds) / 3600) for plan in learners)
    rate = phases[-1].tokens_per_s
    return Way(name, rate / _rate(learners), rate, seconds / 86_400, spent, egress, why, settled)


def ends(tokens: float, phases: Sequence[PlannedPhase]) -> tuple[float, float]:
    """Seconds until this many tokens are trained (inf: never), and the cost of egress."""
    done = egress = 0.0
    for phase, following in pairwise([*phases, PlannedPhase(math.inf, 0.0)]):
        lasts_s = following.since_s - phase.since_s
        left_s = (tokens - done) / phase.tokens_per_s if phase.tokens_per_s else math.inf
        egress += _times(phase.egress_per_s, min(left_s, lasts_s))
        if left_s <= lasts_s:
            return phase.since_s + left_s, egress
        done += phase.tokens_per_s * lasts_s
    raise AssertionError("the last phase has no end")


def _times(price: float, amount: float) -> float:
    """`price` times `amount`; an endless amount of something free costs nothing."""
    return price * amount if price else 0.0


def _rate(learners: Sequence[LearnerPlan]) -> float:
    """Tokens per second if chips never failed."""
    return sum(plan.tokens_per_step / plan.step_s for plan in learners)
