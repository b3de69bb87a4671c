"""Schedules in which learners average a companion beside the model: all that is promised of a fragment holds for it."""

from __future__ import annotations

from collections import Counter

from diloco_simulator.cluster import Cluster, run_schedule
from diloco_simulator.options import draw_companions

SEEDS = range(60)


def test_companions_keep_all_promises_while_everything_fails() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts.update(run_schedule(draw_companions(seed)).counts)
    assert counts["learned that merged"] > 10 * len(SEEDS)
    assert counts["recoveries"] > len(SEEDS) / 10


def test_schedules_make_versions_of_companions_and_of_the_model() -> None:
    cluster = Cluster(draw_companions(1))
    try:
        cluster.run()
        states = [s for shard in cluster.shards.values() if shard.host for s in shard.host.shard.fragments.values()]
        for is_companion in (False, True):
            assert any(s.version > 0 for s in states if s.fragment.companion == is_companion)
    finally:
        cluster.bury()
