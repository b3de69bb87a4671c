"""Four ways to train on the same chips: data-parallel with restarts or elastic, synchronous DiLoCo, and ours.

Islands of the first three are those of `chips.py`. What each sends decides how long a step waits for its link.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diloco_planner.chips import Away, Failures, Island, island_timeline, preemptions
from diloco_planner.plans import LearnerPlan

SPARES_ENOUGH = 10**9
GRADIENT_BITS = 16
"""Per parameter, as data-parallel training sends them."""
DRAWN = 500
"""Steps, for the mean of the slowest."""


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
    there, the others go on without its tokens."""
    island, failures = together(learners, elastic=elastic)
    tokens = sum(plan.tokens_per_step for plan in learners)
    away = [gone for plan in learners for gone in _away(plan, plan.tokens_per_step / tokens, until, seed)]
    line = island_timeline(island, failures, until, random.Random(f"dp {elastic} {seed}"), away)
    trained = tokens * max(0.0, line.goodput) * until / in_step_s(learners, sent)
    return trained / _ideal(learners, until)


def together(learners: Sequence[LearnerPlan], *, elastic: bool) -> tuple[Island, Failures]:
    """All chips as one island: their failures add up, and each pause is as long as the longest. Where it restarts and
    would be elastic, nobody has said how many spares there are: enough."""
    chips = sum(plan.island.chips for plan in learners)
    own = elastic or not all(plan.island.elastic for plan in learners)
    island = Island(
        chips, chips / sum(plan.island.slices for plan in learners),
        spares=sum(plan.island.spares for plan in learners) if own else SPARES_ENOUGH, elastic=elastic,
    )  # fmt: skip
    often = {
        name: sum(plan.island.chips / getattr(plan.failures, name) for plan in learners) / chips
        for name in ("mtbi_s", "slow_every_s")
    }
    every = {name: 1 / per_s if per_s else math.inf for name, per_s in often.items()}
    longest = {
        name: max(getattr(plan.failures, name) for plan in learners)
        for name in ("repair_s", "loss_s", "join_s", "restart_s", "checkpoint_s", "slow_for_s")
    }
    slow_pace = min(plan.failures.slow_pace for plan in learners)
    return island, replace(learners[0].failures, slow_pace=slow_pace, **every, **longest)


def _away(plan: LearnerPlan, share: float, until: float, seed: int) -> Iterator[Away]:
    """When it is not there: the same preemptions as in every other way."""
    if plan.begins_s:
        yield Away(0.0, plan.begins_s, share)
    for gone in preemptions(plan.failures, plan.there_s(until), plan.chance(seed), share):
        yield replace(gone, begins_s=plan.begins_s + gone.begins_s, ends_s=plan.begins_s + gone.ends_s)


def in_step_s(learners: Sequence[LearnerPlan], sent: Sent) -> float:
    """Seconds of a step of data-parallel training: by the slowest machine, or by the thinnest link. A site sums inside,
    and each of its links carries a part of that."""
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
    return max(worst, over_link)  # the exchange is hidden behind the step, as far as it fits


def _step(plan: LearnerPlan, chance: random.Random) -> float:
    return max(0.05, 1 + plan.noise * chance.gauss(0, 1)) * plan.step_s


def synchronous(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> float:
    """Goodput of DiLoCo: every H steps all wait for the last one, and for what is sent, all at once."""
    chance = random.Random(f"sync {seed}")
    lines = [plan.drawn(until, plan.chance(seed)) for plan in learners]
    waits_s = max(
        sent.params * (sent.push_bits / link.up + sent.pull_bits / link.down) + 2 * link.round_trip_s
        for link in (plan.to_shards for plan in learners)
    )
    now, trained = min(plan.begins_s for plan in learners), 0.0
    while now < until:
        ends = now
        for plan, line in zip(learners, lines, strict=True):
            if plan.begins_s > now:
                continue
            noise = plan.noise * math.sqrt(sent.every) * chance.gauss(0, 1)
            steps_s = max(0.05, sent.every + noise) * plan.step_s
            begun = line.work_at(now - plan.begins_s)
            ends = max(ends, plan.begins_s + line.at_work(begun + steps_s))
            done = min(begun + steps_s, line.work_at(plan.there_s(until)))
            steps = (line.trained_at(done) - line.trained_at(begun)) / steps_s * sent.every
            trained += steps * plan.tokens_per_step
        now = ends + waits_s
    return trained / _ideal(learners, until)


def _ideal(learners: Sequence[LearnerPlan], until: float) -> float:
    """Tokens of learners that never fail."""
    return sum(plan.tokens_per_step * plan.there_s(until) / plan.step_s for plan in learners) or math.inf


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
    return sum(line.computed for line in lines) / learners


def one_island(chips: float, template: LearnerPlan, hours: float, seed: int, *, elastic: bool) -> float:
    """Goodput of data-parallel training in one place, which its links do not slow down."""
    island: Island = replace(template.island, chips=chips)
    return data_parallel([replace(template, island=island)], Sent(0, 0, 0, 1), hours * 3600, seed, elastic=elastic)
