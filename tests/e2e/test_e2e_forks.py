"""Children of a learner's process run its script again. That they live: contract/test_what_works.py, and the zoo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import LocalCluster, environment


def test_the_handlers_of_grpc_that_kill_children_are_off() -> None:
    code = "import os, diloco_worker; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    plain = {name: value for name, value in environment().items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=True)
    assert ended.stdout == "0\n"


UNGUARDED = """
import subprocess, sys, torch
from torch import nn
from torch.utils.data import DataLoader
import diloco_worker

model = nn.Linear(2, 2)
learner = diloco_worker.join(sys.argv[1], model, learner_id="a")
try:
    next(iter(DataLoader(torch.zeros(4, 2), num_workers=1, multiprocessing_context="spawn")))
except RuntimeError as error:
    print(type(error).__name__)
with open(__file__) as script:
    print(subprocess.run([sys.executable, "-c", script.read(), sys.argv[1]]).returncode)
learner.step(tokens=1)
print(learner.connections.figures()[0]["generation"], learner.state)
learner.close()
"""


@pytest.mark.gate  # contract/test_forks_contract.py has a short case
def test_a_script_that_its_children_run_again_stays_the_learner(tmp_path: Path) -> None:
    """A loader's worker runs it again up to `join`, for it has no guard; and so does a process that it starts."""
    (tmp_path / "train.py").write_text(UNGUARDED)
    with LocalCluster(tmp_path / "run", {"sync.fragments": 1}) as cluster:
        cluster.start(shards=1, workers=[])
        ended = subprocess.run(
            [sys.executable, "train.py", cluster.shards[0].endpoints.grpc],
            capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=120, check=False,
        )  # fmt: skip
    assert ended.stdout.split() == ["RuntimeError", "1", "1", "training"], ended.stderr
    spawned, started = re.findall(r"^diloco.*", ended.stderr, re.MULTILINE)
    assert re.fullmatch(r"diloco \(train.py, line 8\): .*spawned by this script.*\[WRONG_CALL\]", spawned)
    assert re.fullmatch(r"diloco: .* is a already: .*\[WRONG_CALL\]", started)
