"""Shards are exchanged one after the other while learners train: SIGTERM, a new life, the next shard."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from processes import TINY, LocalCluster, Process, until, versions

SETTINGS = {"run.tokens": 0, "sync.sync_every": 32}
CONTRIBUTION_TOKENS = 32 * TINY["train.batch"] * TINY["model.context"]
"""What one learner contributes to a round, at least."""


@pytest.mark.gate
@pytest.mark.timeout(300)  # six processes start, two of them twice
def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "run", SETTINGS, keeps=True) as cluster:
        cluster.start(shards=2, workers=["ann", "ben"])
        for shard in cluster.shards:
            before = versions(shard.status())
            shard.signal(signal.SIGTERM)
            assert shard.exit_code() == 0
            shard.start()
            back = until(lambda s=shard: s.status()["ready"] and versions(s.status()), "the shard to serve")  # type: ignore[misc]
            assert all(back[i] >= before[i] for i in before), "a version is lost"
            until(lambda s=shard, b=back: all(v > b[i] for i, v in versions(s.status()).items()), "rounds")  # type: ignore[misc]

        for shard in cluster.shards:
            for fragment in versions(shard.status()):
                until(lambda s=shard, f=fragment: nothing_is_missing(cluster, s, f), "everything to be merged")  # type: ignore[misc]
        for process in (*cluster.workers.values(), *cluster.shards):
            process.signal(signal.SIGTERM)
            assert process.exit_code() == 0
        for shard in cluster.shards:
            assert shard.said().count("draining") == shard.said().count("ended tokens_merged") == 2
            assert shard.said().count("fragment seeded") == 2, "learners had to bring nothing again"
            assert "versions lost" not in shard.said()


def nothing_is_missing(cluster: LocalCluster, shard: Process, fragment_id: int) -> bool:
    """Whether all that was trained on is merged but for less than one contribution, which waits for its round.

    After a contribution that is lost, this is never true again. Nor is anything merged twice.
    """
    trained = sum(worker.status()["tokens"] for worker in cluster.workers.values())
    (merged,) = (f["tokens_merged"] for f in shard.status()["fragments"] if f["id"] == fragment_id)
    assert merged <= sum(worker.status()["tokens"] for worker in cluster.workers.values()), "something is merged twice"
    return bool(trained - merged < CONTRIBUTION_TOKENS)
