"""The faults of a schedule, drawn from its seed; they end at a given time."""

from __future__ import annotations

import random

from diloco_simulator.processes import Processes


class Faults:
    """Breaks a cluster repeatedly until `faults_s`, then heals it."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._options = cluster.options
        self._random = random.Random(f"faults {cluster.options.seed}")
        cluster.timeline.later(cluster.options.faults_s, cluster.heal)
        cluster.timeline.later(cluster.options.faults_from_s, self._plan_next)

    def _plan_next(self) -> None:
        wait_s = self._random.expovariate(1 / self._options.fault_every_s)
        if self._options.faults and self._cluster.timeline.now + wait_s < self._options.faults_s:
            self._cluster.timeline.later(wait_s, self._strike)

    def _strike(self) -> None:
        kind = self._random.choice(self._options.faults)
        cluster, r = self._cluster, self._random
        lease_s = self._options.lease_s
        learner = r.choice(cluster.learner_ids)
        shard = r.randrange(self._options.shards)
        lasts_s = lease_s * r.choice((0.2, 0.8, 1.5, 3.0))
        cluster.faults[kind] += 1
        cluster.note("fault", kind, learner, shard, round(lasts_s, 3))
        match kind:
            case "crash learner":
                cluster.crash_learner(
                    learner, noticed=r.random() < 0.6, back_after_s=lasts_s, at_await=r.random() < 0.5
                )
            case "freeze learner":
                cluster.freeze_learner(learner, lasts_s)
            case "replace frozen learner":
                cluster.freeze_learner(learner, lasts_s)
                cluster.timeline.later(lasts_s * r.random(), cluster.start_learner, learner)
            case "hang learner":
                cluster.hang_learner(learner, lasts_s)
            case "warn learner":
                cluster.warn_learner(learner)
            case "crash shard":
                cluster.crash_shard(
                    shard, noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s), at_await=r.random() < 0.5
                )
            case "drain shard":
                cluster.drain_shard(shard, back_after_s=min(lasts_s, lease_s))
            case "freeze shard":
                cluster.freeze_shard(shard, lasts_s)
            case "cut" | "cut one way":
                ways = (True, False) if kind == "cut" else (r.random() < 0.5,)
                shards = range(self._options.shards) if r.random() < 0.4 else (shard,)
                for index in shards:
                    for up in ways:
                        cluster.cut((learner, index), up, lasts_s)
            case "fill disk":
                cluster.fill_disk(shard, lasts_s)
            case "hurt file":
                cluster.hurt_file(r.random(), noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s))
            case "wipe disk":
                cluster.wipe_disk(shard, noticed=r.random() < 0.6, back_after_s=min(lasts_s, lease_s))
            case "break calls":
                cluster.break_calls((learner, shard), r.random() < 0.5, r.random() < 0.5)
            case "lose rank":
                cluster.lose_rank(learner, noticed=r.random() < 0.6, back_after_s=lasts_s)
            case "crash mirror":
                cluster.readers.crash_mirror(shard, noticed=r.random() < 0.6, back_after_s=lasts_s)
            case "freeze mirror":
                cluster.readers.freeze_mirror(shard, lasts_s)
            case "promote":
                cluster.readers.promote(shard, still_lives=r.random() < 0.5, noticed=r.random() < 0.6)
            case "not finite":
                cluster.diverge(learner, r.randint(1, 3))
        self._plan_next()
