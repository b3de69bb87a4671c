"""Peer of peers.py: hivemind, decentralised averaging with 8 bit compression, as OpenDiLoCo uses it.

A round: copy the pseudo-gradient into the averager's shared tensors, all-reduce among the group, take the outer
Nesterov step, copy the new values into the model. As in hivemind's optimizer, the group is found beforehand, so the
seconds do not include matchmaking.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Uniform8BitQuantization

from peer_processes import SYNC_S, Options, Rounds, answer, read_options, run_learners


def learner(rank: int, options: Options, rounds: Rounds, initial_peers: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for hivemind's own processes: it cannot spawn them
    torch.set_num_threads(1)
    values = [torch.randn(size) for size in options.sizes]
    anchors = [torch.nn.Parameter(v.clone()) for v in values]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    dht = DHT(initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DecentralizedAverager(
        [torch.zeros_like(v) for v in values], dht, start=True, prefix="benchmark",
        target_group_size=options.learners, min_group_size=options.learners, min_matchmaking_time=10.0,
        request_timeout=5.0, allreduce_timeout=SYNC_S, compression=Uniform8BitQuantization(),
    )  # fmt: skip

    def synchronise() -> None:
        with averager.get_tensors() as deltas, torch.no_grad():
            for delta, anchor, value in zip(deltas, anchors, values, strict=True):
                torch.sub(anchor, value, out=delta)
        step.allow_allreduce()
        group = step.result(SYNC_S)
        assert group is not None, "nobody to average with"
        assert len(group) == options.learners, f"averaged with {len(group)}"
        with averager.get_tensors() as deltas, torch.no_grad():
            for anchor, delta in zip(anchors, deltas, strict=True):
                anchor.grad = delta
            outer.step()
            for value, anchor in zip(values, anchors, strict=True):
                value.copy_(anchor)
                anchor.grad = None

    try:
        for _ in range(options.rounds + 1):
            for value in values:
                value.add_(0.01 * (rank + 1))
            step = averager.step(wait=False, require_trigger=True, timeout=SYNC_S)
            while step.stage is not AveragingStage.AWAITING_TRIGGER:
                assert not step.done(), step.exception()
                time.sleep(0.02)
            rounds.time(synchronise)
        rounds.time(lambda: None)  # a last barrier, so that nobody leaves before all are done
        rounds.seconds.pop()
    finally:
        averager.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    options = read_options()
    first = DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    try:
        addresses = [str(address) for address in first.get_visible_maddrs()]
        seconds = run_learners(learner, options, addresses)
    finally:
        first.shutdown()
    answer(seconds, "8 bit butterfly all-reduce, outer Nesterov step; without matchmaking")
