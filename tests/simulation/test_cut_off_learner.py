"""A learner that is cut off from every shard, in virtual time: the durations that fault 10 names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_simulator.cluster import SimulatedCluster
from diloco_simulator.learner_process import LearnerProcess
from diloco_simulator.options import Options, draw_memory

CUT_AT_S = 20.0
BACK_WITHIN_S = 5.0
"""After healing."""


def calm(seed: int, faults_s: float) -> Options:
    """Two shards with disks and three learners, to whom nothing happens but what the test does to them.

    A call that nobody answers fails after 2 s: a channel's connect attempt to an address that is silent does.
    """
    return replace(
        draw_memory(seed), family="cut", shards=2, learners=3, fragments=4, sync_every=3, quorum=2, lease_s=6.0,
        budget=0, step_s=(0.5, 0.6, 0.7), call_s=2.0, delay_s=0.03,
        long_delays=0.0, loss=0.0, duplicates=0.0, faults=(), faults_s=faults_s, disks=(True, True), save_s=0.05,
        stutters=0.0, codec_s=0.02, max_pushes=64, hostile=0,
    )  # fmt: skip


@pytest.mark.parametrize("cut_s", [5.0, 60.0])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.gate) for seed in (2, 3, 4))])
def test_a_learner_that_is_cut_off_is_back_within_5_s_and_all_its_work_is_merged_once(seed: int, cut_s: float) -> None:
    """Fault 10. The judge and the invariants see to it that nothing is lost or counted twice, and that what the learner
    had contributed before is settled in the end."""
    options = calm(seed, CUT_AT_S + cut_s + BACK_WITHIN_S + 1.0)
    cluster = SimulatedCluster(options)
    seen: dict[str, int] = {}

    def far() -> LearnerProcess:
        (learner,) = cluster.running("w1")
        return learner

    def steps() -> int:
        core = far().learner.core
        assert core is not None
        return core.inner_step

    def connected() -> list[bool]:
        return [figures["connected"] for figures in far().learner.connections.figures()]

    def alive() -> list[bool]:
        members = [shard.host.shard.membership.get("w1") for shard in cluster.shards.values() if shard.host]
        return [member is not None and member.live for member in members]

    def cut() -> None:
        assert alive() == [True, True]
        seen["steps"] = steps()
        for shard_index in range(options.shards):
            for up in (True, False):
                cluster.cut(("w1", shard_index), up, cut_s)

    def look_before_it_heals() -> None:
        assert connected() == [False, False]
        assert alive() == [cut_s < options.lease_s] * 2
        assert steps() - seen["steps"] > 0.7 * cut_s / options.step_s[1], "it trains on"

    def look_after_it_healed() -> None:
        assert connected() == alive() == [True, True]
        seen["back"] = True

    cluster.timeline.later(CUT_AT_S, cut)
    cluster.timeline.later(CUT_AT_S + cut_s - 0.1, look_before_it_heals)
    cluster.timeline.later(CUT_AT_S + cut_s + BACK_WITHIN_S, look_after_it_healed)
    result = cluster.run()

    assert seen["back"]
    assert result.counts["learned that merged"] > result.counts.get("learned that carried", 0)
