"""Pods of the demo overlay, started here with the environment that Kubernetes would give them, train together."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping
from pathlib import Path

from manifests import environment, one
from processes import Process, learner_in, sets, until
from secret_files import secret_file

DEMO = "overlays/demo"
ANY = "127.0.0.1:0"


def pod(name: str, kind: str, folder: Path, here: Mapping[str, object]) -> Process:
    """The pod's container as a process; `here` is what has to be another one on this machine."""
    variables = environment(DEMO, one(DEMO, kind)["spec"]["template"])
    given = {name.removeprefix("DILOCO_").lower().replace("__", "."): value for name, value in variables.items()}
    given |= {"security.token_file": folder / "token", **{key: here[key] for key in here if key in given}}
    module = {"StatefulSet": "diloco_server", "Job": "diloco_demo"}[kind]
    process = Process(name, module, lambda: sets(given), folder)
    process.start()
    return process


def test_pods_of_the_demo_train_together_and_end_well(tmp_path: Path) -> None:
    for part in ("run", "logs"):
        (tmp_path / part).mkdir()
    secret_file(tmp_path / "token", secrets.token_hex(32))
    shards: list[Process] = []
    workers: list[Process] = []
    try:
        for index in range(one(DEMO, "StatefulSet")["spec"]["replicas"]):
            claim = tmp_path / f"claim-{index}/shard"
            here = {"shard.index": index, "shard.listen": ANY, "shard.http": ANY, "shard.data_dir": claim}
            shards.append(pod(f"shard-{index}", "StatefulSet", tmp_path, here))
        addresses = ",".join(shard.endpoints.grpc for shard in shards)
        workers.append(pod("worker-0", "Job", tmp_path, {"worker.shards": addresses, "worker.http": ANY}))
        for shard in shards:
            until(lambda shard=shard: learner_in(shard.status(), "worker-0").get("merged"), "a merge")  # type: ignore[misc]
        for process in (*workers, *shards):
            process.signal(signal.SIGTERM)
            assert process.exit_code() == 0
    finally:
        for process in (*workers, *shards):
            process.kill()
