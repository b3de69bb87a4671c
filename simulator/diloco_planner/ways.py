"""Three other ways to train on the same chips: data-parallel with restarts or elastic, and synchronous DiLoCo.

They use the islands of `chips.py`. How much each sends decides how long a step waits for its link.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco_common.formulas import BITS
from diloco_planner.chips import Failures, Island, island_timeline, preemptions
from diloco_planner.plans import LearnerPlan

DRAWN = 500
"""Number of steps drawn for the mean of the slowest."""


@dataclass(frozen=True)
class Sent:
    """Traffic of training, in bits."""

    params: float
    push_bits: float
    pull_bits: float
    every: int


def data_parallel_bits(params: float, replicas: int) -> float:
    """Bits per step of one replica in one direction, with a ring: bfloat16 gradients once as sums, once as results."""
    return 2 * (replicas - 1) / replicas * BITS["bfloat16"] * params


def data_parallel(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int = 0, *, elastic: bool) -> float:
    """Goodput of all chips as one island, whose every step takes as long as the slowest learner's. When a learner is
    away, the others go on without its tokens."""
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
    """All chips as one island: their failures add up, and each pause is the longest of theirs. If elastic islands
    are to restart instead, nobody has said how many spares they have, so enough are assumed."""
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
    """Seconds of a data-parallel step: of the slowest machine, or of the thinnest link. A site sums its gradients, and
    each of its links carries a part of the sums."""
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
    return max(worst, over_link)  # as much of the exchange as fits is hidden behind the step


def _step(plan: LearnerPlan, chance: random.Random) -> float:
    return max(0.05, 1 + plan.noise * chance.gauss(0, 1)) * plan.step_s


def synchronous(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> float:
    """Goodput of DiLoCo: every H steps, all wait for the slowest one, and for all of the transfers."""
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
    """Tokens of learners whose chips never fail."""
    return sum(plan.tokens_per_step * until / plan.step_s for plan in learners)


def baselines(learners: Sequence[LearnerPlan], sent: Sent, until: float, seed: int) -> dict[str, float]:
    """Goodput of each of the other three ways."""
    return {
        "dp_restart": data_parallel(learners, sent, until, seed, elastic=False),
        "dp_elastic": data_parallel(learners, sent, until, seed, elastic=True),
        "diloco_sync": synchronous(learners, sent, until, seed),
    }
