"""Ways to train on the machines of a file (docs/planner.md), each with its goodput, days and cost.

Goodput comes from the planner's model of chips, bytes from `formulas.py`, costs from the file's prices. Besides
decoupled DiLoCo there are three ways: data-parallel with restarts, elastic data-parallel, and synchronous DiLoCo. These
functions are pure; randomness is drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from diloco_common import formulas
from diloco_common.formulas import BITS
from diloco_planner.chips import Failures, Island, island_timeline, preemptions
from diloco_planner.choice import INSIDE, TRAINING_BYTES, Choice, PlannedRun, choose
from diloco_planner.described import Described, Site
from diloco_planner.plans import LearnerPlan, changes

DRAWN = 500
"""Number of steps that are drawn to get the mean time of the slowest learner."""


@dataclass(frozen=True)
class Sent:
    """Traffic of training, in bits."""

    params: float
    push_bits: float
    pull_bits: float
    every: int


def data_parallel_bits(params: float, replicas: int) -> float:
    """Bits per step that a replica sends in a ring: bfloat16 gradients, once as partial sums and once as results."""
    return 2 * (replicas - 1) / replicas * BITS["bfloat16"] * params


def data_parallel(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int = 0, *, elastic: bool) -> float:
    """Goodput of all chips as one island, in which every step takes as long as that of the slowest learner. When a
    learner is away, the others go on without its tokens."""
    island, failures = together(learners, elastic=elastic)
    tokens = sum(plan.tokens_per_step for plan in learners)
    away = [  # the same preemptions as in every other way
        gone
        for plan in learners
        for gone in preemptions(plan.failures, until, plan.chance(seed), plan.tokens_per_step / tokens)
    ]
    line = island_timeline(island, failures, until, random.Random(f"dp {elastic} {seed}"), away)
    trained = tokens * max(0.0, line.goodput) * until / in_step_s(learners, sent)
    return trained / _ideal(learners, until)


def together(learners: Sequence[LearnerPlan], *, elastic: bool) -> tuple[Island, Failures]:
    """All chips as one island: their failures add up, and each pause is the longest among the learners. If elastic
    islands restart instead, their number of spares is unknown, so it is assumed to be enough."""
    chips = sum(plan.island.chips for plan in learners)
    own = elastic or not all(plan.island.elastic for plan in learners)
    island = Island(
        chips, chips / sum(plan.island.slices for plan in learners),
        spares=sum(plan.island.spares for plan in learners) if own else math.inf, elastic=elastic,
    )  # fmt: skip
    mtbi_s = chips / sum(plan.island.chips / plan.failures.mtbi_s for plan in learners)
    longest = {
        name: max(getattr(plan.failures, name) for plan in learners)
        for name in ("repair_s", "loss_s", "join_s", "restart_s", "checkpoint_s")
    }
    return island, replace(learners[0].failures, mtbi_s=mtbi_s, **longest)


def in_step_s(learners: Sequence[LearnerPlan], sent: Sent) -> float:
    """Seconds that a data-parallel step takes on the slowest machine, or over the thinnest link. A site sums its
    gradients, and each of its links carries a part of the sums."""
    chance = random.Random(0)
    worst = sum(max(_step(plan, chance) for plan in learners) for _ in range(DRAWN)) / DRAWN
    of_site = Counter(plan.site or plan.name for plan in learners)
    if len(of_site) == 1:
        return worst
    bits = {name: data_parallel_bits(sent.params, len(of_site)) / many for name, many in of_site.items()}
    over_link = max(
        bits[plan.site or plan.name] / min(plan.link.up, plan.link.down) + 2 * plan.link.round_trip_s
        for plan in learners
    )
    return max(worst, over_link)  # the exchange is hidden behind the step as far as it fits


def _step(plan: LearnerPlan, chance: random.Random) -> float:
    return max(0.05, 1 + plan.noise * chance.gauss(0, 1)) * plan.step_s


def synchronous(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> float:
    """Goodput of synchronous DiLoCo: every H steps, all learners wait for the slowest one and for every transfer."""
    chance = random.Random(f"sync {seed}")
    lines = [plan.drawn(until, plan.chance(seed)) for plan in learners]
    waits_s = max(
        sent.params * (sent.push_bits / link.up + sent.pull_bits / link.down) + 2 * link.round_trip_s
        for link in (plan.to_shards for plan in learners)
    )
    now = trained = 0.0
    while now < until:
        ends = now
        for plan, line in zip(learners, lines, strict=True):
            noise = plan.noise * math.sqrt(sent.every) * chance.gauss(0, 1)
            steps_s = max(0.05, sent.every + noise) * plan.step_s
            begun = line.work_at(now)
            ends = max(ends, line.at_work(begun + steps_s))
            done = min(begun + steps_s, line.work_at(until))
            steps = (line.trained_at(done) - line.trained_at(begun)) / steps_s * sent.every
            trained += steps * plan.tokens_per_step
        now = ends + waits_s
    return trained / _ideal(learners, until)


def _ideal(learners: Sequence[LearnerPlan], until: float) -> float:
    """Tokens that learners would train if their chips never failed."""
    return sum(plan.tokens_per_step * until / plan.step_s for plan in learners)


def baselines(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> dict[str, float]:
    """Goodput of each of the other three ways."""
    return {
        "dp_restart": data_parallel(learners, sent, until, seed, elastic=False),
        "dp_elastic": data_parallel(learners, sent, until, seed, elastic=True),
        "diloco_sync": synchronous(learners, sent, until, seed),
    }


HOURS = 240.0
"""Minimum time for which chips are drawn."""
CHANGES = 2e4
"""Number of failures, preemptions and returns of chips that is enough to estimate the share of time that is lost."""
ALIKE = 0.02
"""Differences of goodput up to this share are ignored: synchronizing rarely costs about as much in loss
(docs/quality.md, H = 24)."""
KEPT_BYTES, KEPT_WITH_COMPANIONS = 6, 10
"""Maximum number of bytes per parameter for anchor, residual and work in flight."""
ROOM = 0.7
"""Usable share of a chip's memory; the rest is for activations."""


@dataclass(frozen=True)
class PlannedTask:
    """What to train, where, by when and for how much money."""

    described: Described
    learners: tuple[LearnerPlan, ...]
    params: float
    tokens: float
    days: float | None = None
    """The deadline. None: there is none."""
    budget: float | None = None
    """Budget, in the file's currency."""
    has_companions: bool = False
    """Whether momentum is averaged, too."""

    @cached_property
    def able(self) -> tuple[LearnerPlan, ...]:
        """Learners that can hold the model. The others do not take part."""
        return tuple(plan for plan in self.learners if self.holds(plan))

    @cached_property
    def hours(self) -> float:
        """Time for which chips are drawn. If events are rarer, it is longer."""
        return HOURS * max(1.0, CHANGES / changes(self.learners, HOURS * 3600))

    def holds(self, plan: LearnerPlan) -> bool:
        return self.least_chips(plan) <= plan.island.chips

    def allows(self, way: TrainingMethod) -> bool:
        """Whether a way is in time, and within the budget."""
        in_time = self.days is None or way.days <= self.days
        return in_time and (self.budget is None or way.money <= self.budget)

    def of(self, sites: Sequence[str]) -> list[LearnerPlan]:
        """The learners of these sites that can hold the model."""
        names = set(sites)
        return [plan for plan in self.able if plan.site in names]

    def first_of_each(self) -> Iterator[tuple[Site, LearnerPlan]]:
        """Each site with its first learner; all learners of a site are alike."""
        first = {plan.site: plan for plan in reversed(self.learners)}
        return ((site, first[site.name]) for site in self.described.sites)

    def site(self, plan: LearnerPlan) -> Site | None:
        return self.described.site_of(plan.name)

    def least_chips(self, plan: LearnerPlan) -> float:
        """Minimum number of chips that hold the model at this learner's site. 0: their memory is not known."""
        site = self.site(plan)
        return 0.0 if site is None or site.memory is None else self.num_bytes / (ROOM * site.memory)

    @property
    def bytes_per_parameter(self) -> float:
        return TRAINING_BYTES + (KEPT_WITH_COMPANIONS if self.has_companions else KEPT_BYTES)

    @property
    def num_bytes(self) -> float:
        """Bytes that the model takes at one learner."""
        return self.bytes_per_parameter * self.params


@dataclass(frozen=True)
class TrainingMethod:
    name: str
    goodput: float
    tokens_per_s: float
    days: float
    """inf: the training never ends."""
    money: float
    """Total cost, including `egress`; 0 without prices."""
    egress: float
    why: str
    settled: tuple[PlannedRun, Choice] | None = None
    """The question and the chosen settings, if the learners train decoupled."""


def decoupled(
    task: PlannedTask, learners: Sequence[LearnerPlan], asked: PlannedRun, choice: Choice, name: str, why: str
) -> TrainingMethod:
    """Decoupled training. The shards are at their home site, or where all learners are. Each learner sends at its own
    pace, and receives versions at the pace of the fastest learner."""
    encodings, every, until = choice.encodings, choice.every, task.hours * 3600
    crosses, fastest_s = len({plan.site for plan in learners}) > 1, min(plan.step_s for plan in learners)

    rate = egress_per_s = 0.0
    for plan in learners:
        goodput = plan.drawn(until, plan.chance()).computed
        rate += goodput * plan.tokens_per_step / plan.step_s
        if crosses:
            prices = task.described.per_gb(plan)
            paces = zip(encodings, (plan.step_s, fastest_s), strict=True)
            moved = (formulas.rate(asked.params_moved, BITS[e], every, step_s) / 8e9 for e, step_s in paces)
            egress_per_s += goodput * sum(gb * price for gb, price in zip(moved, prices, strict=True))
    why = f"push {encodings.push}, pull {encodings.pull}, H = {every}: {why}"
    shards = task.described.price_shard_hour * choice.shards / 3600
    return _way(task, learners, name, rate, egress_per_s, shards, why, (asked, choice))


def parallel(task: PlannedTask, learners: Sequence[LearnerPlan], name: str) -> TrainingMethod:
    """Data-parallel training, elastic if all islands are. A step waits for its exchange over the thinnest link."""
    elastic, sent = all(plan.island.elastic for plan in learners), Sent(task.params, 0, 0, 1)
    rate = _rate(learners) * data_parallel(learners, sent, task.hours * 3600, elastic=elastic)
    sites = {site.name: site for plan in learners if (site := task.site(plan)) is not None}
    why, egress_per_s = "no bytes leave it", 0.0
    if len(sites) > 1:
        gb = data_parallel_bits(task.params, len(sites)) / 8e9  # per site and step
        per_gb = sum(site.price_egress_gb + site.price_ingress_gb for site in sites.values())
        egress_per_s = gb * per_gb * rate / sum(plan.tokens_per_step for plan in learners)
        gbit = 8 * gb / max(plan.step_s for plan in learners)
        why = f"the links of a site would have to carry {gbit:.3g} Gbit/s together"
    return _way(task, learners, name, rate, egress_per_s, 0.0, why)


def alone(task: PlannedTask, site: Site, asked: PlannedRun) -> TrainingMethod:
    """One site alone, with the better of both ways. Links inside it cost nothing. `asked`: the question for it."""
    learners, name = task.of([site.name]), f"only {site.name}"
    in_step = parallel(task, learners, name)
    inside = replace(asked, link=INSIDE)
    choice = choose(inside)
    if len(learners) == 1 or not choice.fits:
        return in_step
    rarely = decoupled(task, learners, inside, choice, name, "inside one site")
    return rarely if rarely.goodput > in_step.goodput + ALIKE else in_step


def _way(
    task: PlannedTask, learners: Sequence[LearnerPlan], name: str, rate: float, egress_per_s: float,
    shards_per_s: float, why: str, settled: tuple[PlannedRun, Choice] | None = None,
) -> TrainingMethod:  # fmt: skip
    """`rate`: tokens per second. `egress_per_s`, `shards_per_s`: costs per second."""
    seconds = task.tokens / rate if rate else math.inf
    egress = _times(egress_per_s, seconds)
    chips_per_s = sum(task.described.chips_hour(plan) for plan in learners) / 3600
    spent = egress + _times(shards_per_s + chips_per_s, seconds)
    return TrainingMethod(name, rate / _rate(learners), rate, seconds / 86_400, spent, egress, why, settled)


def _times(price: float, amount: float) -> float:
    """`price` times `amount`. An infinite amount of something free costs nothing."""
    return price * amount if price else 0.0


def _rate(learners: Sequence[LearnerPlan]) -> float:
    """Tokens per second if chips never failed."""
    return sum(plan.tokens_per_step / plan.step_s for plan in learners)
