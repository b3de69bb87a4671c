"""Peer of peers.py: torchft, its DiLoCo with manager, quorum and lighthouse; a learner is a replica group of one.

A round is one inner step that synchronises the whole model: quorum, pseudo-gradient, float32 all-reduce by Gloo in
buckets, commit vote, outer Nesterov step. The inner optimizer itself does nothing.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from peer_processes import SYNC_S, Options, Rounds, answer, free_port, read_options, run_learners


def learner(rank: int, options: Options, rounds: Rounds, lighthouse: Any) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.randn(size) for size in options.sizes)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    limit = timedelta(seconds=SYNC_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=options.learners, use_async_quorum=False,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, timeout=limit, quorum_timeout=limit,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"learner-{rank}", hostname="127.0.0.1",
    )  # fmt: skip
    try:
        with DiLoCo(manager, [model], inner, outer, sync_every=1, pin_memory=False, use_bucketization=True):
            for _ in range(options.rounds + 1):
                with torch.no_grad():
                    for values in model:
                        values.add_(0.01 * (rank + 1))
                rounds.time(inner.step)
        assert manager.current_step() == options.rounds + 1, "a round was not committed"
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    options = read_options()
    lighthouse = LighthouseServer(
        bind=f"127.0.0.1:{free_port()}", min_replicas=options.learners, join_timeout_ms=int(1000 * SYNC_S),
        quorum_tick_ms=10,
    )  # fmt: skip
    try:
        address = lighthouse.address().replace(lighthouse.address().rsplit(":", 1)[0], "http://127.0.0.1")
        seconds = run_learners(learner, options, address)
    finally:
        lighthouse.shutdown()
    answer(seconds, "DiLoCo: quorum, float32 all-reduce in buckets, commit vote, outer Nesterov step")
