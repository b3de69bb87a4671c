"""Islands under torchrun, with a real shard: what several ranks train together is what one process trains."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import island_rank
import pytest
import torch
from in_process import InProcessShard, settings_with
from island_rank import batch, plain, whole

import diloco_worker
import forks
from diloco_simulator.verify.histories import read_histories
from diloco_simulator.verify.judge import violations
from diloco_worker.global_model import lay_out

pytestmark = pytest.mark.timeout(900)
"""Each test starts several processes, and torch in each of them."""
ANSWER_S = 280.0
"""Of ranks that take a few seconds."""
STEPS = 30
UNTIL_DONE = 100_000
EXACT = {"push": "float32", "pull": "float32", "sync_every": 3, "fragments": 3}


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs island_rank.py in so many ranks, and gives what each of them has written."""
    return partial(by_torchrun, tmp_path)


@pytest.fixture
def island(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The same without torchrun, in ranks that start at once."""
    return partial(run, tmp_path)


def run(out: Path, ranks: int, *args: object) -> list[dict[str, Any]]:
    with forks.ranks(ranks, island_rank.forked, *map(str, (out, *args)), environment={}) as started:
        for rank in started:
            rank.join(ANSWER_S)
        assert [rank.exitcode for rank in started] == [0] * ranks
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def by_torchrun(out: Path, ranks: int, *args: object) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("island_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    ran = subprocess.run([*command, *map(str, (out, *args))], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def trained_alone(first: list[float], steps: int) -> torch.Tensor:
    """One process with the batches of all ranks, without any shard."""
    model = plain()
    torch.nn.utils.vector_to_parameters(torch.tensor(first), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = batch(step)
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def global_values(shard: InProcessShard) -> list[float]:
    """What the shard holds of the whole model, in its order."""
    tensors = {name: torch.empty_like(p) for name, p in plain().named_parameters()}
    for state in shard.loop.look(lambda: list(shard.core.fragments.values())):
        lay_out(state.values.theta, state.fragment, tensors)
    return torch.cat([values.flatten() for values in tensors.values()]).tolist()


@pytest.mark.parametrize(
    ("kind", "ranks", "how"),
    [
        ("ddp", 2, "island"),
        ("fsdp", 2, "island"),
        pytest.param("hsdp", 4, "island", marks=pytest.mark.gate),
        pytest.param("ddp", 2, "torchrun", marks=pytest.mark.gate),
    ],
)
def test_an_island_trains_as_one_process_with_all_batches(serve, request, kind: str, ranks: int, how: str) -> None:
    """The only learner, with an outer step that takes its weights over: what torn, misplaced or double elements would
    change is the model. So it is the same as without any shard, but for rounding."""
    shard = serve(settings_with(sync=EXACT))
    said = request.getfixturevalue(how)(ranks, kind, shard.address, STEPS, "island", 0.0)

    assert len(said) == ranks
    for key in ("steps", "tokens", "contributions", "versions", "values"):
        assert all(one[key] == said[0][key] for one in said), key
    assert said[0]["tokens"] == 16 * said[0]["steps"]
    assert [one["alive"] for one in said] == [1] * ranks, "one learner, and all ranks know it"
    assert [one["is_watched"] for one in said] == [kind == "ddp"] * ranks
    expected = trained_alone(said[0]["first"], STEPS)
    assert [one["is_whole"] for one in said] == [True] * ranks
    assert [one["final"] for one in said] == [global_values(shard)] * ranks, "finish leaves what the shard has"
    torch.testing.assert_close(torch.tensor(said[0]["values"]), expected, rtol=1e-4, atol=1e-5)

    ledger = shard.ledger
    assert ledger.rounds >= 3, "each fragment"  # how many more is the machine's
    assert ledger.participants == ledger.rounds, "every round has one contribution, of the whole island"
    assert not ledger.rejected
    assert ledger.tokens_merged == ledger.tokens_accepted
    assert {m.learner_id for m in shard.core.membership.all()} == {"island"}


def test_ranks_of_fsdp2_with_mixed_precision_push_and_pull_what_they_hold(serve, island) -> None:
    shard = serve(settings_with(sync={"push": "int8", "pull": "int4", "sync_every": 4, "fragments": 3}))
    said = island(2, "mixed", shard.address, STEPS, "island", 0.005)
    assert said[0]["values"] == said[1]["values"]
    assert min(said[0]["versions"].values()) >= 1
    assert sum(one["local"] for one in said) == len(said[0]["values"])
    pushed = [one["pushed"] for one in said]
    assert 0.8 < pushed[0] / pushed[1] < 1.25


@pytest.mark.parametrize("kind", ["ddp+norm", "fsdp+norm"])
def test_ranks_push_their_share_of_the_statistics_and_finish_with_the_same(serve, island, kind: str) -> None:
    shard = serve(settings_with(sync=EXACT))
    said = island(2, kind, shard.address, STEPS, "island", 0.005)
    assert [one["is_whole"] for one in said] == [True, True]
    assert said[0]["buffers"] == said[1]["buffers"]
    mean, _, count = said[0]["buffers"]  # the shard may have made another version since
    assert 0 < count <= STEPS
    assert all(mean), "the shares of both ranks"


def test_an_island_goes_on_from_its_checkpoint_with_another_number_of_ranks(serve, island, tmp_path: Path) -> None:
    """torch.distributed.checkpoint holds the model and the learner's counts; every step of both processes counts."""
    patient = {"lease_s": 60.0, "heartbeat_s": 5.0}  # a generation more would be the machine's
    shard = serve(settings_with(run={"history": tmp_path / "history"}, sync=EXACT, lease=patient))
    before = island(2, "fsdp", shard.address, 20, "island", 0.0, tmp_path / "checkpoint")
    after = island(3, "fsdp", shard.address, 20, "", 0.0, tmp_path / "checkpoint")

    assert [one["state"]["inner_step"] for one in before + after] == [20] * 2 + [40] * 3
    assert [one["state"]["tokens"] for one in before + after] == [20 * 16] * 2 + [40 * 16] * 3
    assert [one["state"]["learner_id"] for one in after] == ["island"] * 3
    assert [one["loaded"] for one in after] == [before[0]["values"]] * 3
    (island,) = shard.core.membership.all()
    assert (island.learner_id, island.generation) == ("island", 2)
    assert not list(violations(read_histories(tmp_path / "history")))


def test_a_process_and_two_islands_are_three_learners_of_one_run(serve, tmp_path: Path) -> None:
    """Of the same model, in other meshes: the manifest is made of global shapes. Each round takes all three."""
    sync = {"push": "int8", "sync_every": 4, "fragments": 3, "quorum": 3}
    shard = serve(settings_with(run={"tokens": 5000}, sync=sync))
    ended: list[list[dict[str, Any]]] = []

    def started(kind: str, ranks: int) -> None:
        out = tmp_path / kind
        out.mkdir()
        ended.append(run(out, ranks, kind, shard.address, UNTIL_DONE, kind, 0.02))

    islands = [threading.Thread(target=started, args=args) for args in (("ddp", 2), ("fsdp", 2))]
    for thread in islands:
        thread.start()
    alone = diloco_worker.join(shard.address, plain(), learner_id="alone", wait_s=120.0)
    with alone:
        while not alone.done:
            alone.step(tokens=16)
            time.sleep(0.02)
    for thread in islands:
        thread.join(ANSWER_S)
    assert len(ended) == 2
    for said in ended:
        assert said[0]["contributions"]["merged"] >= 3
        assert all(one["values"] == said[0]["values"] for one in said)
    merged = {m.learner_id: m.merged for m in shard.core.membership.all()}
    assert merged.keys() == {"alone", "ddp", "fsdp"}
    assert min(merged.values()) >= 3
