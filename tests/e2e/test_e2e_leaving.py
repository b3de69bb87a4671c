"""SIGTERM in the middle of H = 100 steps: what was trained is merged before the worker is gone."""

from __future__ import annotations

import signal
from pathlib import Path

from processes import LocalCluster, until

SETTINGS = {"run.tokens": 0, "sync.sync_every": 100, "sync.quorum": 1, "worker.step_delay_s": 0.002, "lease.lease_s": 6}


def test_a_worker_that_is_told_to_go_leaves_nothing_behind(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "run", SETTINGS) as cluster:
        cluster.start(shards=2, workers=["ann", "ben"])
        began = cluster.workers["ben"].status()["inner_step"]
        until(lambda: cluster.workers["ben"].status()["inner_step"] > began + 20, "some of H steps")
        cluster.workers["ben"].signal(signal.SIGTERM)
        assert cluster.workers["ben"].exit_code() == 0
        said = cluster.workers["ben"].said()
        assert "not everything that was trained is in a version" not in said
        for shard in cluster.shards:
            status = shard.status()
            of_ben = cluster.learner("ben", shard)
            assert of_ben["state"] == "left"
            assert of_ben["tokens_merged"] >= 0.99 * of_ben["tokens"] * len(status["fragments"])
