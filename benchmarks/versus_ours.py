"""Decoupled DiLoCo in versus.py. A shard lives beside worker 0, another beside worker 1: no machine, no link more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from versus_task import Task, Training

SHARDS = 2
PORT = 50051
FRAGMENTS = 24
THIN = {"sync.push": "int4", "sync.pull": "int8"}
"""What docs/concepts.md advises for thin links."""


def serve(task: Task, index: int, more: Mapping[str, str] = MappingProxyType({})) -> int:
    """`more`: settings of the shard, beside those that make it comparable."""
    from diloco_server import cli

    settings = {
        "security.insecure": "true", "shard.listen": f"{task.hosts[index]}:{PORT}", "shard.index": index,
        "shard.count": SHARDS, "sync.sync_every": task.sync_every, "outer.lr": task.outer_lr,
        "outer.momentum": task.outer_momentum, **(THIN if task.link == "20mbit" else {}), **more,
    }  # fmt: skip
    return cli.main([f"--set={key}={value}" for key, value in settings.items()])


def work(task: Task, rank: int) -> None:
    import diloco_worker
    from diloco_common.allocator import tune_allocator

    tune_allocator()
    training = Training(task, rank)
    shards = [f"{host}:{PORT}" for host in task.hosts[:SHARDS]]
    with diloco_worker.join(shards, training.model, learner_id=f"worker-{rank}") as learner:
        training.run(after_step=learner.step, merged=lambda: learner.tokens_merged)


if __name__ == "__main__":
    role, number, task = sys.argv[1], int(sys.argv[2]), Task.load(sys.argv[3])
    if role == "service":
        sys.exit(serve(task, number))
    work(task, number)
