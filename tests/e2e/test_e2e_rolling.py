"""Shards are exchanged one after the other while learners train: SIGTERM, a new life, the next shard."""

from __future__ import annotations

import signal
from pathlib import Path

from processes import TINY, LocalCluster, Process, until, versions

ROUNDS = 3
"""How often each shard is exchanged."""
TOKENS_PER_STEP = TINY["train.batch"] * TINY["model.context"]


def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "run", {"run.tokens": 0, "sync.quorum": "all"}, keeps=True) as cluster:
        cluster.start(shards=2, workers=["ann", "ben"])
        for _ in range(ROUNDS):
            for shard in cluster.shards:
                before = versions(shard.status())
                shard.signal(signal.SIGTERM)
                assert shard.exit_code() == 0
                shard.start()
                until(lambda shard=shard: shard.status()["ready"], "the shard to serve")  # type: ignore[misc]
                back = versions(shard.status())
                assert all(back[i] >= before[i] for i in before), "a version is lost"
                until(lambda s=shard, b=back: all(v > b[i] for i, v in versions(s.status()).items()), "rounds")  # type: ignore[misc]

        # What was trained on is merged, or waits for a round: a contribution lost at each restart would add up.
        for shard in cluster.shards:
            until(lambda shard=shard: backlog(cluster, shard) <= 0, "everything to be merged")  # type: ignore[misc]
        for worker in cluster.workers.values():
            worker.signal(signal.SIGTERM)
            assert worker.exit_code() == 0
        for shard in cluster.shards:
            shard.signal(signal.SIGTERM)
            assert shard.exit_code() == 0
            assert shard.said().count("draining") == shard.said().count("ended tokens_merged") == ROUNDS + 1
            assert shard.said().count("fragment seeded") == 2, "learners had to bring nothing again"
            assert "versions lost" not in shard.said()


def backlog(cluster: LocalCluster, shard: Process) -> int:
    """Tokens that are missing in the shard's most backward fragment, beyond what may wait for its next round.

    Learners are asked first: what they train on meanwhile counts for nobody. Nothing is merged twice either.
    """
    trained = sum(worker.status()["tokens"] for worker in cluster.workers.values())
    merged = [fragment["tokens_merged"] for fragment in shard.status()["fragments"]]
    now = sum(worker.status()["tokens"] for worker in cluster.workers.values())
    assert max(merged) <= now, "something is merged twice"
    waiting = 2 * TINY["sync.sync_every"] * TOKENS_PER_STEP * len(cluster.workers)
    return trained - min(merged) - waiting
