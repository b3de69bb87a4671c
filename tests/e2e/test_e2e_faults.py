"""Workers that are killed, frozen, copied, slow or hang, against two shards: reliability.md 1, 2, 3, 16, 17 and 20."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from processes import TINY, LocalCluster, Process, Status, learner_in, until, versions

LEASE_S = 2.0
HEARTBEAT_S = 0.5
ROUNDED_S = 0.002
"""Two times of /status, each to the millisecond."""
CHECKPOINT_EVERY_S = 0.2
BATCH = TINY["train.batch"]
TOKENS_PER_STEP = BATCH * TINY["model.context"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {
        "lease.lease_s": LEASE_S,
        "lease.heartbeat_s": HEARTBEAT_S,
        "worker.checkpoint_every_s": CHECKPOINT_EVERY_S,
    }
    with LocalCluster(tmp_path_factory.mktemp("faults"), settings) as cluster:
        yield cluster.start(shards=2, workers=["ann", "ben", "cat"])


@pytest.fixture
def cluster(shared: LocalCluster) -> LocalCluster:
    """A cluster in which everybody is alive, whatever the test before did."""
    for worker in shared.workers.values():
        if not worker.alive:
            worker.start()
        worker.signal(signal.SIGCONT)
    for name in shared.workers:
        for shard in shared.shards:
            until(lambda n=name, s=shard: shared.learner(n, s).get("state") == "alive", f"{name} to be alive")
    return shared


def merged(cluster: LocalCluster, name: str) -> list[int]:
    """Contributions of a learner that each shard has merged."""
    return [cluster.learner(name, shard)["merged"] for shard in cluster.shards]


def is_above(now: list[int], before: list[int]) -> bool:
    return all(n > b for n, b in zip(now, before, strict=True))


def silence_when_evicted(status: Status, name: str) -> float:
    """Seconds of silence after which the shard evicted this learner last, by the shard's own clock."""
    evicted = [e for e in status["events"] if e["event"] == "evicted" and e["learner"] == name]
    return float(learner_in(status, name)["silent_s"] - evicted[-1]["ago_s"])


def await_eviction(cluster: LocalCluster, name: str) -> None:
    """Every shard evicts the learner, for its silence, within the lease and one heartbeat."""
    for shard in cluster.shards:
        until(lambda s=shard: cluster.learner(name, s)["state"] == "evicted", f"{shard.name} to evict {name}")
        silent_s = silence_when_evicted(shard.status(), name)
        assert LEASE_S - ROUNDED_S < silent_s <= LEASE_S + HEARTBEAT_S


def await_progress_without(cluster: LocalCluster, name: str) -> None:
    """The other workers go on stepping, and every fragment gets new versions of theirs."""
    others = [worker for other, worker in cluster.workers.items() if other != name]
    steps = [worker.status()["inner_step"] for worker in others]
    before = [versions(shard.status()) for shard in cluster.shards]
    until(lambda: is_above([w.status()["inner_step"] for w in others], steps), "the others to step")
    for shard, old in zip(cluster.shards, before, strict=True):
        until(lambda s=shard, o=old: all(v > o[i] for i, v in versions(s.status()).items()), "new versions")
    assert all(worker.alive for worker in others)


def test_a_killed_worker_is_evicted_and_comes_back_where_its_checkpoint_was(cluster: LocalCluster) -> None:
    ann = cluster.workers["ann"]
    began = ann.status()["inner_step"]
    until(lambda: checkpoint(cluster, "ann")["inner_step"] > began, "a checkpoint of ann's")
    ann.kill()
    saved = checkpoint(cluster, "ann")
    gone = [cluster.learner("ann", shard) for shard in cluster.shards]
    await_eviction(cluster, "ann")
    await_progress_without(cluster, "ann")  # so rounds that had closed before the eviction are versions by now
    fenced = merged(cluster, "ann")
    await_progress_without(cluster, "ann")
    assert merged(cluster, "ann") == fenced, "nothing of it is merged after its eviction"

    started = time.monotonic()
    ann.start()
    back = until(lambda: status_when_training(ann), "ann to train again")

    steps_most = (time.monotonic() - started) / TINY["worker.step_min_s"]
    steps = back["inner_step"] - saved["inner_step"]
    assert 0 <= steps <= steps_most, "it went on from its checkpoint"
    later = until(lambda: checkpoint_beyond(cluster, "ann", saved["inner_step"]), "a newer checkpoint of ann's")
    assert later["tokens"] == later["inner_step"] * TOKENS_PER_STEP
    assert later["data_position"] == later["inner_step"] * BATCH, "no text was read twice or left out"
    for shard, before in zip(cluster.shards, gone, strict=True):
        until(
            lambda s=shard, b=before: cluster.learner("ann", s)["generation"] > b["generation"], "a lease at each shard"
        )
    until(lambda: is_above(merged(cluster, "ann"), [g["merged"] for g in gone]), "ann's contributions to be merged")


def checkpoint(cluster: LocalCluster, name: str) -> dict[str, Any]:
    """How far a worker was when it wrote its checkpoint last; it begins with zeros."""
    path = cluster.folder / name / "checkpoint.safetensors"
    if not path.exists():
        return {"inner_step": 0, "tokens": 0, "data_position": 0}
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["checkpoint"])
    return {**content["learner"], "data_position": content["data_position"]}


def checkpoint_beyond(cluster: LocalCluster, name: str, step: int) -> dict[str, Any] | None:
    found = checkpoint(cluster, name)
    return found if found["inner_step"] > step else None


def status_when_training(worker: Process) -> Status | None:
    status = worker.status()
    return status if status["state"] == "training" else None


def test_a_frozen_worker_is_fenced_off_and_joins_again_by_itself(cluster: LocalCluster) -> None:
    ben = cluster.workers["ben"]
    pid, before = ben.pid, ben.status()
    ben.signal(signal.SIGSTOP)
    gone = [cluster.learner("ben", shard) for shard in cluster.shards]
    await_eviction(cluster, "ben")
    await_progress_without(cluster, "ben")

    ben.signal(signal.SIGCONT)

    for shard, old in zip(cluster.shards, gone, strict=True):
        until(lambda s=shard, o=old: cluster.learner("ben", s)["generation"] > o["generation"], "ben to join again")
    until(lambda: is_above(merged(cluster, "ben"), [g["merged"] for g in gone]), "ben's contributions to be merged")
    after = ben.status()
    assert ben.pid == pid, "it is the same process"
    assert after["inner_step"] > before["inner_step"]
    assert after["tokens"] == after["inner_step"] * TOKENS_PER_STEP, "it counts on: nothing was lost or trained twice"
    assert ben.said().count("joined") >= 2 * len(cluster.shards)
    until(lambda: all(shard["connected"] for shard in ben.status()["shards"]), "ben to be connected")
    for shard, old in zip(after["shards"], before["shards"], strict=True):
        assert (shard["epoch"], shard["generation"] > old["generation"]) == (old["epoch"], True)


def test_of_two_workers_with_one_learner_id_the_newer_wins(cluster: LocalCluster) -> None:
    old = cluster.workers["cat"]
    generations = [cluster.learner("cat", shard)["generation"] for shard in cluster.shards]
    with cluster.replaced("cat", cluster.folder / "another-cat") as new:
        new.start()
        assert old.exit_code() == 4

    assert "[SUPERSEDED]" in old.said()
    assert "Traceback" not in old.said()
    until(lambda: status_when_training(new), "the newer one to train")
    now = [cluster.learner("cat", shard) for shard in cluster.shards]
    assert is_above([cat["generation"] for cat in now], generations)
    until(lambda: is_above(merged(cluster, "cat"), [cat["merged"] for cat in now]), "its contributions to be merged")


def test_no_contribution_was_refused_and_no_process_complained(cluster: LocalCluster) -> None:
    """Runs last: all that happened above is the ordinary course of things."""
    for process in (*cluster.shards, *cluster.workers.values()):
        assert "Traceback" not in process.said(), process.said()
    for shard in cluster.shards:
        status = shard.status()
        tokens = status["tokens"]
        ended = tokens["merged"] + tokens["fenced"] + tokens["in_flight"]
        assert tokens["accepted"] == ended, "every accepted token is merged, fenced off or in flight"
        # TOO_STALE: of a worker that a busy machine left without a core for several versions.
        ordinary = {"STALE_GENERATION", "LEASE_EXPIRED", "WRONG_ROUND", "NOT_JOINED", "TOO_STALE"}
        assert set(status["rejected"]) <= ordinary


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
