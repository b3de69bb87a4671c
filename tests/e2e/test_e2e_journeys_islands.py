"""The examples of islands, mistyped: rank 0 answers in at most three lines, with a stable code; the others are short.

As in test_e2e_journeys.py, but with two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mistakes import EXAMPLES, answer, assert_told, before_step, changed, run_ranks
from test_e2e_examples import shard

import forks

DDP = (EXAMPLES / "ddp.py").read_text()
FSDP2 = (EXAMPLES / "fsdp2.py").read_text()
JOIN = {DDP: 'run="spirals", island=dist.group.WORLD', FSDP2: 'run="spirals", island=mesh'}
BEFORE_JOIN = "    optimizer = "


def joined(script: str, options: str) -> str:
    """With these options of `join`."""
    return changed(script, (JOIN[script], options))


def and_joined(script: str, options: str) -> str:
    """With these options of `join` beside its own."""
    return joined(script, f"{JOIN[script]}, {options}")


def before_join(script: str, line: str) -> str:
    return changed(script, (BEFORE_JOIN, f"    {line}\n{BEFORE_JOIN}"))


STATE = '{"run": "spirals", "learner_id": "a", "index": 0, "inner_step": 1, "tokens": 1}'
OF_RANK_0 = f"state={STATE} if dist.get_rank() == 0 else None"
MISTAKES: dict[str, tuple[str, str, str]] = {
    # what is wrong -> the script, the shards that it is given, the code that rank 0 answers with
    "ddp: no port": (DDP, "127.0.0.1", "BAD_CONFIG"),
    "ddp: a port where nobody is": (and_joined(DDP, "wait_s=1.0"), "127.0.0.1:9", "CANNOT_CONNECT"),
    "ddp: another run": (changed(DDP, ('"spirals"', '"spiral"')), "SHARD", "WRONG_RUN"),
    "ddp: no island": (joined(DDP, 'run="spirals"'), "SHARD", "UNSUPPORTED_MODEL"),
    "ddp: each rank alone": (joined(DDP, 'run="spirals", island="alone"'), "SHARD", "UNSUPPORTED_MODEL"),
    "ddp: ranks as a list": (joined(DDP, 'run="spirals", island=[0, 1]'), "SHARD", "WRONG_CALL"),
    "ddp: a checkpoint at one rank": (and_joined(DDP, OF_RANK_0), "SHARD", "BAD_CONFIG"),
    "ddp: a model of each rank": (
        changed(DDP, ("model = DistributedDataParallel(net)", "model = nn.Linear(2, 2 + dist.get_rank())")),
        "SHARD", "BAD_CONFIG",
    ),
    "ddp: a checkpoint after join": (
        before_step(DDP, "model.load_state_dict(model.state_dict())"), "SHARD", "MODEL_CHANGED",
    ),
    "ddp: negative tokens": (changed(DDP, ("tokens=len(points)", "tokens=-1")), "SHARD", "BAD_CONFIG"),
    "fsdp2: a URL": (FSDP2, "http://127.0.0.1:50051", "BAD_CONFIG"),
    "fsdp2: a shard too many": (and_joined(FSDP2, "wait_s=60.0"), "SHARD,127.0.0.1:9", "BAD_CONFIG"),
    "fsdp2: a learner id with a space": (and_joined(FSDP2, 'learner_id="node 7"'), "SHARD", "BAD_LEARNER_ID"),
    "fsdp2: no island": (joined(FSDP2, 'run="spirals"'), "SHARD", "UNSUPPORTED_MODEL"),
    "fsdp2: each rank alone": (joined(FSDP2, 'run="spirals", island="alone"'), "SHARD", "UNSUPPORTED_MODEL"),
    "fsdp2: an island of one rank": (
        joined(FSDP2, 'run="spirals", island=[dist.new_group([i]) for i in range(2)][dist.get_rank()]'),
        "SHARD", "UNSUPPORTED_MODEL",
    ),
    "fsdp2: sharded in part": (
        changed(FSDP2, ("    fully_shard(model, mesh=mesh)\n", "    model.append(nn.Linear(2, 2))\n")),
        "SHARD", "UNSUPPORTED_MODEL",
    ),
    "fsdp2: sharded by columns": (
        changed(FSDP2, ("fully_shard(layer, mesh=mesh)", "fully_shard(layer, mesh=mesh, shard_placement_fn=by_column)"),
                ("def main", "def by_column(parameter):\n    from torch.distributed.tensor import Shard\n\n"
                             "    return Shard(parameter.dim() - 1)\n\n\ndef main")),
        "SHARD", "UNSUPPORTED_MODEL",
    ),
    "fsdp2: in float64": (
        changed(FSDP2, ("    mesh = ", "    model.double()\n    mesh = ")), "SHARD", "UNSUPPORTED_MODEL",
    ),
    "fsdp2: a step after finish": (before_step(FSDP2, "learner.finish()"), "SHARD", "LEARNER_ENDED"),
    "fsdp2: tokens of a whole run": (changed(FSDP2, ("tokens=len(points)", "tokens=2**41")), "SHARD", "BAD_CONFIG"),
}  # fmt: skip
OF_ANYBODY = {
    "ddp: no port", "ddp: a port where nobody is", "ddp: another run", "ddp: negative tokens", "fsdp2: a URL",
    "fsdp2: a shard too many", "fsdp2: a learner id with a space", "fsdp2: in float64", "fsdp2: tokens of a whole run",
}  # fmt: skip
"""Not mistakes of islands alone: in test_e2e_journeys.py, and here by `make gate`."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a shard whose run has no end. Ranks start at once: what they are forked from has imported everything."""
    forks.get_ready()
    folder = tmp_path_factory.mktemp("shard")
    with shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as found:
        yield found


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=[pytest.mark.gate] * (m in OF_ANYBODY)) for m in MISTAKES])
def test_ranks_answer_a_mistake_in_three_lines(mistake: str, address: str, tmp_path: Path) -> None:
    script, shards, code = MISTAKES[mistake]
    (path := tmp_path / "train.py").write_text(script)

    leader, *others = run_ranks(path, [shards.replace("SHARD", address)], tmp_path)

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
