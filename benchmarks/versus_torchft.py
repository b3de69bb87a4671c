"""torchft in versus.py: Streaming DiLoCo with a lighthouse beside worker 0. Every worker is a replica group of one."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from versus_task import Task, Training

PORT = 29510
DELAY_STEPS = {"1gbit": 2, "100mbit": 5, "20mbit": 5}
"""Inner steps between the beginning of a fragment's all-reduce and its use. With 4 fragments and H = 24 at most 5."""
STRAGGLER_S = 6.0
"""The lighthouse waits so long for replicas that are alive but not there yet. With less it leaves out one that is three
times slower, time and again, and that one has to fetch the whole state each time. With more, survivors of a death wait
longer for a neighbour that still hangs in the broken all-reduce."""
TIMEOUT = timedelta(seconds=60)


def serve(task: Task) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"[::]:{PORT}", min_replicas=task.workers // 2, join_timeout_ms=int(1000 * STRAGGLER_S), quorum_tick_ms=10,
        heartbeat_timeout_ms=2000,
    )  # fmt: skip
    print(server.address(), flush=True)
    while True:
        time.sleep(1)


def work(task: Task, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    training = Training(task, rank)
    model, host, fragments = training.model, task.hosts[rank], training.model.quarters()
    outer = [
        torch.optim.SGD(part.parameters(), lr=task.outer_lr, momentum=task.outer_momentum, nesterov=True)
        for part in fragments
    ]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:  # type: ignore[type-arg]
        model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=task.workers // 2, use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": training.optimizer.state_dict()},
        timeout=TIMEOUT, quorum_timeout=TIMEOUT, connect_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr=host, store_port=store.port, lighthouse_addr=f"http://{task.hosts[0]}:{PORT}",
        replica_id=f"worker-{rank}", hostname=host, init_sync=False,
    )  # fmt: skip
    per_commit = task.tokens * task.sync_every / len(fragments)
    with DiLoCo(
        manager, fragments, training.optimizer, outer, sync_every=task.sync_every, pin_memory=False,
        use_bucketization=True, fragment_sync_delay=DELAY_STEPS[task.link], fragment_update_alpha=0.5,
    ):  # fmt: skip
        training.run(merged=lambda: manager.batches_committed() * per_commit)


if __name__ == "__main__":
    role, number, task = sys.argv[1], int(sys.argv[2]), Task.load(sys.argv[3])
    serve(task) if role == "service" else work(task, number)
