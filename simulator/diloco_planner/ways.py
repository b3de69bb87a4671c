"""Four ways to train on the same chips: data-parallel with restarts or elastic, synchronous DiLoCo, and ours.

Islands of the first three are those of `chips.py`. What each sends decides how long a step waits for its link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diloco_planner.chips import Away, Island, island_timeline, preemptions
from diloco_planner.world import LearnerPlan

SPARES_ENOUGH = 10**9
GRADIENT_BITS = 16
"""Per parameter, as data-parallel training sends them."""


@dataclass(frozen=True)
class Sent:
    """What training moves, in bits."""

    params: float
    push_bits: float
    pull_bits: float
    every: int


def data_parallel_bits(params: float, replicas: int) -> float:
    """Of one replica in one direction at each step, by a ring: it sends its gradients once as sums, once as results."""
    return 2 * (replicas - 1) / replicas * GRADIENT_BITS * params


def data_parallel(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int, *, elastic: bool) -> float:
    """Goodput of all chips as one island, whose every step is as long as that of the slowest. Where a learner is not
    there, the others go on without its chips."""
    chips = sum(plan.island.chips for plan in learners)
    first, spares = learners[0], sum(plan.island.spares for plan in learners)
    island = replace(first.island, chips=chips, elastic=elastic, spares=spares if elastic else SPARES_ENOUGH)
    away = [gone for plan in learners for gone in _away(plan, plan.island.chips / chips, until, seed)]
    line = island_timeline(island, first.failures, until, random.Random(f"dp {elastic} {seed}"), away)
    most = sum(plan.island.chips / chips * plan.there_s(until) for plan in learners)
    return line.goodput * until / most * data_parallel_pace(learners, sent) if most else 0.0


def _away(plan: LearnerPlan, share: float, until: float, seed: int) -> Iterator[Away]:
    if plan.begins_s:
        yield Away(0.0, plan.begins_s, share)
    for gone in preemptions(plan.failures, plan.there_s(until), random.Random(f"away {seed} {plan.name}"), share):
        yield replace(gone, begins_s=plan.begins_s + gone.begins_s, ends_s=plan.begins_s + gone.ends_s)


def data_parallel_pace(learners: Sequence[LearnerPlan], sent: Sent) -> float:
    """How fast it goes beside learners that wait for nobody: by the slowest machine and the thinnest link."""
    ideal = sum(1 / plan.step_s for plan in learners) / len(learners)
    chance = random.Random(0)
    worst = sum(max(_step(plan, chance) for plan in learners) for _ in range(500)) / 500
    bits = data_parallel_bits(sent.params, len(learners))
    over_link = max(bits / min(plan.link.up, plan.link.down) + 2 * plan.link.round_trip_s for plan in learners)
    on_its_way = over_link if len(learners) > 1 and math.isfinite(bits / learners[0].link.up) and over_link > 0 else 0.0
    return 1 / max(worst, on_its_way) / ideal  # the exchange is hidden behind the step, as far as it fits


def _step(plan: LearnerPlan, chance: random.Random) -> float:
    return max(0.05, 1 + plan.noise * chance.gauss(0, 1)) * plan.step_s


def synchronous(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> float:
    """Goodput of DiLoCo: every H steps all wait for the last one, and for what is sent, all at once."""
    chance = random.Random(f"sync {seed}")
    lines = [
        island_timeline(plan.island, plan.failures, until, random.Random(f"{seed} {plan.name}")) for plan in learners
    ]
    waits_s = max(
        sent.params * (sent.push_bits / plan.link.up + sent.pull_bits / plan.link.down) + 2 * plan.link.round_trip_s
        for plan in learners
    )
    now, trained = min(plan.begins_s for plan in learners), 0.0
    while now < until:
        ends = now
        for plan, line in zip(learners, lines, strict=True):
            if plan.begins_s > now:
                continue
            steps_s = sent.every * plan.step_s
            steps_s += plan.noise * plan.step_s * math.sqrt(sent.every) * chance.gauss(0, 1)
            work, steps_s = line.work_at(now - plan.begins_s), max(0.05 * plan.step_s, steps_s)
            ends = max(ends, plan.begins_s + line.at_work(work + steps_s))
            if math.isinf(ends):
                return trained / _ideal(learners, until)
            trained += (line.trained_at(work + steps_s) - line.trained_at(work)) / steps_s * sent.every
        now = ends + waits_s
    return trained / _ideal(learners, now)


def _ideal(learners: Sequence[LearnerPlan], until: float) -> float:
    """Steps of learners that never fail."""
    return sum(plan.there_s(until) / plan.step_s for plan in learners) or math.inf


def baselines(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> dict[str, float]:
    """Goodput of each of the others."""
    return {
        "dp_restart": data_parallel(learners, sent, until, seed, elastic=False),
        "dp_elastic": data_parallel(learners, sent, until, seed, elastic=True),
        "diloco_sync": synchronous(learners, sent, until, seed),
    }


def decoupled(chips: float, learners: int, template: LearnerPlan, hours: float, seed: int) -> float:
    """Goodput of ours, without the cores: no learner waits for anybody, so chips alone decide it."""
    island = replace(template.island, chips=chips / learners)
    lines = [
        island_timeline(island, template.failures, hours * 3600, random.Random(f"{seed} {chips} {learners} {i}"))
        for i in range(learners)
    ]
    return sum(line.goodput for line in lines) / learners


def one_island(chips: float, template: LearnerPlan, hours: float, seed: int, *, elastic: bool) -> float:
    """Goodput of data-parallel training in one place, which its links do not slow down."""
    island: Island = replace(template.island, chips=chips)
    return data_parallel([replace(template, island=island)], Sent(0, 0, 0, 1), hours * 3600, seed, elastic=elastic)
