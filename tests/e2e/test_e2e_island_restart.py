"""A rank of an island dies, twice, and torchrun starts all ranks again. Then one of them is told to go (SIGTERM)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_S, LocalCluster, environment, until

RANK = """
import os, signal, sys, torch, torch.distributed as dist, diloco_worker
from torch import nn
from torch.nn.parallel import DistributedDataParallel

diloco_worker.init_island("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    learner.step(tokens=8)

with diloco_worker.join(sys.argv[1], model, learner_id="island", island=dist.group.WORLD) as learner:
    for _ in range(20):
        step()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < 2:
        if dist.get_rank() == 1:
            os._exit(1)
        dist.barrier()
    try:
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        while True:
            step()
    except SystemExit as ended:
        print("start", start, "ended with", ended.code, "after step", learner.inner_step, flush=True)
"""


@pytest.mark.gate
@pytest.mark.timeout(300)
def test_ranks_find_each_other_after_a_restart_and_leave_together(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with LocalCluster(tmp_path / "run", {"run.tokens": 0, "sync.sync_every": 500}) as cluster:
        cluster.start(shards=1, workers=[])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, "--max-restarts=2", str(script), cluster.shards[0].endpoints.grpc]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), check=False
        )
        assert ended.returncode == 0, ended.stderr
        ranks = [line for line in ended.stdout.splitlines() if line.startswith("start 2 ended with 143")]
        assert len(ranks) == 2, ended.stderr
        assert ranks[0] == ranks[1], "both have left after the same step"
        of_island = until(lambda: cluster.learner("island"), "the island")
        assert of_island["state"] == "left"
        steps = int(ranks[0].split()[-1])
        assert steps > 20
        assert of_island["tokens_merged"] == steps * 2 * 8 * len(cluster.shards[0].status()["fragments"])
