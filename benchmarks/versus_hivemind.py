"""hivemind in versus.py: hivemind.Optimizer with local updates, averaging parameters in the background.

A DHT node lives beside worker 0, as the first that others find.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from pathlib import Path

from versus_task import WAIT_S, Task, Training

RUN = "versus"


def serve(task: Task) -> None:
    from hivemind import DHT

    dht = DHT(host_maddrs=[f"/ip4/{task.hosts[0]}/tcp/0"], start=True)
    path = Path(task.folder, "dht")
    path.with_suffix(".tmp").write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
    path.with_suffix(".tmp").rename(path)
    while True:
        time.sleep(1)


def work(task: Task, rank: int) -> None:
    import hivemind
    from hivemind.compression import Float16Compression, Uniform8BitQuantization

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
        dht=dht, run_id=RUN, batch_size_per_step=task.batch,
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


if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)  # hivemind's own processes cannot be spawned
    role, number, task = sys.argv[1], int(sys.argv[2]), Task.load(sys.argv[3])
    serve(task) if role == "service" else work(task, number)
