"""The example of an island: mistyped, rank 0 says so in three lines; when a rank dies, torchrun starts all again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistakes import EXAMPLES, answer, assert_told, before_step, changed, run_ranks
from test_e2e_examples import shard

import forks
from processes import DEADLINE_S, LocalCluster, environment, until

DDP = (EXAMPLES / "ddp.py").read_text()
JOIN = 'run="spirals", island=dist.group.WORLD'
STATE = '{"run": "spirals", "learner_id": "a", "index": 0, "inner_step": 1, "tokens": 1, "tokens_merged": 1}'
OF_RANK_0 = f"{JOIN}, state={STATE} if dist.get_rank() == 0 else None"
MISTAKES: dict[str, tuple[str, str]] = {
    # what is wrong -> the script, the code that rank 0 answers with
    "a checkpoint at one rank": (changed(DDP, (JOIN, OF_RANK_0)), "BAD_CONFIG"),
    "a model of each rank": (
        changed(DDP, ("model = DistributedDataParallel(net)", "model = nn.Linear(2, 2 + dist.get_rank())")),
        "BAD_CONFIG",
    ),
    "a checkpoint after join": (before_step(DDP, "model.load_state_dict(model.state_dict())"), "MODEL_CHANGED"),
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a shard whose run has no end. Ranks start at once: what they are forked from has imported everything."""
    forks.get_ready()
    folder = tmp_path_factory.mktemp("shard")
    with shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as found:
        yield found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_ranks_answer_a_mistake_in_three_lines(mistake: str, address: str, tmp_path: Path) -> None:
    script, code = MISTAKES[mistake]
    (path := tmp_path / "train.py").write_text(script)

    leader, *others = run_ranks(path, [address], tmp_path)

    assert_told(leader, code)
    for said in others:
        assert len(answer(said)) <= 3, said
        assert "Traceback" not in said


def test_a_rank_that_fails_alone_says_why_and_ends(address: str, tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(before_step(DDP, "learner.poll() if dist.get_rank() else None"))

    leader, other = run_ranks(path, [address], tmp_path)

    assert_told(other, "ISLAND_BROKEN")
    in_its_own_all_reduce = re.search("Connection (closed|reset) by peer|Broken pipe", leader)
    assert in_its_own_all_reduce, leader


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
