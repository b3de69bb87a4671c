"""One worker that is fifty times slower and one that hangs cost the others nothing: reliability.md 16 and 17."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import LocalCluster, until

SLOW_STEP_S = 1.0
HANGING_STEP_S = 600.0


@pytest.mark.gate
def test_rounds_do_not_wait_for_the_slow_and_its_tokens_still_arrive(tmp_path: Path) -> None:
    settings = {
        "sync.quorum": 1, "sync.grace": 0.05, "sync.staleness_max": 1000, "lease.lease_s": 4,
    }  # fmt: skip
    with LocalCluster(tmp_path / "run", settings) as cluster:
        for name, step_s in (("slow", SLOW_STEP_S), ("hanging", HANGING_STEP_S)):
            cluster.add_worker(name, {"worker.step_min_s": step_s})
        cluster.start(shards=1, workers=["ann"], verbose=True)
        (shard,) = cluster.shards
        for name in ("slow", "hanging"):
            cluster.workers[name].start()

        slow = until(lambda: merged_of(cluster, "slow"), "contributions of the slow one to be merged")
        until(lambda: cluster.learner("hanging")["state"] == "stalled", "the hanging one to be seen as stalled")
        until(lambda: cluster.learner("hanging")["missed"].get("ABSENT", 0) > 20, "rounds without the hanging one")

        status, hanging = shard.status(), cluster.learner("hanging")
        assert (hanging["inner_step"], hanging["contributed"]) == (0, 0)
        assert (status["evictions"], status["rejected"]) == (0, {})
        assert slow["tokens_merged"] <= 4 * slow["tokens"], "no token of the slow one is merged twice into a fragment"
        steps = cluster.learner("slow")["inner_step"]
        closed = len(re.findall(r"round closed .* why=grace .* open_s=", shard.said()))
        # A round of each fragment takes 8 steps of whoever it waits for.
        assert closed > max(20, steps), "rounds wait for the quorum and the grace, not for the slow"


def merged_of(cluster: LocalCluster, name: str) -> dict[str, int] | None:
    """What the shard says of the learner, once a few of its contributions are merged."""
    found = cluster.learner(name)
    return found if found.get("merged", 0) >= 2 else None
