"""Shows that the guard costs healthy learners nothing, at default settings and without an attacker.

    python benchmarks/honest.py                         # known difficult clusters; exits 1 if a promise is broken
    python benchmarks/honest.py --draw 1000 --seed 1    # random clusters, each with the guard and without
    python benchmarks/honest.py --show 1:17             # one of them, by seed and number: its plans, and the cuts

Whole runs in lockstep (`words.py`): the production cores in virtual time. No healthy learner is refused or left out.
Cuts change the loss by less than 0.2 % on average and 1 % in any cluster, and no learner is cut by more than half in
more than three consecutive contributions to a fragment.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

import torch

from diloco_common.settings import GuardSettings
from diloco_server.core.influence import Influence
from words import ROWS, Cluster, Plan, Trained

MEAN_MOST, ONE_MOST = 0.2, 1.0
"""Largest increase of the loss in percent: on average, and in one cluster."""
STREAK_MOST = 3
"""Maximum number of consecutive contributions cut by more than half: from the first to the last, 2 H steps pass."""
Trust = Literal["members", "strangers"]


# ------------------------------------------------------------------ known difficult clusters


USUAL = Plan()


def alike(learners: int, plan: Plan = USUAL, **first: object) -> tuple[Plan, ...]:
    """A cluster of this many learners, of which the first one differs."""
    return (replace(plan, **first), *[plan] * (learners - 1))  # type: ignore[arg-type]


def paced(*speeds: float, plan: Plan = USUAL) -> tuple[Plan, ...]:
    return tuple(replace(plan, speed=speed) for speed in speeds)


SMALL = Plan(warm=48, lr=1.2e-2)
SURE = Plan(optimizer="sgd", text="sure", lr=0.3)
KINDS: dict[str, Cluster] = {
    "two, 1:1": Cluster(alike(2)),
    "two, 1:3": Cluster(paced(1, 1 / 3)),
    "two, 1:8": Cluster(paced(1, 1 / 8)),
    "1, 1, 5, 5": Cluster(paced(1, 1, 1 / 5, 1 / 5)),
    "1, 1, 1, 5": Cluster(paced(1, 1, 1, 1 / 5)),
    "eight, speeds drawn": Cluster(paced(*map(random.Random(3).uniform, [0.2] * 8, [1.0] * 8))),
    "back after long on its own": Cluster(alike(3, cut_off=400.0)),
    "the same, of two": Cluster(alike(2, cut_off=400.0)),
    "after a freeze": Cluster(alike(3, stands=600.0)),
    "rare rows, met first": Cluster(alike(3, rare_from=120)),
    "rare rows, of two": Cluster(alike(2, rare_from=120)),
    "one with an 8 x batch": Cluster(alike(3, rows=8 * ROWS)),
    "one with a 1,000 x batch": Cluster(alike(3, Plan(rows=1), rows=1000)),
    "tokens vary 100 x": Cluster(alike(3, Plan(varies=True, rows=100))),
    "8, 1, 1, each warms up by itself": Cluster(paced(1, 1 / 8, 1 / 8, plan=Plan(warm=100))),
    "5, 1, 1, each warms up by itself": Cluster(paced(1, 1 / 5, 1 / 5, plan=Plan(warm=300))),
    "1, 1, 3, each decays by itself": Cluster(paced(1, 1, 1 / 3, plan=Plan(decays=240)), steps=360),
    "one, then three, each warms up": Cluster((Plan(warm=250), *[Plan(warm=250, joins_at=60)] * 2)),
    "a third joins late, with a warm-up": Cluster((Plan(), Plan(), Plan(joins_at=74, warm=50)), every=6),
    "a third joins late, without": Cluster((Plan(), Plan(), Plan(joins_at=74)), every=6),
    "two of four join late": Cluster((Plan(), Plan(), Plan(joins_at=90), Plan(joins_at=90))),
    "four, small values, a high rate": Cluster(alike(4, SMALL), std=0.02),
    "8, 1, 1, small values, a high rate": Cluster(paced(1, 1 / 8, 1 / 8, plan=SMALL), std=0.02),
    "two, small values, a high rate": Cluster(alike(2, SMALL), std=0.02),
    "two, 1:8, half a step later": Cluster((Plan(), Plan(speed=1 / 8, phase=0.5))),
    "SGD with momentum, two": Cluster(alike(2, Plan(optimizer="sgd", lr=0.05))),
    "RMSprop, one is restarted": Cluster(alike(2, Plan(optimizer="rmsprop", lr=3e-3), dies_at=100, away=20)),
    "RMSprop, one of four is restarted": Cluster(alike(4, Plan(optimizer="rmsprop", lr=3e-3), dies_at=100, away=20)),
    "a head that begins at zero": Cluster(alike(3), zero_head=True, fragments=6),
    "an embedding that thaws": Cluster(alike(3, Plan(thaws_at=100)), fragments=6),
    "alone, then two more": Cluster((Plan(), Plan(joins_at=100), Plan(joins_at=100)), fragments=6),
    "three that have converged, a hard example": Cluster(alike(3, SURE), steps=1200),
    "one of four reads another text": Cluster(alike(4, text="other")),
    "two of four read another text": Cluster((Plan(), Plan(), Plan(text="other"), Plan(text="other"))),
}


# ------------------------------------------------------------------ clusters drawn at random

RATES = {"sgd": 0.05, "adamw": 4e-3, "rmsprop": 2e-3, "adagrad": 2e-2, "muon": 1e-2}
COUNTS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12, 24)


def drawn(seed: int, number: int) -> Cluster:
    """A random ordinary cluster: no learner lies, and no value is infinite or NaN."""
    r = random.Random(f"{seed} {number}")
    count, every, steps = r.choice(COUNTS), r.choice((6, 12, 24)), r.choice((144.0, 216.0))
    optimizer = r.choice([*RATES])
    usual = Plan(
        optimizer=optimizer, lr=RATES[optimizer] * 3 ** r.uniform(-1, 0.7),
        warm=r.choice((0, 0, 20, 100)), decays=r.choice((0, 0, int(steps))), spikes=r.choice((0, 0, 0, 0.02)),
        varies=r.random() < 0.1, thaws_at=r.choice((0, 0, 0, 0, 60)),
    )  # fmt: skip
    speeds, tokens = r.choice((1, 1, 3, 10, 100)), r.choice((1, 1, 8, 64, 1000))
    crowd_at = r.uniform(20, steps / 2) if r.random() < 0.15 else 0.0
    plans = []
    for i in range(count):
        plan = replace(usual, speed=speeds ** -r.random() if i else 1.0, rows=_rows(r, tokens, count))
        if r.random() < 0.1:
            plan = replace(plan, optimizer=(other := r.choice([*RATES])), lr=RATES[other])
        if i and (crowd_at or r.random() < 0.15):
            plan = replace(plan, joins_at=crowd_at or r.uniform(10, steps / 2), warm=r.choice((0, plan.warm, 30)))
        if r.random() < 0.1:
            keeps = r.random() < 0.5
            plan = replace(plan, dies_at=r.uniform(20, steps), away=r.uniform(1, 40), keeps_optimizer=keeps)
        if r.random() < 0.08:
            plan = replace(plan, **{r.choice(("cut_off", "stands")): r.uniform(10, 80)})  # type: ignore[arg-type]
        if r.random() < 0.08:
            plan = replace(plan, rare_from=r.choice((0, 60)))
        plans.append(replace(plan, phase=r.random()))
    return Cluster(
        tuple(plans), steps, every, r.choice((1, 3, 3, 6, 10)), r.choice(("mean", "mean", "agreement", "rda")),
        r.choice((0.02, 0.2, 0.2)), r.random() < 0.2, seed=1000 * seed + number,
    )  # fmt: skip


def _rows(r: random.Random, tokens: int, count: int) -> int:
    """Rows of a learner's batch, drawn so that one learner may have up to `tokens` times as many as another."""
    if tokens == 1:
        return ROWS
    most: float = tokens ** r.random() * (1 if tokens > 64 else ROWS / 4)
    return max(1, round(most))


# ------------------------------------------------------------------ the cost


def no_guard(train: Callable[[], float]) -> float:
    kept = Influence.bound, Influence.hear
    Influence.bound = lambda self, fragment_id, taken, before: (self.bound_weights(taken), None)  # type: ignore[method-assign]
    Influence.hear = lambda self, taken, directions: ((), None)  # type: ignore[method-assign]
    try:
        return train()
    finally:
        Influence.bound, Influence.hear = kept  # type: ignore[method-assign]


@dataclass(frozen=True)
class Cost:
    name: str
    cluster: Cluster
    loss: float
    worse: float
    """How far the loss is above that without the guard, in percent. NaN if training diverges without it, too."""
    refused: dict[str, int]
    left_out: dict[str, float]
    least_kept: float
    longest_cut: int
    merges: int

    def broken(self) -> list[str]:
        return [
            *([f"refused {self.refused}"] if self.refused else []),
            *([f"left out {self.left_out}"] if self.left_out else []),
            *([f"loss {self.worse:+.2f} %"] if self.worse > ONE_MOST else []),
            *([f"cut by half {self.longest_cut} times"] if self.longest_cut > STREAK_MOST else []),
        ]

    def line(self) -> str:
        cut = f"x {self.least_kept:.2f}" if self.least_kept < 0.995 else "nothing"
        wrong = "; ".join(self.broken()) or "none"
        return f"| {self.name} | {self.merges} | {cut} | {self.longest_cut} | {self.worse:+.2f} | {wrong} |"


def cost(name: str, cluster: Cluster, trust: Trust) -> Cost:
    torch.set_num_threads(1)
    guard = GuardSettings(trust=trust)
    run = Trained(cluster, guard).train()
    found, loss = run.found, run.loss
    beside = (
        loss
        if found.least_kept == 1.0 and not found.left_out
        else no_guard(lambda: Trained(cluster, guard).train().loss)
    )
    worse = 100 * (loss / beside - 1) if math.isfinite(beside) else math.nan
    return Cost(
        name, cluster, loss, worse, dict(found.refused), found.left_out, found.least_kept, found.longest_cut,
        found.merges,
    )  # fmt: skip


def interval(values: Sequence[float]) -> str:
    """The mean and the 95 % interval, as text."""
    half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{fmean(values):+.3f} +- {half:.3f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, default=0, help="this many random clusters, instead of the known ones")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random clusters")
    parser.add_argument("--show", help="one random cluster: SEED:NUMBER")
    parser.add_argument("--trust", choices=["members", "strangers"], default="members")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    clusters = dict(KINDS)
    if args.show:
        seed, number = map(int, args.show.split(":"))
        clusters = {args.show: drawn(seed, number)}
        print(clusters[args.show])
    elif args.draw:
        clusters = {f"{args.seed}:{number}": drawn(args.seed, number) for number in range(args.draw)}
    print("| cluster | merges | cut most | in a row by half | loss, % | promises broken |", flush=True)
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    costs = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for one in pool.map(cost, clusters, clusters.values(), [args.trust] * len(clusters)):
            costs.append(one)
            if not args.draw or one.broken():
                print(one.line(), flush=True)
    told = [one.worse for one in costs if math.isfinite(one.worse)]
    broken = sum(bool(one.broken()) for one in costs)
    print(f"\n{len(costs)} clusters, {sum(one.merges for one in costs)} merges: {broken} break a promise")
    print(
        f"refused in {sum(bool(one.refused) for one in costs)}, left out in {sum(bool(one.left_out) for one in costs)}"
    )
    print(f"loss against no guard: {interval(told)}, worst {max(told):+.2f} %, best {min(told):+.2f} %")
    return int(broken > 0 or fmean(told) > MEAN_MOST)


if __name__ == "__main__":
    sys.exit(main())
