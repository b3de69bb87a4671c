"""Peer of peers.py: torch.distributed with Gloo, one float32 all-reduce of all parameters. No optimizer, no faults."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from peer_processes import Options, Rounds, answer, free_port, read_options, run_learners


def learner(rank: int, options: Options, rounds: Rounds, port: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, options.learners, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.learners)
    values = torch.randn(options.params)
    for _ in range(options.rounds + 1):
        rounds.time(lambda: dist.all_reduce(values))
        values.div_(options.learners)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = read_options()
    answer(run_learners(learner, options, free_port()), "all_reduce of one float32 tensor")
