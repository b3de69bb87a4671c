"""A shard that keeps its versions in memory is killed and comes back empty, on the same ports: faults.md 5."""

from __future__ import annotations

import json
from pathlib import Path

from processes import LocalCluster, Process, Status, run_module, until, versions

SETTINGS = {"run.tokens": 40_000, "worker.step_delay_s": 0.04}
"""Enough for the shard to be back before the other one is done, on a machine that is not overloaded."""


def test_workers_train_on_without_a_shard_and_seed_it_again(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "run", SETTINGS) as cluster:
        cluster.start(shards=2, workers=["ann", "ben"])
        dying, other = cluster.shards
        workers = list(cluster.workers.values())
        old = until(lambda: None if min(versions(dying.status()).values()) < 2 else dying.status(), "two versions")
        dying.kill()

        steps = [worker.status()["inner_step"] for worker in workers]
        rounds = other.status()["rounds"]
        until(lambda: all(w.status()["inner_step"] > s + 5 for w, s in zip(workers, steps, strict=True)), "steps")
        until(lambda: other.status()["rounds"] > rounds or other.status()["done"], "rounds of the other shard")
        # On a busy machine somebody may not answer in the 1.2 s of the command, or the other shard be done already.
        expected = {"shard-0": "no answer", "shard-1": "ready", "ann": "training", "ben": "training"}
        seen = (expected, expected | {"shard-1": "done"})
        until(lambda: status_command(cluster) in seen, "everybody's state")

        dying.start()

        back = until(lambda: status_when_seeded(dying), "the shard to be seeded")
        assert back["epoch"] != old["epoch"]
        assert back["tokens_merged"] > 0, "learners told it how many tokens the values hold that they seeded"
        until(lambda: dying.status()["done"] and other.status()["done"], "both shards to reach the budget")
        for shard in cluster.shards:
            assert shard.status()["tokens_merged"] >= SETTINGS["run.tokens"]
        assert [worker.exit_code() for worker in workers] == [0, 0]
        if not back["done"]:  # it was back before the other one reached the budget
            assert min(versions(dying.status()).values()) >= 1, "rounds were merged in its second life"


def status_when_seeded(shard: Process) -> Status | None:
    status = shard.status()
    return status if status["fragments"] and all(f["seeded"] for f in status["fragments"]) else None


def status_command(cluster: LocalCluster) -> dict[str, str]:
    """The state of every member, as `diloco status --json` shows it."""
    shown = run_module("diloco_deploy", "status", "--json", f"--folder={cluster.folder}")
    assert shown.returncode == 0, shown.stderr
    return {member["name"]: member["state"] for member in json.loads(shown.stdout)["members"]}
