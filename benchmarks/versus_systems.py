"""What the processes of each system of versus.py run: `versus_systems.py SYSTEM service|worker NUMBER TASK`.

    ours        a shard runs beside worker 0, another beside worker 1: no further machine or link. Default settings.
    float32     ours with torchft's wire format, H and outer optimizer, so that encodings cannot explain differences.
    tls         ours over mutual TLS.
    ddp         torch DistributedDataParallel over Gloo, started by torchrun. Rank 0 writes a checkpoint to a disk that
                all share; a worker that is (re)started goes on from it, as in torchrun's own examples.
    torchft     Streaming DiLoCo, with a lighthouse beside worker 0. Every worker is a replica group of one.
    hivemind    hivemind.Optimizer, local updates, parameters averaged in the background. The first DHT node runs
                beside worker 0.
    flower      FedAvg over gRPC, with the server beside worker 0. A round waits for all workers that are connected.
    alone       no system: each worker trains by itself. It shows what the machine allows.

Each system runs under a Python of its own, so its packages are imported where they are used.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from versus_task import WAIT_S, Task, Training

SHARDS, PORT = 2, 50051
CERTS = "certs"
"""Name of the folder for certificates, in the folder of a run over TLS."""
FLOWER = 8080
SAVE_S = 5.0
LIGHTHOUSE = 29510
DELAY_STEPS = {"1gbit": 2, "100mbit": 5, "20mbit": 5}
"""Inner steps from the start of a fragment's all-reduce to the use of its result. At most 5 for 4 fragments, H = 24."""
TIMEOUT = timedelta(seconds=60)

# ------------------------------------------------------------ ours


def serve_ours(task: Task, index: int, more: dict[str, object] | None = None) -> None:
    """`more`: settings of the shard that differ from the defaults."""
    from diloco_server.__main__ import main

    settings = {
        "security.insecure": "true", "shard.listen": f"{task.hosts[index]}:{PORT}", "shard.index": index,
        "shard.count": SHARDS, **(more or {}),
    }  # fmt: skip
    sys.exit(main([f"--set={key}={value}" for key, value in settings.items()]))


def serve_float32(task: Task, index: int) -> None:
    wire = {"sync.push": "float32", "sync.pull": "float32"}
    outer = {"outer.lr": task.outer_lr, "outer.momentum": task.outer_momentum}
    serve_ours(task, index, {**wire, **outer, "sync.sync_every": task.sync_every, "sync.merge": "mean"})


def serve_tls(task: Task, index: int) -> None:
    serve_ours(task, index, {"security.insecure": "false", "security.tls": Path(task.folder, CERTS, f"shard-{index}")})


def work_ours(task: Task, rank: int, tls: Path | None = None) -> None:
    import diloco_worker
    from diloco_common.process import tune_allocator

    tune_allocator()
    training = Training(task, rank)
    shards = [f"{host}:{PORT}" for host in task.hosts[:SHARDS]]
    with diloco_worker.join(
        shards, training.model, optimizer=training.optimizer, learner_id=f"worker-{rank}", tls=tls
    ) as learner:
        training.run(after_step=learner.step, merged=lambda: learner.tokens_merged)


def work_tls(task: Task, rank: int) -> None:
    work_ours(task, rank, Path(task.folder, CERTS, f"learner-worker-{rank}"))


# ------------------------------------------------------------ torch DDP


def work_ddp(task: Task, rank: int) -> None:
    dist.init_process_group("gloo")
    training = Training(task, rank)
    checkpoint = Path(task.folder, "checkpoint.pt")
    step, merged = 0, 0.0
    if checkpoint.exists():
        found = torch.load(checkpoint)
        training.model.load_state_dict(found["model"])
        training.optimizer.load_state_dict(found["optimizer"])
        step, merged = found["step"], found["merged"]
    model = torch.nn.parallel.DistributedDataParallel(training.model)
    first, saved = step, time.monotonic()

    def after_step(tokens: int, loss: object) -> None:
        nonlocal step, merged, saved
        step += 1
        merged += tokens * dist.get_world_size()
        if dist.get_rank() == 0 and time.monotonic() - saved > SAVE_S:
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state | {"step": step, "merged": merged}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
            saved = time.monotonic()

    training.run(forward=model, after_step=after_step, merged=lambda: merged, first_step=first)


# ------------------------------------------------------------ torchft


def serve_torchft(task: Task, index: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"[::]:{LIGHTHOUSE}", min_replicas=task.workers // 2, join_timeout_ms=10_000, quorum_tick_ms=100
    )  # the timeouts in torchft's README
    print(server.address(), flush=True)
    while True:
        time.sleep(1)


def work_torchft(task: Task, rank: int) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    training = Training(task, rank)
    model, host, fragments = training.model, task.hosts[rank], training.model.quarters()
    outer = [
        torch.optim.SGD(part.parameters(), lr=task.outer_lr, momentum=task.outer_momentum, nesterov=True)
        for part in fragments
    ]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, 0, is_master=True, wait_for_workers=False
    )

    def load(state: dict) -> None:  # type: ignore[type-arg]
        model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=task.workers // 2, use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": training.optimizer.state_dict()},
        timeout=TIMEOUT, quorum_timeout=TIMEOUT, connect_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr=host, store_port=store.port, lighthouse_addr=f"http://{task.hosts[0]}:{LIGHTHOUSE}",
        replica_id=f"worker-{rank}", hostname=host, init_sync=False,
    )  # fmt: skip
    per_commit = task.tokens * task.sync_every / len(fragments)
    with DiLoCo(
        manager, fragments, training.optimizer, outer, sync_every=task.sync_every, pin_memory=False,
        use_bucketization=True, fragment_sync_delay=DELAY_STEPS[task.link], fragment_update_alpha=0.5,
    ):  # fmt: skip
        training.run(merged=lambda: manager.batches_committed() * per_commit)


# ------------------------------------------------------------ hivemind


def serve_hivemind(task: Task, index: int) -> None:
    from hivemind import DHT

    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes cannot be spawned
    dht = DHT(host_maddrs=[f"/ip4/{task.hosts[0]}/tcp/0"], start=True)
    path = Path(task.folder, "dht")
    path.with_suffix(".tmp").write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
    path.with_suffix(".tmp").rename(path)
    while True:
        time.sleep(1)


def work_hivemind(task: Task, rank: int) -> None:
    import hivemind
    from hivemind.compression import Float16Compression, Uniform8BitQuantization

    multiprocessing.set_start_method("fork", force=True)
    logging.getLogger("hivemind").setLevel(logging.INFO)
    training = Training(task, rank)
    addresses, deadline = Path(task.folder, "dht"), time.monotonic() + WAIT_S
    while not addresses.exists():
        assert time.monotonic() < deadline, "no first DHT node"
        time.sleep(0.1)
    dht = hivemind.DHT(
        initial_peers=addresses.read_text().split(), host_maddrs=[f"/ip4/{task.hosts[rank]}/tcp/0"], start=True
    )
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="versus", batch_size_per_step=task.batch,
        target_batch_size=task.batch * task.workers * task.sync_every,
        optimizer=training.optimizer, use_local_updates=True, delay_state_averaging=True,
        matchmaking_time=2.0, averaging_timeout=60.0, next_chunk_timeout=30.0,
        state_averaging_compression=Uniform8BitQuantization() if task.link == "20mbit" else Float16Compression(),
        averager_opts={"request_timeout": 1.0},  # shorter than matchmaking, as hivemind advises
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5, "max_refresh_period": 2.0},
        verbose=True,
    )  # fmt: skip
    training.optimizer = optimizer
    samples = merged = 0
    epoch = optimizer.local_epoch

    def after_step(tokens: int, loss: object) -> None:
        nonlocal samples, merged, epoch
        samples += tokens
        if optimizer.local_epoch != epoch:
            epoch, merged = optimizer.local_epoch, samples

    training.run(after_step=after_step, merged=lambda: merged)


# ------------------------------------------------------------ Flower


def serve_flower(task: Task, index: int) -> None:
    import flwr

    strategy = flwr.server.strategy.FedAvg(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=2, min_available_clients=2,
        on_fit_config_fn=lambda number: {"round": number},
    )  # fmt: skip
    flwr.server.start_server(
        server_address=f"{task.hosts[0]}:{FLOWER}", strategy=strategy,
        config=flwr.server.ServerConfig(num_rounds=10**6, round_timeout=TIMEOUT.total_seconds()),
    )  # fmt: skip


def work_flower(task: Task, rank: int) -> None:
    """Flower calls its client on a thread. The loop trains H steps for each call, and takes the new values."""
    import flwr

    training = Training(task, rank)
    given: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    trained: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def values() -> list[Any]:
        return [tensor.numpy().copy() for tensor in training.model.state_dict().values()]

    class Client(flwr.client.NumPyClient):  # type: ignore[misc]
        def get_parameters(self, config: dict[str, Any]) -> list[Any]:
            return values()

        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            given.put(parameters)
            return trained.get(), task.tokens * task.sync_every, {}

    def call() -> None:
        flwr.client.start_client(server_address=f"{task.hosts[0]}:{FLOWER}", client=Client().to_client())

    def take() -> None:
        new = map(torch.from_numpy, given.get())
        training.model.load_state_dict(dict(zip(training.model.state_dict(), new, strict=True)))

    steps = merged = 0

    def after_step(tokens: int, loss: object) -> None:
        nonlocal steps, merged
        steps += 1
        if steps % task.sync_every == 0:
            trained.put(values())
            take()
            merged = steps * tokens

    threading.Thread(target=call, daemon=True).start()
    take()
    training.run(after_step=after_step, merged=lambda: merged)


# ------------------------------------------------------------ all

WORK = {
    "ours": work_ours, "float32": work_ours, "tls": work_tls, "ddp": work_ddp, "torchft": work_torchft,
    "hivemind": work_hivemind, "flower": work_flower,
    "alone": lambda task, rank: Training(task, rank).run(),
}  # fmt: skip
SERVE = {
    "ours": serve_ours, "float32": serve_float32, "tls": serve_tls, "torchft": serve_torchft,
    "hivemind": serve_hivemind, "flower": serve_flower,
}  # fmt: skip

if __name__ == "__main__":
    system, role, number, path = sys.argv[1:]
    (SERVE if role == "service" else WORK)[system](Task.load(path), int(number))
