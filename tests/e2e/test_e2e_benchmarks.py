"""The benchmarks run from the command line, at tiny sizes, and write down what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LIMIT_S = 280.0
pytestmark = pytest.mark.gate


def run(command: str, *, codes: tuple[int, ...] = (0,)) -> str:
    script, *options = command.split()
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode in codes, ended.stdout + ended.stderr
    return ended.stdout


def test_growth_says_what_one_core_serves() -> None:
    said = run("growth.py --only=learners,shards --rounds=1 --seconds=0 --largest=0.01")
    one, two = ([float(cell) for cell in line.split()] for line in said.splitlines()[1:])
    assert (one[3], two[3]) == (1, 2)  # shards
    assert min(*one, *two) > 0


def test_slices_open_a_round_of_every_fragment() -> None:
    assert run("slices.py --learners=9 --fragments=5").startswith("5 rounds opened for 9 learners")


def test_an_outer_round_is_measured_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "round.json"
    run(f"outer_round.py --params=2e5 --learners=2 --shards=2 --fragments=4 --rounds=1 --json={path}")
    found = json.loads(path.read_text())
    assert 1.0 < found["bytes_up_per_param"] < 1.1
    assert 2.0 <= found["bytes_down_per_param"] < 2.1
    assert min(*found["seconds"], *found["gloo_seconds"], found["ratio_to_gloo"], found["learner_cpu_seconds"]) > 0


def test_the_memory_of_a_shard_is_measured() -> None:
    """The bound is for large models: a tiny one exceeds it by what libraries take."""
    said = run("shard_memory.py --parameters=1000000 --fragments=4 --learners=2 --rounds=1", codes=(0, 1))
    idle, peak, contributions = (int(figure) for figure in re.findall(r"(\d+) MB$", said, re.MULTILINE))
    assert peak > idle > contributions >= 2  # two learners, a byte per parameter each


def test_step_cost_measures_what_a_step_of_the_learner_takes(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    run(f"step_cost.py --params=1e5 --steps=30 --json={path}", codes=(0, 1))  # 1: slower than promised
    found = json.loads(path.read_text())
    assert min(found["versions_applied_per_step"], found["contributions_merged_per_step"]) > 0
    assert 0 < found["without_snapshot_seconds"]["median"] < found["step_cost_seconds"]["median"]
    assert min(found["snapshot_seconds_median"], found["copy_seconds_median"]) > 0
