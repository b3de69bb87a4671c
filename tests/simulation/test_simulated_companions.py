"""Schedules in which learners average a companion beside the model: all that is promised of a fragment holds for it."""

from __future__ import annotations

from collections import Counter

import pytest

from diloco_simulator.cluster import SimulatedCluster, run_schedule
from diloco_simulator.options import draw_companions

SEEDS = range(15)
MORE = range(15, 60)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.gate)], ids=["quick", "more"])
def test_companions_keep_all_promises_while_everything_fails(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_schedule(draw_companions(seed)).counts)
    assert counts["learned that merged"] > 10 * len(seeds)
    assert counts["recoveries"] > len(seeds) / 10


def test_schedules_make_versions_of_companions_and_of_the_model() -> None:
    cluster = SimulatedCluster(draw_companions(1))
    try:
        cluster.run()
        states = [s for shard in cluster.shards.values() if shard.host for s in shard.host.shard.fragments.values()]
        for is_companion in (False, True):
            assert any(s.version > 0 for s in states if s.fragment.traits.is_of_model != is_companion)
    finally:
        cluster.bury()
