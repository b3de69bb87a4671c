"""The example of an island, mistyped: rank 0 answers in at most three lines, with a stable code; the others are short.

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
